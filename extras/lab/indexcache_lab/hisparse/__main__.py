"""python -m indexcache_lab.hisparse: SGLang's server with a pattern and HiSparse, without index keys of S layers.

It takes what `python -m sglang_indexcache.launch_server` takes, and sets SGLANG_INDEXCACHE_FREE_INDEX_KEYS=1:

    python -m indexcache_lab.hisparse --indexcache-pattern pattern.yaml@1/4 --enable-hisparse --disable-radix-cache ...
"""

from __future__ import annotations

if __name__ == "__main__":  # before the other imports, so that Ctrl-C while they load is one line, too
    from sglang_indexcache.process import begin

    begin("indexcache", "sglang")

import os
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points

from indexcache_lab.hisparse.plugin import ENTRY, VARIABLE
from sglang_indexcache import launch_server
from sglang_indexcache.io.refusal import refuse
from sglang_indexcache.launch_server import ALLOWED_PLUGINS_VARIABLE, GROUP


def main(arguments: Sequence[str]) -> None:
    """Start the server, if SGLang would find the plugin."""
    if {"-h", "--help"}.intersection(arguments):
        sys.stdout.write(f"{__doc__}\n")  # the launcher's own help follows
    if not any(entry.name == ENTRY for entry in entry_points(group=GROUP)):
        refuse(f"SGLang would not find the plugin {ENTRY}: expected sglang-indexcache installed in this environment")
    allowed = {name.strip() for name in os.environ.get(ALLOWED_PLUGINS_VARIABLE, "").split(",") if name.strip()}
    if allowed and ENTRY not in allowed:
        refuse(f"{ALLOWED_PLUGINS_VARIABLE} leaves the plugin {ENTRY} out; expected it there")
    os.environ[VARIABLE] = "1"
    launch_server.main(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
