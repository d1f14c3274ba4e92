"""python -m sglang_indexcache.launch_server: SGLang's server with a pattern, or no server.

All flags of `sglang.launch_server`, and two of ours:

    --indexcache-pattern FILE[@RETENTION]   the pattern to serve, for instance deploy/glm5.yaml@1/4
    --indexcache-allow-config-mismatch      accept a file made for another config.json
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from sglang_indexcache.plugin import ALLOW_MISMATCH_VARIABLE, PATTERN_VARIABLE, refuse

PATTERN_FLAG = "--indexcache-pattern"
ALLOW_FLAG = "--indexcache-allow-config-mismatch"


def split_arguments(arguments: Sequence[str]) -> tuple[str | None, bool, list[str]]:
    """Split off our flags: the pattern, whether a mismatch is allowed, and what is SGLang's.

    Raises:
        ValueError: if the pattern flag has no value or stands there twice.
    """
    pattern, allowed, rest = None, False, []
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name == PATTERN_FLAG:
            value = value if equals else next(words, "")
            if not value or value.startswith("--"):
                raise ValueError(f"{PATTERN_FLAG} has no value, expected a pattern file")
            if pattern is not None:
                raise ValueError(f"{PATTERN_FLAG} is given twice")
            pattern = value
        elif word == ALLOW_FLAG:
            allowed = True
        else:
            rest.append(word)
    return pattern, allowed, rest


def main(arguments: Sequence[str]) -> None:
    """Start the server; the plugin does the rest in every process."""
    try:
        pattern, allowed, rest = split_arguments(arguments)
    except ValueError as error:
        refuse(str(error))
    if find_spec("sglang") is None:
        refuse("SGLang is not installed; expected: pip install 'sglang-indexcache[sglang]'")
    if any(word in ("-h", "--help") for word in rest):
        sys.stdout.write(f"{__doc__}\n")  # SGLang's own help follows
    elif pattern is None:
        refuse(f"{PATTERN_FLAG} is missing, expected a pattern file; without one use sglang.launch_server")
    else:
        os.environ[PATTERN_VARIABLE] = pattern
        os.environ[ALLOW_MISMATCH_VARIABLE] = "1" if allowed else "0"
    sys.argv = ["sglang.launch_server", *rest]
    runpy.run_module("sglang.launch_server", run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
