"""python -m indexcache_lab.v4_blocks 0q4+2q16: SGLang's server with a pattern, whose letters 0 and 2 select in blocks.

Behind the blocks it takes what `python -m sglang_indexcache.launch_server` takes; it sets SGLANG_INDEXCACHE_V4_BLOCKS:

    python -m indexcache_lab.v4_blocks 0q4+2q16 --indexcache-pattern deploy/v4/pattern.yaml@1/2 --model-path ...
"""

from __future__ import annotations

if __name__ == "__main__":  # before the other imports, so that Ctrl-C while they load is one line, too
    from sglang_indexcache.process import begin

    begin("indexcache", "sglang")

import os
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points

from indexcache_lab.v4_blocks.plugin import ENTRY, VARIABLE
from sglang_indexcache import launch_server
from sglang_indexcache.io.refusal import refuse
from sglang_indexcache.launch_server import ALLOWED_PLUGINS_VARIABLE, GROUP


def main(arguments: Sequence[str]) -> None:
    """Start the server, if SGLang would find the plugin."""
    if not arguments or {"-h", "--help"}.intersection(arguments):
        sys.stdout.write(f"{__doc__}\n")
        return
    if arguments[0].startswith("-"):
        refuse(f"the first argument is {arguments[0]}, expected blocks as 0q4+2q16")
    if not any(entry.name == ENTRY for entry in entry_points(group=GROUP)):
        refuse(f"SGLang would not find the plugin {ENTRY}: expected sglang-indexcache installed in this environment")
    allowed = {name.strip() for name in os.environ.get(ALLOWED_PLUGINS_VARIABLE, "").split(",") if name.strip()}
    if allowed and ENTRY not in allowed:
        refuse(f"{ALLOWED_PLUGINS_VARIABLE} leaves the plugin {ENTRY} out; expected it there")
    os.environ[VARIABLE] = arguments[0]
    launch_server.main(arguments[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
