"""Memory of cards that are named and not there."""

from __future__ import annotations

MEMORY_GIB = {
    "T4": 15.0,
    "V100-16": 15.8,
    "V100-32": 31.7,
    "A10": 22.5,
    "A100-40": 39.4,
    "A100-80": 79.2,
    "L4": 22.0,
    "L40S": 44.4,
    "RTX3090": 23.7,
    "RTX4090": 23.6,
    "H100": 79.2,
    "H200": 139.8,
    "B200": 178.4,
}
"""What a process can have of each, as the CUDA runtime tells it; a little less than is printed on
the box."""
