"""perfsearch finds the fastest configuration of a PyTorch training job and proves the gain."""

__version__ = "0.1.0"
