"""Units of data: binary ones for memory, decimal ones for rates."""

from __future__ import annotations

KIB = 2.0**10
MIB = 2.0**20
GIB = 2.0**30

MEGA = 1e6
"""MLflow's system metrics count megabytes, not mebibytes."""
