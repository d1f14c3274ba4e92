"""python -m sglang_indexcache.launch_server: SGLang with a pattern, or no server.

All flags of `sglang.launch_server`, and seven of ours (docs/serving.md):

  --indexcache-pattern PATTERN        FILE, FILE@1/4, letters, or a file on the
                                      hub: org/name/FILE, org/name@REVISION/FILE
  --indexcache-allow-config-mismatch  accept a file made for another config.json
  --indexcache-shard-indexers         with a pattern or alone: ranks share out
                                      the rows of prompts that they select for
  --indexcache-union-attention        with a pattern or alone, on Hopper:
                                      prompts attend over unions of selections
  --indexcache-no-grouping            attend from each query of a block alone
  --indexcache-allow-unread-source    replace methods that none of us has read
  --indexcache-calibrate              instead of a pattern: a server on which
                                      indexcache-search switches patterns
                                      (SGLANG_INDEXCACHE_ADMIN_API_KEY: its
                                      --admin-api-key and --api-key, unseen)
"""

from __future__ import annotations

if __name__ == "__main__":  # before the other imports, so that Ctrl-C while they load is one line, too
    from sglang_indexcache.process import begin

    begin("indexcache", "sglang")

import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from importlib.util import find_spec

from sglang_indexcache import process
from sglang_indexcache.checkpoint.findings import launches
from sglang_indexcache.io.errors import IndexCacheError
from sglang_indexcache.io.refusal import ADMIN_KEY_VARIABLE, refuse, refuse_unforeseen
from sglang_indexcache.pattern_file.pattern_name import PatternSpec
from sglang_indexcache.sglang.asked import PATTERN_FLAG, Asked, LaunchError, split_arguments
from sglang_indexcache.version import requirement, version

GROUP, ENTRY = "sglang.srt.plugins", "indexcache"
ALLOWED_PLUGINS_VARIABLE = "SGLANG_PLUGINS"
CALIBRATION_FLAGS = ("--disable-radix-cache", "--disable-cuda-graph", "--enable-fp32-lm-head")


def check_plugin_is_found() -> None:
    """Check that SGLang would find the plugin; without it the server would run without the pattern.

    Raises:
        LaunchError: if SGLang is not installed, the entry point is not there, or `SGLANG_PLUGINS` leaves it out.
    """
    if find_spec("sglang") is None:
        raise LaunchError(f"SGLang is not installed; expected: pip install {requirement('sglang')}")
    if not any(entry.name == ENTRY for entry in entry_points(group=GROUP)):
        raise LaunchError("SGLang would not find the plugin: sglang-indexcache is not installed in this environment")
    allowed = {name.strip() for name in os.environ.get(ALLOWED_PLUGINS_VARIABLE, "").split(",") if name.strip()}
    if allowed and ENTRY not in allowed:
        raise LaunchError(f"{ALLOWED_PLUGINS_VARIABLE} leaves the plugin out; expected {ENTRY} in it")


def tell(spec: PatternSpec, asked: Asked, rest: Sequence[str]) -> None:
    """Say what is known of the pattern together with SGLang's flags, which SGLang's own parser reads.

    Raises:
        LaunchError: if one of them can't be combined with it.
        ModelConfigError: if the model is a path of nothing.
    """
    reader = launches()
    notes = [] if reader is None else [*reader.tell(spec, asked, rest)]
    if spec.known().is_full:
        return
    if spec.text != asked.pattern:
        notes.insert(0, f"the pattern is {spec.text}")
    for note in notes:
        sys.stderr.write(f"note from indexcache: {note.removeprefix('note: ')}\n")


def prepare(arguments: Sequence[str]) -> Sequence[str]:
    """Check what can be checked before SGLang takes its seconds to import, and set the environment.

    Returns:
        The arguments for SGLang.

    Raises:
        IndexCacheError: if the pattern would not be served.
    """
    asked, rest = split_arguments(arguments)
    if {"-h", "--help"}.intersection(rest):
        sys.stdout.write(f"{__doc__}\n")  # SGLang's own help follows
        sys.stdout.flush()
        check_plugin_is_found()
        return rest
    check_plugin_is_found()
    if asked.calibrate:
        asked.to_environment()
        key = os.environ.pop(ADMIN_KEY_VARIABLE, None)
        # They come before the user's flags, which win. Flags that a running program sets are in no process list. There
        # are two, since SGLang shows the admin's key in /server_info to everybody whom it answers.
        keys = () if not key else tuple(f"{flag}={key}" for flag in ("--api-key", "--admin-api-key"))
        return (*CALIBRATION_FLAGS, *keys, *rest)
    if asked.pattern is None and not asked.without_pattern:
        raise LaunchError(f"{PATTERN_FLAG} is missing, expected a pattern file; without one use sglang.launch_server")
    if asked.pattern is not None:
        spec = PatternSpec.read(asked.pattern)
        tell(spec, asked, rest)
        asked = replace(asked, pattern=spec.text)  # of a file on the hub, with its commit: no process reads another one
    asked.to_environment()
    return rest


def main(arguments: Sequence[str]) -> None:
    """Start the server; the plugin does the rest in every process."""
    if "--version" in arguments:  # SGLang has no such flag
        sys.stdout.write(f"sglang-indexcache {version()}\n")
        return
    try:
        rest = prepare(arguments)
    except IndexCacheError as error:
        refuse(str(error))
    except Exception as error:
        refuse_unforeseen("the launcher", error)
    process.hand_over()
    sys.argv = ["sglang.launch_server", *rest]
    runpy.run_module("sglang.launch_server", run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
