"""The environment variables of SGLang's pull requests that would be silently wrong with patterns.

They are refused before anybody has merged them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from sglang_indexcache.io.messages import NOT_COMBINED

_OFF = ("", "0", "false", "no", "off", "n", "f")
PENDING = (  # names, and what SGLang's open pull requests do
    (re.compile(r"SGLANG_DSA_INDEXER_M_SPLIT\w*"), "39527 shares out rows inside of SGLang's indexer"),
    (re.compile(r"SGLANG_\w*LITETOPK\w*"), "32094, 40461 and 40764 carry thresholds from rows to the next ones"),
    (re.compile(r"SGLANG_NPU_ENABLE_DSA_(?:INDEXER_QUERY_SHARDING|CP)"), "39099 shares out rows of queries"),
)


def refused(variables: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the variables that are on and that no pattern can be served with, and one line why."""
    for name in sorted(variables):
        for names, what in PENDING:
            if names.fullmatch(name) and variables[name].strip().lower() not in _OFF:
                why = f"SGLang's pull request {what}, and was never run with one; expected it unset"
                yield name, f"{name} {NOT_COMBINED}: {why}"
