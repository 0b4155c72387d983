"""Packages that look installed, made for one test."""

import os
import sys


def install(directory, **packages):
    """Write modules where Python has a user's packages; the environment in which they are there."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    site = directory / "lib" / version / "site-packages"
    site.mkdir(parents=True, exist_ok=True)
    for name, code in packages.items():
        (site / f"{name}.py").write_text(code)
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONUSERBASE": str(directory), "PYTHONPATH": os.pathsep.join(paths)}
