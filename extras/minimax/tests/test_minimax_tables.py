"""SGLang's own backend follows the tables that are written, and whoever lies to them is found out."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from extras.minimax.tests.backend import FIRST, Served
from indexcache_minimax.family import MINIMAX_M3, tables
from indexcache_minimax.family.index_calls import FUNCTIONS, OPERATIONS
from sglang_indexcache import Pattern
from sglang_indexcache.io.errors import ProofError
from sglang_indexcache.io.messages import RAN_INDEXER
from sglang_indexcache.serving import proof
from sglang_indexcache.serving.counted import DECODE, EXTEND, Counter
from sglang_indexcache.sglang.probes import SglangSource

pytestmark = pytest.mark.sglang
ADAPTER: Any = MINIMAX_M3.sglang
PATTERN = Pattern("FSFFSS")


@pytest.fixture(autouse=True)
def _read_version() -> None:
    pytest.importorskip("sglang")
    source = SglangSource.installed()
    if source is None or source.unread(ADAPTER.serving) is not None:
        pytest.skip("the tables were read in SGLang 0.5.23")


def told(patch: pytest.MonkeyPatch, pattern: Pattern = PATTERN, **changes: Any) -> Served:
    served = Served(len(pattern), patch, **changes)
    ADAPTER.loaded(served.runner, pattern)
    return served


def roles(served: Served) -> str:
    found: str = ADAPTER.configured(served.runner)
    return found


@pytest.mark.parametrize("decoding", [False, True], ids=["prompts", "decoding"])
def test_each_layer_attends_to_the_choice_of_the_nearest_f(decoding: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(6, monkeypatch)
    assert roles(served) == "FFFFFF" and served.attend(decoding) == [3, 4, 5, 6, 7, 8]
    ADAPTER.loaded(served.runner, PATTERN)
    assert roles(served) == "FSFFSS"
    for _ in range(2):  # nothing is left of the pass before
        assert served.attend(decoding) == [3, 3, 5, 6, 6, 6]
    for pattern, attended in (("FSSSSS", [3] * 6), ("FFFFFF", [3, 4, 5, 6, 7, 8]), ("FFSFSF", [3, 4, 4, 6, 6, 8])):
        ADAPTER.switch(served.runner, Pattern(pattern))
        assert (roles(served), served.attend(decoding)) == (pattern, attended)


def test_where_all_choose_sglangs_own_tables_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(6, monkeypatch)
    names = (tables.SWITCH, tables.GROUP_SIZE, tables.SOURCES, tables.GROUPS)
    before = {name: getattr(served.backend, name) for name in names}
    ADAPTER.loaded(served.runner, Pattern.full(6))
    assert all(getattr(served.backend, name) is value for name, value in before.items())
    ADAPTER.captured(served.runner, Pattern.full(6))


def shared_by_frequency(served: Served) -> None:
    served.backend._topk_is_source = {layer: layer % 4 == 3 for layer in served.layers}
    served.backend._topk_group_of_layer = {layer: layer // 4 for layer in served.layers}


LIES = {
    "the switch is off again": (lambda s: setattr(s.backend, tables.SWITCH, False), "FFFFFF"),
    "a frequency, as SGLang writes it": (shared_by_frequency, r"layer 4 would take the choice of layers \[7\]"),
    "one entry": (
        lambda s: s.backend._topk_is_source.__setitem__(4, True),
        r"layer 3 would take the choice of layers \[3, 4\]",
    ),
    "another group": (lambda s: s.backend._topk_group_of_layer.__setitem__(7, 0), "layer 7 would take the choice of"),
    "the first chooses nothing": (lambda s: s.backend._topk_is_source.__setitem__(3, False), "none of the layers"),
    "a layer is forgotten": (lambda s: s.backend._topk_group_of_layer.pop(8), "say nothing of layer 8"),
    "an index with values": (lambda s: s.backend.disable_value_layer_ids.discard(8), "say nothing of layer 8"),
}


@pytest.mark.parametrize("lie", LIES)
def test_tables_that_were_written_after_us_are_found_when_graphs_were_captured_and_when_asked(
    lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = told(monkeypatch)
    assert ADAPTER.saved(served.runner) == {}
    ADAPTER.captured(served.runner, PATTERN)
    change, line = LIES[lie]
    change(served)
    with pytest.raises(ProofError, match=line):
        ADAPTER.captured(served.runner, PATTERN)
    with pytest.raises(ProofError, match=line):
        ADAPTER.saved(served.runner)


def test_prompts_in_graphs_are_refused_once_they_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the flags said: nobody has seen what such a graph holds."""
    served = told(monkeypatch)
    served.runner.prefill_cuda_graph_runner = type("EagerRunner", (), {})()
    ADAPTER.captured(served.runner, PATTERN)
    served.runner.prefill_cuda_graph_runner = type("BreakableCudaGraphRunner", (), {})()
    with pytest.raises(ProofError, match=r"prompts were captured by BreakableCudaGraphRunner.*prefill disabled"):
        ADAPTER.captured(served.runner, PATTERN)


def test_another_backend_in_its_place_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    served, other = told(monkeypatch), told(monkeypatch)
    served.runner.attn_backend = other.runner.attn_backend
    with pytest.raises(ProofError, match="tables of who chooses say another attention backend by now"):
        ADAPTER.saved(served.runner)
    served.runner.attn_backend = other.backend  # without its hybrid
    with pytest.raises(ProofError, match="expected MiniMaxHybridAttnBackend with MiniMaxSparseAttnBackend"):
        ADAPTER.captured(served.runner, PATTERN)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"is_npu": True}, "an NPU"),
        ({"use_dense_sparse_decode": True}, "MINIMAX_DENSE_SPARSE_DECODE, which shares in prompts alone"),
        ({"hisparse_coordinator": object()}, "HiSparse"),
        ({"indexer_cp": object()}, "SGLANG_MINIMAX_M3_INDEXER_CP"),
        ({"index_topk_freq": 4}, "SGLANG_MINIMAX_M3_INDEX_TOPK_FREQ is 4"),
        ({"disable_value_layer_ids": {3, 4, 5, 6, 7}}, r"shares among \[3, 4, 5, 6, 7\]"),
        ({"sparse_layer_ids": [3, 4, 5, 6, 7, 8, 9], "disable_value_layer_ids": set(range(3, 10))}, "shares among"),
    ],
)
def test_a_backend_whose_layers_don_t_share_is_refused(
    changes: dict[str, Any], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ProofError, match=line):
        told(monkeypatch, **changes)


def test_a_layer_without_an_index_is_no_site_and_a_missing_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(6, monkeypatch)
    served.model[0].is_sparse_attention_layer = False  # of a model that has its letter
    with pytest.raises(
        ProofError, match=r"has an index in layers \[4, 5, 6, 7, 8\], SGLang's backend shares among \[3"
    ):
        ADAPTER.loaded(served.runner, PATTERN)
    served = told(monkeypatch)
    effective = proof.effective_roles(ADAPTER, served.model)
    assert proof.mismatch(PATTERN, effective, place="letter") is None
    assert proof.mismatch(Pattern("FSFFSF"), effective, place="letter") is not None


def test_weights_that_were_not_loaded_are_found_before_and_after_sglang_joins_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = Served(6, monkeypatch)
    proof.mark_unloaded(ADAPTER, served.model)
    for module in served.model:
        for part in (module.index_q_norm, module.index_k_norm, module.index_qkv_proj):
            part.weight.data.fill_(1.0)
    served.model[3].index_qkv_proj.weight.data[1, 1] = float("nan")
    for module in served.model:  # as `maybe_build_fused_qkv_index` does
        module.fused_qkv_index_proj = torch.nn.Linear(2, 2, bias=False)
        module.fused_qkv_index_proj.weight.data = module.index_qkv_proj.weight.data
        module.index_qkv_proj.weight.data = torch.empty(0)
    ADAPTER.loaded(served.runner, PATTERN)
    unloaded = {site: item.unloaded for site, item in proof.effective_roles(ADAPTER, served.model).items()}
    assert unloaded == {**dict.fromkeys(range(6)), 3: "fused_qkv_index_proj.weight"}


# -- counting


def count(served: Served, pattern: Pattern = PATTERN) -> Counter:
    counter = Counter(ADAPTER.attentions(served.model, pattern, False), "letter")
    counter.begin({EXTEND, DECODE})
    return counter


def functions() -> list[Any]:
    operations = importlib.import_module(OPERATIONS)
    return [getattr(operations, name) for name in FUNCTIONS]


def test_indexes_are_counted_in_the_first_passes_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    served = told(monkeypatch)
    stock = functions()
    counter = count(served)
    assert functions() != stock
    served.attend(False)
    assert counter.counting and counter.passes == {EXTEND: 1} and counter.missing == {DECODE}
    served.attend(True)
    assert not counter.counting and counter.passes == {EXTEND: 1, DECODE: 1}
    served.attend(True)  # the first call after it puts SGLang's functions back
    assert functions() == stock and not {"forward_extend", "forward_decode"} & vars(served.backend).keys()
    counter.again()  # as after an update of weights
    assert functions() != stock
    assert served.attend(False) == [3, 3, 5, 6, 6, 6] and counter.passes == {EXTEND: 1}


@pytest.mark.parametrize("decoding", [False, True], ids=["prompts", "decoding"])
def test_a_backend_that_ignores_what_was_written_is_no_server(decoding: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tables read right, and every layer chooses: a fault that no reading back can find."""

    class Deaf(dict[int, bool]):
        def get(self, key: Any, default: Any = None) -> Any:
            return True

        def __getitem__(self, key: int) -> bool:
            return True if reading else super().__getitem__(key)

    reading, ended = False, []
    monkeypatch.setattr("sglang_indexcache.sglang.hooks.refuse", lambda line: ended.append(line))
    served = told(monkeypatch)
    served.backend._topk_is_source = Deaf(served.backend._topk_is_source)
    assert roles(served) == "FSFFSS"
    ADAPTER.captured(served.runner, PATTERN)
    count(served)
    reading = True
    served.attend(decoding)
    kind = DECODE if decoding else EXTEND
    assert ended[0] == f"letter 1 {RAN_INDEXER} 1 times in a pass ({kind}), expected 0"


def test_a_prompt_whose_source_has_not_run_is_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """There SGLang lets the layer choose for itself, without a word."""
    ended: list[str] = []
    monkeypatch.setattr("sglang_indexcache.sglang.hooks.refuse", lambda line: ended.append(line))
    served = told(monkeypatch)
    assert served.attend(False, layers=[4, 5, 6, 7, 8]) == [4, 5, 6, 6, 6]
    count(served)
    served.attend(False, layers=[4, 5, 6, 7, 8])
    assert ended == [f"letter 1 {RAN_INDEXER} 1 times in a pass (extend), expected 0"]


def test_tables_that_are_rewritten_between_two_layers_are_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    monkeypatch.setattr("sglang_indexcache.sglang.hooks.refuse", lambda line: ended.append(line))
    served = told(monkeypatch)
    count(served)
    served.attend(True, before=lambda layer: setattr(served.backend, tables.SWITCH, layer != FIRST + 4))
    assert ended == [f"letter 4 {RAN_INDEXER} 1 times in a pass (decode), expected 0"]


# -- flags


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"device": "cuda"}, "--cuda-graph-backend-prefill (by default) can't be combined"),
        ({"device": "cuda", "cuda_graph_backend_prefill": "breakable"}, "--cuda-graph-backend-prefill breakable can't"),
        ({"device": "cuda", "cuda_graph_backend_prefill": "disabled"}, None),
        ({"device": "cpu"}, None),
        ({"device": "cpu", "disaggregation_mode": "prefill"}, "--disaggregation-mode prefill can't be combined"),
        ({"device": "cpu", "disaggregation_mode": "null"}, None),
    ],
)
def test_flags_that_nobody_ran_are_refused(arguments: dict[str, Any], line: str | None) -> None:
    found = [said for _, said in ADAPTER.refused_with(PATTERN, SimpleNamespace(**arguments))]
    assert len(found) == (0 if line is None else 1) and (line is None or found[0].startswith(line))
