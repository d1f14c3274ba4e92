"""In a trainer: refuse rollouts of servers that run another pattern than the model that is trained, or none.

    python examples/check_rollouts.py deploy/pattern.yaml@1/4 --server http://rollout-0:30000

asks servers once. A trainer calls `check_servers` (or `check_engine`) before the first rollout and after each update of
weights, and `check_answers` with each batch: SGLang 0.5.20 and newer name the pattern in every answer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from sglang_indexcache import IndexCacheError, Pattern
from sglang_indexcache.http.servers import ranks
from sglang_indexcache.pattern_file.pattern_name import PatternSpec

KEY = "indexcache"  # in /server_info and in meta_info


class RolloutError(Exception):
    """Rollouts that the trained model can't use, in one line."""


def trained_pattern(name: str) -> Pattern:
    """Return the pattern that the trained model runs: `FILE`, `FILE@1/4` or letters.

    Raises:
        IndexCacheError: if that names none.
    """
    return PatternSpec.read(name).known()


def check_servers(pattern: Pattern, servers: Iterable[str]) -> None:
    """Check that each rank of each server, named by its URL, has proven `pattern`, and that the proof holds.

    Raises:
        RolloutError: naming the first that has not.
        IndexCacheError: if a server does not answer.
    """
    for server in servers:
        for problem in (rank.problem(pattern) for rank in ranks(server)):
            if problem is not None:
                raise RolloutError(problem)


def check_engine(pattern: Pattern, engine: Any) -> None:
    """Check the same of an `sglang.Engine` of this process.

    Raises:
        RolloutError: naming the first data-parallel rank that has not proven it.
    """
    for number, state in enumerate(engine.get_server_info()["internal_states"]):
        served = state.get(KEY) or {}
        _compare(pattern, served.get("fingerprint"), f"engine, rank {number}")
        if not served.get("proven"):
            raise RolloutError(f"engine, rank {number} is not proven to serve it: {served.get('reason')}")


def check_answers(pattern: Pattern, answers: Iterable[Mapping[str, Any]]) -> None:
    """Check what answers of `/generate` or `Engine.generate`, which were not streamed, say of themselves.

    Requests that were aborted before they ran say nothing, and have no new tokens: they are passed over.

    Raises:
        RolloutError: naming the first request that was answered under another pattern, under none, or without a proof.
    """
    for answer in answers:
        meta = answer["meta_info"]
        said = meta.get(KEY)
        if said is None and (meta.get("finish_reason") or {}).get("type") == "abort":
            continue
        if said == []:
            raise RolloutError(
                f"answer {meta.get('id')}: the server had no proof while it was finished, as between an update of"
                " weights and its end; expected rollouts after that"
            )
        _compare(pattern, said[0] if said else None, f"answer {meta.get('id')}")


def _compare(pattern: Pattern, found: str | None, who: str) -> None:
    if found == pattern.fingerprint:
        return
    expected = f"expected {pattern.fingerprint[:16]}, of the model that is trained"
    if found is None:
        raise RolloutError(f"{who} names no pattern: SGLang alone, or one before 0.5.20; {expected}")
    raise RolloutError(f"{who} is of the pattern with fingerprint {found[:16]}; {expected}")


def main(arguments: list[str] | None = None) -> int:
    """Return 0 if all servers serve the pattern, or 1 with one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pattern", help="of the model that is trained: FILE, FILE@1/4 or letters")
    parser.add_argument("--server", action="append", required=True, metavar="URL", help="repeatable")
    options = parser.parse_args(arguments)
    try:
        check_servers(trained_pattern(options.pattern), options.server)
    except (RolloutError, IndexCacheError) as error:
        print(f"check_rollouts: {error}", file=sys.stderr)
        return 1
    print(f"{len(options.server)} server(s) serve what is trained")
    return 0


if __name__ == "__main__":
    sys.exit(main())
