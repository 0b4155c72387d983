"""An unchanged DeepSpeed job: its configuration is tuned, and its own launcher starts the ranks.

``path/sitecustomize.py`` is found by every Python process of the job, as its directory leads
``PYTHONPATH``; in a rank it waits for the job to import DeepSpeed, and then wraps
``deepspeed.initialize`` and the engine's steps (``rank``, ``hook``). The controller imports no
torch: what it asks of the ranks is in ``request``.
"""
