"""SGLang's own pools under HiSparse, on a CPU: what they keep, for how many tokens there is room, what is transferred.

HiSparse's swap-in needs a GPU. So its coordinator is left out, and prompts are read from device slots that are those of
the logical space (host ratio 1).
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from dsa_cpu_platform.indexer import _BUFFERS
from extras.dense.tests.live.selecting import random_prompts
from indexcache_lab.hisparse import pools
from indexcache_lab.hisparse.needs import unread
from indexcache_lab.hisparse.plugin import VARIABLE
from scripts.tools import inprocess, random_models
from scripts.tools.inprocess import Served, call
from scripts.tools.pattern_files import write_pattern
from sglang_indexcache import Pattern
from sglang_indexcache.families.dsa import DSA
from sglang_indexcache.sglang.probes import SglangSource

pytestmark = pytest.mark.sglang

LETTERS, KEY = "FSSFSS", 132
POOL = "sglang.srt.mem_cache.hisparse_memory_pool"


def with_hisparse(ratio: int) -> None:
    """Let the next runner of this process have HiSparse's pool, without what needs a GPU, and tell of its buffers."""
    from sglang.srt.mem_cache import kv_cache_configurator
    from sglang.srt.mem_cache.index_key_cache import IndexKeyCache
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.plugins import load_plugins

    load_plugins()
    IndexKeyCache.state_buf_infos = IndexKeyCache.state_buf_infos.__wrapped__  # the platform tells of float32 ones
    inprocess.ARGUMENTS.update(
        enable_hisparse=True,
        disable_radix_cache=True,
        hisparse_config=json.dumps({"top_k": 64, "device_buffer_size": 128, "host_to_device_ratio": ratio}),
        dsa_decode_backend="flashmla_sparse",
    )
    kv_cache_configurator.reject_out_of_tree_path = lambda *_, **__: None
    ModelRunner.maybe_init_hisparse_coordinator = lambda self: None


def pool_of(model: Path, ratio: int) -> dict[str, Any]:
    """Load a runner; say what its pool keeps."""
    from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator

    with_hisparse(ratio)
    runner = inprocess.load_runner(model)
    pool, sizes = runner.token_to_kv_pool, DefaultPoolConfigurator(runner.kv_cache_configurator)
    found = [book.keys for book in pools._books.values()]
    return {
        "class": type(pool).__name__,
        "rows": [len(buffer) for buffer in pool.index_k_with_scale_buffer],
        "bytes": pool.get_kv_size_bytes(),
        "cell": sizes._cell_size,
        "room": sizes.calculate_pool_sizes(1 << 30, 64).max_total_num_tokens,
        "tokens": pool.size,
        "items": pool.get_state_buf_infos()[2],
        "saved": dict(DSA.sglang.saved(runner)),
        "keys": [None if keys is None else dataclasses.asdict(keys) for keys in found],
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_models.build("glm-moe", tmp_path_factory.mktemp("glm"))


def asking(model: Path, letters: str, free: str = "1") -> dict[str, str]:
    file = write_pattern(Pattern(letters), model, model.parent / f"{letters}.yaml")
    return {"SGLANG_INDEXCACHE_PATTERN": file, VARIABLE: free}


@pytest.mark.parametrize("ratio", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_what_the_pool_keeps(model: Path, ratio: int) -> None:
    """All F, 1/3 as SGLang has it, 1/3 without keys of S layers: cells, rows, and what a decode server registers."""
    plain = call(pool_of, model, ratio)
    kept = call(pool_of, model, ratio, **asking(model, LETTERS, "0"))
    freed = call(pool_of, model, ratio, **asking(model, LETTERS))
    assert plain["class"] == kept["class"] == freed["class"] == "HiSparseDSATokenToKVPool"
    pages = (freed["tokens"] * ratio + 65) // 64
    assert plain["rows"] == kept["rows"] == [pages] * 6
    assert freed["rows"] == [pages if letter == "F" else 0 for letter in LETTERS]
    assert plain["cell"] == kept["cell"] == freed["cell"] + 4 * KEY * ratio
    assert plain["bytes"] - freed["bytes"] == 4 * pages * 64 * KEY
    assert freed["room"] / plain["room"] == pytest.approx(plain["cell"] / freed["cell"], rel=0.001)
    assert [length > 0 for length in freed["items"]] == [letter == "F" for letter in LETTERS] and all(kept["items"])
    assert kept["saved"]["saved_kv_bytes_per_token"] == 0 and freed["saved"]["saved_kv_bytes_per_token"] == 4 * KEY
    assert plain["keys"] == kept["keys"] == []
    row = pages * 64 * KEY
    assert freed["keys"] == [{"layers": 2, "freed_layers": 4, "bytes": 2 * row, "freed_bytes": 4 * row}]


def test_the_installed_source_was_read() -> None:
    source = SglangSource.installed()
    assert source is not None and unread(source) is None


def parts_of(model: Path) -> dict[str, Any]:
    """Pools of a stage of a pipeline, and of a draft model, which a target's runner would build."""
    import msgspec
    import torch
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool
    from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator

    with_hisparse(2)
    runner = inprocess.load_runner(model)
    target = runner.kv_cache_configurator
    layers = msgspec.structs.replace(target.layer_info, start_layer=3, end_layer=6, num_effective_layers=3)
    stage = dataclasses.replace(target, layer_info=layers)
    draft = dataclasses.replace(target, is_draft_worker=True)
    given = {"max_total_num_tokens": 128, "max_running_requests": 4, "dsa_pool_class": DSATokenToKVPool}
    found = {name: kvc._build_dsa_kv_pool(**given) for name, kvc in (("stage", stage), ("draft", draft))}
    pool = found["stage"]
    keys = pool.get_index_k_with_scale_buffer(3)
    keys[0, :] = torch.arange(keys.shape[1]) % 251
    before = keys.clone()
    pool.index_key_cache.move(torch.tensor([64 + 5]), torch.tensor([9]))  # a token, as speculation moves it
    return {
        "rows": {name: [len(buffer) for buffer in pool.index_k_with_scale_buffer] for name, pool in found.items()},
        "cell": {
            name: DefaultPoolConfigurator(kvc)._compute_dsa_indexer_cell_size(
                kvc=kvc, num_layers=kvc.layer_info.num_effective_layers
            )
            for name, kvc in (("target", target), ("stage", stage), ("draft", draft))
        },
        "whole": DefaultPoolConfigurator(target)._compute_dsa_indexer_cell_size(
            kvc=target, num_layers=1, allocate_all_layers=True
        ),
        "moved": bool((keys[1, 5 * 128 : 6 * 128] == before[0, 9 * 128 : 10 * 128]).all()),
    }


def test_stages_and_drafts(model: Path) -> None:
    """A stage leaves out its own S layers; a draft's pool keeps all, and is counted in full."""
    found = call(parts_of, model, **asking(model, LETTERS))
    assert [row > 0 for row in found["rows"]["stage"]] == [True, False, False]
    assert all(found["rows"]["draft"])
    assert found["cell"] == {"target": 2 * KEY * 2, "stage": KEY * 2, "draft": 6 * KEY * 2}
    assert found["whole"] == KEY * 2 and found["moved"]


def ignoring(model: Path) -> None:
    """A next version's pool that takes the list and does nothing with it."""
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

    initialise = DSATokenToKVPool.__init__
    DSATokenToKVPool.__init__ = lambda self, *args, **given: initialise(
        self, *args, **{**given, "skip_topk_layers": None}
    )
    pool_of(model, 2)


def said(log: Path, function: Callable[..., Any], *args: Any) -> None:
    """Call a function in a fork, with what is written to standard error in a file."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    function(*args)


def test_a_pool_that_ignores_the_list_is_no_server(model: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="exit code 2"):
        call(said, tmp_path / "log", ignoring, model, **asking(model, LETTERS))
    assert "indexcache: layer 1 is S, but the pool keeps" in (tmp_path / "log").read_text()


def test_without_hisparse_it_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="exit code 2"):
        call(said, tmp_path / "log", inprocess.load_runner, model, **asking(model, LETTERS))
    assert "set without --enable-hisparse" in (tmp_path / "log").read_text()


def served(model: Path, prompts: Sequence[Sequence[int]], freed: bool) -> tuple[list[Served], list[int]]:
    """Answers, and the layers whose index keys the platform kept: those whose indexer ran."""
    if freed:
        with_hisparse(1)
    load, made = inprocess.load_runner, list[Any]()
    inprocess.load_runner = lambda folder: made.append(load(folder)) or made[0]  # type: ignore[func-returns-value]
    answers = inprocess._generate(model, prompts, 1)
    return answers, sorted(vars(made[0].token_to_kv_pool)[_BUFFERS])


def test_prompts_are_read_alike(model: Path, tmp_path: Path) -> None:
    """Log-probabilities are those of SGLang without HiSparse, and indexers of S layers touch no keys."""
    record = {"DSA_CPU_RECORD": str(tmp_path)}
    prompts = random_prompts(501, 90, 133)
    plain, _ = call(served, model, prompts, False, **asking(model, LETTERS, "0"), **record)
    ours, touched = call(served, model, prompts, True, **asking(model, LETTERS), **record)
    assert touched == [0, 3]
    for one, other in zip(plain, ours, strict=True):
        assert other.ids == one.ids and other.logprobs == pytest.approx(one.logprobs, abs=1e-5)


def transfers(model: Path) -> list[Any]:
    """Return what Mooncake finds wrong with a decode server's index keys, and the layers whose keys it sends."""
    from sglang.srt.disaggregation.base.conn import StateType
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager
    from sglang.srt.disaggregation.utils import is_elided_entry

    with_hisparse(2)
    items = inprocess.load_runner(model).token_to_kv_pool.get_state_buf_infos()[2]
    full = [max(items)] * len(items)
    manager = SimpleNamespace(is_mla_backend=True, is_hybrid_mla_backend=False, pp_size=1)
    manager.get_mla_kv_ptrs_with_pp = lambda ours, theirs, state: (ours, theirs, len(ours))

    def between(prefill: list[int], decode: list[int], state: Any = StateType.DSA) -> tuple[Any, list[int]]:
        given = {"src_data_ptrs": prefill, "dst_data_ptrs": decode, "item_lens": prefill, "dst_item_lens": decode}
        sent = [layer for layer, length in enumerate(prefill) if not is_elided_entry(length, decode, layer)]
        return MooncakeKVManager._state_stride_mismatch(manager, **given, state_type=state), sent

    return [between(items, items), between(full, items), between(items, full), between([7, *items[1:]], items)]


def test_prefill_and_decode_servers(model: Path) -> None:
    """A peer with the same pattern, one that has keys of all layers, on either side, and one with other pages."""
    alike, plain_prefill, plain_decode, other = call(transfers, model, **asking(model, LETTERS))
    assert alike == plain_prefill == plain_decode == (None, [0, 3])
    assert other[0] is not None and "item length mismatch" in other[0]
