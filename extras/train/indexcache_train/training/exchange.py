"""Exchange two folders in one step, as Linux can (renameat2(2)) on most file systems."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

_HERE, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux
_UNKNOWN = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM}  # to the file system, kernel or a sandbox


def exchange(one: Path, other: Path) -> bool:
    """Let two folders of one file system change names; return false, and do nothing, where that is not known.

    Raises:
        OSError: if one of them can't be renamed.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    rename.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    if rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNKNOWN:
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))
