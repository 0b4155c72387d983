"""What perfsearch does inside the process of an unchanged script: torch only, nothing else heavy.

Constructors are wrapped before the script is run, so that knobs reach what the script builds;
steps, batches and losses are recognised as they pass. Nothing here runs in the controller, apart
from the modules that say so: they import no torch.
"""
