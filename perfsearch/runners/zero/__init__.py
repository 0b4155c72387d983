"""ZeRO stages, micro-batch and activation checkpointing, with torch alone."""
