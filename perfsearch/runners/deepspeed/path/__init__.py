"""The directory that leads the ranks' ``PYTHONPATH``; it holds ``sitecustomize`` alone."""
