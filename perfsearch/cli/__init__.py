"""The commands, and what a person sees of them; ``perfsearch`` itself is in ``search``."""
