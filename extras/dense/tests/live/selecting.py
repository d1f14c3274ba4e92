"""Servers and sequences for layers that select in blocks."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from dsa_cpu_platform import recorder
from scripts.tools import random_models
from scripts.tools.inprocess import Served
from scripts.tools.pattern_files import write_pattern
from sglang_indexcache import Pattern
from sglang_indexcache.check import main as check_main
from sglang_indexcache.families.dsa.blocks.selection import blocks_of
from tests.live.server import running
from tests.live.test_server import states

CHUNK = 256


def random_prompts(*lengths: int) -> list[list[int]]:
    rng = random.Random(2)
    return [[rng.randrange(2, random_models.VOCAB) for _ in range(length)] for length in lengths]


def in_blocks(passes: Sequence[tuple[int, int]], length: int, pattern: Pattern, topk: int) -> Tensor:
    """Which queries of a sequence select in blocks, `[1, length]`; `passes` have a prefix and a length each."""
    [queries] = {indexer.queries for indexer in pattern.indexers}
    shared = torch.zeros(1, length, dtype=torch.bool)
    for prefix, computed in passes:
        shared[0, prefix : prefix + computed] = False
        for run in blocks_of([prefix], [computed], queries, topk):
            shared[0, run.begin : run.begin + run.count * queries] = True
    return shared


def passes(runs: Sequence[recorder.Run], request: str) -> list[tuple[int, int]]:
    """Prefix and length of each prefill of a request, whose rows may be shared out over processes."""
    layer = min(run.layer for run in runs)
    rows: defaultdict[int, set[int]] = defaultdict(set)  # by number of the pass
    number = Counter[int]()
    for run in recorder.indexers(runs):
        if run.layer == layer and run.mode == "EXTEND":
            rows[number[run.process]] |= {
                at for rid, at in zip(run.requests, run.positions, strict=True) if rid == request
            }
            number[run.process] += 1
    return sorted((min(found), len(found)) for found in rows.values() if found)


def serve_a_branch(
    folder: Path,
    pattern: Pattern,
    tmp_path: Path,
    steps: int,
    *more: str,
    grouped: int | None = 3,
    ranks: int = 2,
    **variables: str,
) -> tuple[Served, Served, Sequence[recorder.Run]]:
    """Several ranks, chunks and a prefix hit; status and check say what was proven, and that nothing else was.

    Returns:
        Request `first` in three chunks, `second` behind a part of it, and what ran.
    """
    record = tmp_path / "record"
    record.mkdir()
    file = write_pattern(pattern, folder, tmp_path / "pattern.yaml")
    other = write_pattern(pattern.plain(), folder, tmp_path / "other.yaml")
    changes = {"DSA_CPU_RECORD": str(record), "SGLANG_CPU_OMP_THREADS_BIND": "|".join("01" * (ranks // 2)), **variables}
    flags = ("--chunked-prefill-size", str(CHUNK), "--tp-size", str(ranks), "--skip-tokenizer-init", *more)
    with running(folder, tmp_path / "log", "--indexcache-pattern", file, *flags, **changes) as server:
        [state] = states(server)
        assert state["pattern"] == pattern.letters and state["fingerprint"] == pattern.fingerprint
        assert state["proven_ranks"] == ranks and state.get("grouped_layers") == grouped
        assert check_main([file, "--server", server.url]) == 0
        assert check_main([other, "--server", server.url]) == 1

        long, prefix = random_prompts(600)[0], 384
        [(first, _)] = server.generate([long], ["first"], steps=steps)
        branch = long[:prefix] + random_prompts(250)[0]
        [(second, cached)] = server.generate([branch], ["second"], steps=steps, inputs=False)
        assert cached == prefix
        runs = recorder.read(record)
    computed = passes(runs, "first")
    assert len(computed) == 3 and all(length <= CHUNK for _, length in computed)
    assert passes(runs, "second")[0][0] == prefix
    return first, second, runs
