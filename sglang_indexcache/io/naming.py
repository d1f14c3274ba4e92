"""Errors of the operating system that name their file."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

_NUMBER = re.compile(r"\(os error (\d+)\)")  # in errors of libraries that are written in Rust


@contextmanager
def naming(path: object) -> Iterator[None]:
    """Name `path` in errors while it is written: a full disk names no file, and safetensors raises its own error.

    Raises:
        OSError: with a file name.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        number = errno.EIO if error.errno is None else error.errno  # NumPy only says how much was not written
        raise OSError(number, error.strerror or str(error), str(path)) from None
    except Exception as error:
        found = _NUMBER.search(str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from None
