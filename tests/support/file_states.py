"""What a directory holds, to tell whether anything in it has changed."""

import contextlib
import os
import stat
from pathlib import Path


def state_of(directory, *left_out):
    """Kind, content, mode, time, inode and so on of all below, by path; of directories the mode."""
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
                small = stat.S_ISREG(now.st_mode) and now.st_size < 2**20
                content = path.read_bytes() if small else now.st_size
                owner = now.st_uid, now.st_gid, attributes_of(path)
                seen = content, now.st_mode, now.st_mtime_ns, owner, now.st_ino
            found[str(path.relative_to(directory))] = seen
    return found


def attributes_of(path):
    """Extended attributes of a file; none where its file system has none."""
    with contextlib.suppress(OSError):
        return {name: os.getxattr(path, name) for name in os.listxattr(path)}
    return {}
