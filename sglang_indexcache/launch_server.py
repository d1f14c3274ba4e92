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
from importlib.metadata import entry_points
from importlib.util import find_spec

from sglang_indexcache.errors import IndexCacheError
from sglang_indexcache.pattern_file import PatternFile
from sglang_indexcache.plugin import ALLOW_MISMATCH_VARIABLE, PATTERN_VARIABLE, refuse

PATTERN_FLAG = "--indexcache-pattern"
ALLOW_FLAG = "--indexcache-allow-config-mismatch"
GROUP, ENTRY = "sglang.srt.plugins", "indexcache"
ALLOWED_PLUGINS_VARIABLE = "SGLANG_PLUGINS"


class LaunchError(IndexCacheError):
    """A command line or environment in which the pattern would not be served."""


def split_arguments(arguments: Sequence[str]) -> tuple[str | None, bool, list[str]]:
    """Split off our flags: the pattern, whether a mismatch is allowed, and what is SGLang's.

    Raises:
        LaunchError: if the pattern flag has no value or stands there twice.
    """
    pattern, allowed, rest = None, False, []
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name == PATTERN_FLAG:
            value = value if equals else next(words, "")
            if not value or value.startswith("--"):
                raise LaunchError(f"{PATTERN_FLAG} has no value, expected a pattern file")
            if pattern is not None:
                raise LaunchError(f"{PATTERN_FLAG} is given twice")
            pattern = value
        elif word == ALLOW_FLAG:
            allowed = True
        else:
            rest.append(word)
    return pattern, allowed, rest


def check_plugin_is_found() -> None:
    """SGLang finds the plugin by entry point; without it the server would run, and without the pattern.

    Raises:
        LaunchError: if SGLang is not installed, the entry point is not there, or `SGLANG_PLUGINS` leaves it out.
    """
    if find_spec("sglang") is None:
        raise LaunchError("SGLang is not installed; expected: pip install 'sglang-indexcache[sglang]'")
    if not any(entry.name == ENTRY for entry in entry_points(group=GROUP)):
        raise LaunchError("SGLang would not find the plugin: sglang-indexcache is not installed in this environment")
    allowed = {name.strip() for name in os.environ.get(ALLOWED_PLUGINS_VARIABLE, "").split(",") if name.strip()}
    if allowed and ENTRY not in allowed:
        raise LaunchError(f"{ALLOWED_PLUGINS_VARIABLE} leaves the plugin out; expected {ENTRY} in it")


def main(arguments: Sequence[str]) -> None:
    """Start the server; the plugin does the rest in every process."""
    try:
        pattern, allowed, rest = split_arguments(arguments)
        check_plugin_is_found()
        if any(word in ("-h", "--help") for word in rest):
            sys.stdout.write(f"{__doc__}\n")  # SGLang's own help follows
        elif pattern is None:
            raise LaunchError(
                f"{PATTERN_FLAG} is missing, expected a pattern file; without one use sglang.launch_server"
            )
        else:
            PatternFile.load(pattern)  # a mistake is said before SGLang takes its seconds to import
            os.environ[PATTERN_VARIABLE] = pattern
            os.environ[ALLOW_MISMATCH_VARIABLE] = "1" if allowed else "0"
    except IndexCacheError as error:
        refuse(str(error))
    sys.argv = ["sglang.launch_server", *rest]
    runpy.run_module("sglang.launch_server", run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
