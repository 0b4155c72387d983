"""What perfsearch does inside the ranks of an unchanged DeepSpeed job.

``path/sitecustomize.py`` is found by every Python process of the job, as its directory leads
``PYTHONPATH``; in a rank it waits for the job to import DeepSpeed, and then wraps
``deepspeed.initialize`` and the engine's steps. Nothing of it runs in the controller, apart from
``request``, which imports no torch.
"""
