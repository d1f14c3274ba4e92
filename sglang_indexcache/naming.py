"""Errors of the operating system that name their file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

_NUMBER = re.compile(r"\(os error (\d+)\)")  # of libraries that are written in Rust


@contextmanager
def naming(path: object) -> Iterator[None]:
    """Let what fails while `path` is written name it: writing to a full disk does not, and safetensors raises its own.

    Raises:
        OSError: with a file name.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise
    except Exception as error:
        number = _NUMBER.search(str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None
