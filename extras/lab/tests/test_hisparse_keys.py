"""Freeing index keys under HiSparse on a stand-in of SGLang: who gets it, what is refused, what is read back."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from indexcache_lab.hisparse import __main__ as launcher
from indexcache_lab.hisparse import needs, plugin, pools
from indexcache_lab.hisparse.plugin import VARIABLE
from sglang_indexcache.families.deepseek_v4 import DEEPSEEK_V4
from sglang_indexcache.io.errors import ProofError
from sglang_indexcache.io.refusal import PATTERN_VARIABLE, UNREAD_VARIABLE
from sglang_indexcache.serving.preflight import PreflightError
from sglang_indexcache.sglang.probes import Need, SglangSource
from sglang_indexcache.sglang.read_sources import digest
from tests import fake_sglang
from tests.conftest import tiny_config
from tests.core.test_probes import write_sglang

LETTERS, LAYERS, PAGE, KEY = "FSSFSS", 6, 64, 132
BUDGET = 8 << 20


class HiSparseDSATokenToKVPool:
    """Keeps index keys as SGLang's does: rows of a page for each layer, none for those to skip."""

    start_layer, page_size = 0, PAGE

    def __init__(self, size: int, layers: int, skip_topk_layers: Any = None, host_to_device_ratio: int = 2) -> None:
        self.skip_topk_layers = list(skip_topk_layers or [False] * layers)
        pages = (size * host_to_device_ratio + PAGE + 1) // PAGE
        rows = [0 if skip else pages for skip in self.skip_topk_layers]
        self.index_k_with_scale_buffer = [torch.zeros(row, PAGE * KEY, dtype=torch.uint8) for row in rows]

    def get_state_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        buffers: list[Tensor] = self.index_k_with_scale_buffer
        return [0] * len(buffers), [len(item) for item in buffers], [len(item) and item[0].nbytes for item in buffers]


class DSATokenToKVPool(HiSparseDSATokenToKVPool):
    """The pool of a draft model."""


def _should_elide_dsa_index_k(*, is_draft_worker: bool) -> bool:
    return False  # under HiSparse


class KVCacheConfigurator:
    def __init__(self, runner: Any) -> None:
        self.server_args, self.model_config = runner.server_args, runner.model_config
        self.is_draft_worker = runner.is_draft_worker
        self.ratio = json.loads(self.server_args.hisparse_config)["host_to_device_ratio"]

    def _build_dsa_kv_pool(self, *, max_total_num_tokens: int, max_running_requests: int, dsa_pool_class: Any) -> Any:
        builder = sys.modules["sglang.srt.mem_cache.kv_cache_configurator"]
        kwargs = {}
        if builder._should_elide_dsa_index_k(is_draft_worker=self.is_draft_worker):
            kwargs["skip_topk_layers"] = [_skips(self.model_config.hf_config, layer) for layer in range(LAYERS)]
        return dsa_pool_class(max_total_num_tokens, LAYERS, host_to_device_ratio=self.ratio, **kwargs)


class DefaultPoolConfigurator:
    def __init__(self, kvc: KVCacheConfigurator) -> None:
        self.cell = LAYERS * 656 + self._compute_dsa_indexer_cell_size(kvc=kvc, num_layers=LAYERS)

    def _compute_dsa_indexer_cell_size(self, *, kvc: Any, num_layers: int, allocate_all_layers: bool = False) -> int:
        return KEY * num_layers * kvc.ratio


def _skips(config: Any, layer_id: int) -> bool:
    return bool(config.index_topk_pattern[layer_id] == "S")


def alloc_memory_pool(runner: Any) -> None:
    """Of `ModelRunner`."""
    kvc = sys.modules["sglang.srt.mem_cache.kv_cache_configurator"].KVCacheConfigurator(runner)
    sizes = sys.modules["sglang.srt.model_executor.pool_configurator"]
    runner.max_total_num_tokens = BUDGET // sizes.DefaultPoolConfigurator(kvc).cell // PAGE * PAGE
    runner.token_to_kv_pool = kvc._build_dsa_kv_pool(
        max_total_num_tokens=runner.max_total_num_tokens,
        max_running_requests=4,
        dsa_pool_class=DSATokenToKVPool if runner.is_draft_worker else HiSparseDSATokenToKVPool,
    )
    runner.token_to_kv_pool_allocator = SimpleNamespace(size_full=runner.max_total_num_tokens * kvc.ratio)


def anew(kind: type, method: str) -> type:
    """A class of its own, since hooks stay on what they were applied to."""
    return type(kind.__name__, (kind,), {method: vars(kind)[method]})


class Program:
    """A program that starts engines with HiSparse."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.monkeypatch, self.folder = monkeypatch, folder
        self.engine = fake_sglang.install(monkeypatch, lambda: None)
        (folder / "config.json").write_text(json.dumps(tiny_config()))
        places: dict[str, dict[str, Any]] = {
            "mem_cache.kv_cache_configurator": {
                "_should_elide_dsa_index_k": _should_elide_dsa_index_k,
                "KVCacheConfigurator": anew(KVCacheConfigurator, "_build_dsa_kv_pool"),
            },
            "model_executor.pool_configurator": {
                "DefaultPoolConfigurator": anew(DefaultPoolConfigurator, "_compute_dsa_indexer_cell_size"),
                "_get_dsa_cache_layer_ids": lambda kvc, num_layers: list(range(num_layers)),
            },
            "mem_cache.hisparse_memory_pool": {"HiSparseDSATokenToKVPool": HiSparseDSATokenToKVPool},
        }
        for name, content in places.items():
            module = ModuleType(f"sglang.srt.{name}")
            module.__dict__.update(content)
            monkeypatch.setitem(sys.modules, module.__name__, module)
        sys.modules["sglang.srt.configs.model_config"].dsa_layer_skips_topk = _skips  # type: ignore[attr-defined]
        self.runner: Any = sys.modules["sglang.srt.model_executor.model_runner"].ModelRunner
        self.runner.alloc_memory_pool = alloc_memory_pool
        self.loses_indexers = True
        begin = self.runner.__init__

        def initialise(runner: Any, *given: Any) -> None:
            begin(runner, *given)
            runner.model_config.hf_config = SimpleNamespace(
                **{"index_topk_pattern": "F" * LAYERS, **runner.model_config.overrides}
            )
            for module in runner.model if self.loses_indexers else ():
                module.indexer = None if module.skip_topk else module.indexer
            runner.alloc_memory_pool()

        monkeypatch.setattr(self.runner, "__init__", initialise)
        monkeypatch.setattr(pools, "_applied", [])
        monkeypatch.setattr(pools, "unread", lambda source: None)
        plugin.register()

    def start(self, pattern: str | None = LETTERS, free: str = "1", ratio: int = 2, **flags: Any) -> Any:
        self.monkeypatch.setenv(PATTERN_VARIABLE, pattern or "")
        self.monkeypatch.setenv(VARIABLE, free)
        flags = {"enable_hisparse": True, "hisparse_config": json.dumps({"host_to_device_ratio": ratio}), **flags}
        return self.engine(model_path=str(self.folder), **flags)


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Program]:
    yield Program(monkeypatch, tmp_path)


def of(engine: Any) -> tuple[list[bool], int, Any]:
    """Which layers keep keys, for how many tokens there is room, and what `/server_info` says."""
    runner = engine.scheduler.tp_worker.model_runner
    kept = [len(buffer) > 0 for buffer in runner.token_to_kv_pool.index_k_with_scale_buffer]
    state = engine.scheduler.get_internal_state(None).internal_state
    return kept, runner.max_total_num_tokens, state.get(pools.KEY)


@pytest.mark.parametrize(("ratio", "more"), [(2, 1.13), (10, 1.6)])
def test_an_engine_that_asks_has_no_keys_of_s_layers(program: Program, ratio: int, more: float) -> None:
    """Engines of one program, of which only some ask; what is not asked for is as it was."""
    kept, tokens, said = of(program.start(ratio=ratio))
    assert kept == [letter == "F" for letter in LETTERS]
    row = (tokens * ratio + PAGE + 1) // PAGE * PAGE * KEY
    assert said == {"layers": 2, "freed_layers": 4, "bytes": 2 * row, "freed_bytes": 4 * row}
    before = of(program.start(free="0", ratio=ratio))
    assert before[0] == [True] * LAYERS and before[2] is None and tokens / before[1] > more
    assert of(program.start(None, free="", ratio=ratio))[0] == [True] * LAYERS
    assert of(program.start("F" * LAYERS, ratio=ratio))[2] == {
        "layers": 6,
        "freed_layers": 0,
        "freed_bytes": 0,
        "bytes": 6 * ((before[1] * ratio + PAGE + 1) // PAGE * PAGE * KEY),
    }


def refused(program: Program, capsys: pytest.CaptureFixture[str], *given: Any, **more: Any) -> str:
    with pytest.raises(SystemExit):
        program.start(*given, **more)
    return capsys.readouterr().err


def test_it_is_refused_by_name(program: Program, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a pattern or HiSparse, beside what nobody tried, with a value that is no switch, for a search, on V4."""
    assert "serves no pattern" in refused(program, capsys, None)
    assert "without --enable-hisparse" in refused(program, capsys, enable_hisparse=False)
    for flag in ("enable_dsa_cache_layer_split", "enable_prefill_cp"):
        assert flag.replace("_", "-") in refused(program, capsys, **{flag: True})
    assert "--attn-cp-size" in refused(program, capsys, attn_cp_size=2)
    assert "--device npu" in refused(program, capsys, device="npu")
    assert "'yes', expected 1 or 0" in refused(program, capsys, free="yes")
    searching, v4 = SimpleNamespace(serves=False), SimpleNamespace(serves=True, family_at=lambda model: DEEPSEEK_V4)
    for plan, line in ((searching, "serves no pattern"), (v4, f"not served on {DEEPSEEK_V4.name}")):
        with pytest.raises(PreflightError, match=line):
            pools.check(plan, SimpleNamespace(model_path="x", enable_hisparse=True))  # type: ignore[arg-type]


def test_a_pool_that_ignores_the_list_is_no_server(program: Program, capsys: pytest.CaptureFixture[str]) -> None:
    initialise = HiSparseDSATokenToKVPool.__init__

    def ignoring(pool: Any, size: int, layers: int, skip_topk_layers: Any = None, **more: Any) -> None:
        initialise(pool, size, layers, **more)

    program.monkeypatch.setattr(HiSparseDSATokenToKVPool, "__init__", ignoring)
    assert "layer 1 is S, but the pool keeps" in refused(program, capsys)


def test_a_layer_that_could_write_keys_is_no_server(program: Program, capsys: pytest.CaptureFixture[str]) -> None:
    """S in the plan, with an indexer: its keys would go nowhere."""
    program.loses_indexers = False
    assert "layer 1 is S, but has an indexer" in refused(program, capsys)


def test_another_list_than_the_layers_run_is_no_server(program: Program, capsys: pytest.CaptureFixture[str]) -> None:
    """A configuration that says S where the loaded layer selects: it would write past its keys."""
    skips = sys.modules["sglang.srt.configs.model_config"]
    program.monkeypatch.setattr(sys.modules[__name__], "_skips", lambda config, layer_id: layer_id > 0)
    program.monkeypatch.setattr(skips, "dsa_layer_skips_topk", lambda config, layer_id: layer_id > 0)
    assert "layer 3 is F, but has index keys for 0 pages" in refused(program, capsys)


def test_tokens_counted_for_other_layers_are_no_server(program: Program, capsys: pytest.CaptureFixture[str]) -> None:
    """Sizes of another class, as of a next version: the pool would not fit, or half of it would stay empty."""
    program.monkeypatch.setattr(DefaultPoolConfigurator, "__init__", lambda self, kvc: setattr(self, "cell", 4096))
    assert "counted for index keys of None layers, but 2" in refused(program, capsys)


def test_a_pool_that_was_not_read_back_is_no_server(program: Program, capsys: pytest.CaptureFixture[str]) -> None:
    """SGLang makes it elsewhere, and the hook never ran."""
    program.runner.alloc_memory_pool = lambda runner: None
    program.monkeypatch.setattr(pools, "prove", lambda *_: None)
    assert "it was not read back" in refused(program, capsys)


def test_a_pool_too_small_or_of_another_class_or_handed_over_otherwise(program: Program) -> None:
    runner = program.start().scheduler.tp_worker.model_runner
    adapter = pools.by_configuration(pools.engines.plan_of(runner.server_args).family.sglang)  # type: ignore[union-attr]
    assert adapter is not None and pools.read_back(adapter, runner).layers == 2
    pool = runner.token_to_kv_pool
    runner.token_to_kv_pool_allocator.size_full += PAGE
    with pytest.raises(ProofError, match="layer 0 is F, but has index keys for"):
        pools.read_back(adapter, runner)
    runner.token_to_kv_pool_allocator.size_full -= PAGE
    program.monkeypatch.setattr(pool, "get_state_buf_infos", lambda: ([], [], [KEY] * LAYERS))
    with pytest.raises(ProofError, match="layer 1 is S, but prefill and decode servers would hand over otherwise"):
        pools.read_back(adapter, runner)
    program.monkeypatch.setattr(pool, "start_layer", 1)
    with pytest.raises(ProofError, match="the model others"):
        pools.read_back(adapter, runner)
    runner.token_to_kv_pool = DSATokenToKVPool(PAGE, LAYERS)
    with pytest.raises(ProofError, match="is DSATokenToKVPool, expected HiSparseDSATokenToKVPool"):
        pools.read_back(adapter, runner)


def test_a_draft_model_keeps_its_keys(program: Program) -> None:
    target = program.start().scheduler.tp_worker.model_runner
    draft = SimpleNamespace(is_draft_worker=True, server_args=target.server_args, model_config=target.model_config)
    sizes = sys.modules["sglang.srt.model_executor.pool_configurator"]
    builder = sys.modules["sglang.srt.mem_cache.kv_cache_configurator"]
    kvc = builder.KVCacheConfigurator(draft)
    assert sizes.DefaultPoolConfigurator(kvc).cell == LAYERS * (656 + 2 * KEY)
    pool = kvc._build_dsa_kv_pool(max_total_num_tokens=PAGE, max_running_requests=4, dsa_pool_class=DSATokenToKVPool)
    assert all(len(buffer) for buffer in pool.index_k_with_scale_buffer)
    kvc = builder.KVCacheConfigurator(target)  # what the target counts for its draft
    whole = sizes.DefaultPoolConfigurator(kvc)._compute_dsa_indexer_cell_size
    assert whole(kvc=kvc, num_layers=1, allocate_all_layers=True) == 2 * KEY


def written(folder: Path) -> SglangSource:
    """An SGLang that has all names and parameters."""
    return write_sglang(folder, list(dict.fromkeys((*needs.FREED.needs, *needs.FREED.reads))))


@pytest.mark.parametrize("need", needs.FREED.reads, ids=lambda need: need.name)
def test_a_source_that_nobody_read_is_refused(need: Need, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each function and class, with another line, and without: names stay when meanings change."""
    source = written(tmp_path)
    read = {
        each.target.removeprefix("sglang."): {digest(source.definition(each) or ""): "0.5.99"}
        for each in needs.FREED.reads
    }
    assert read.keys() == needs.READ.keys()
    monkeypatch.setattr(needs, "READ", read)
    assert needs.unread(source) is None
    path = source.root.joinpath(*need.module.split(".")).with_suffix(".py")
    text, name = path.read_text(), need.name.rpartition(".")[2]
    word = "class" if name[0].isupper() else "def"
    indent = "    " if "." in need.name else ""
    for other in (f"@other\n{indent}{word} {name}", f"{word} {name}_of_a_next_version"):
        path.write_text(text.replace(f"{word} {name}", other))
        line = needs.unread(SglangSource.at(tmp_path))
        assert line is not None and need.target.rpartition(".")[0] in line and "0.5.99" in line and "\n" not in line


def test_a_version_that_was_not_read_is_no_server(program: Program, capsys: pytest.CaptureFixture[str]) -> None:
    program.monkeypatch.setattr(pools, "unread", lambda source: "nobody here has read it")
    assert "nobody here has read it" in refused(program, capsys)
    program.monkeypatch.setenv(UNREAD_VARIABLE, "1")
    assert of(program.start())[0].count(False) == 4


def test_the_launcher_asks_and_needs_the_plugin(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []
    monkeypatch.setenv(VARIABLE, "0")
    monkeypatch.setattr(launcher.launch_server, "main", lambda words: asked.append((os.environ[VARIABLE], words)))
    monkeypatch.setenv("SGLANG_PLUGINS", "indexcache")
    with pytest.raises(SystemExit):
        launcher.main(["--tp", "8"])
    assert "leaves the plugin indexcache_keys out" in capsys.readouterr().err and not asked
    monkeypatch.setenv("SGLANG_PLUGINS", "indexcache, indexcache_keys")
    launcher.main(["--tp", "8"])
    assert asked == [("1", ["--tp", "8"])]
    monkeypatch.setattr(launcher, "entry_points", lambda group: ())
    with pytest.raises(SystemExit):
        launcher.main([])
    assert "would not find the plugin" in capsys.readouterr().err
