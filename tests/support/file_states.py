"""What a directory holds, to tell whether anything in it has changed."""

import os
from pathlib import Path


def state_of(directory, *left_out):
    """Kind, content, mode, time and inode of all below, by path; of directories the mode."""
    found = {}
    for above, directories, files in os.walk(directory):
        directories[:] = [d for d in directories if d not in left_out]
        for name in [*directories, *(f for f in files if f not in left_out)]:
            path = Path(above, name)
            now = path.lstat()
            if path.is_symlink():
                seen = os.readlink(path), now.st_ino
            elif path.is_dir():
                seen = ("directory", now.st_mode)
            else:
                content = path.read_bytes() if now.st_size < 2**20 else now.st_size
                seen = content, now.st_mode, now.st_mtime_ns, now.st_ino
            found[str(path.relative_to(directory))] = seen
    return found
