"""Attention over unions on SGLang's backend, without SGLang: the definition stands in for the kernel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from indexcache_lab.kernels.union_attention import Unions, hopper, serving
from indexcache_lab.kernels.union_attention.serving import Pace, Served, Sizes, UnionAttention, pays
from sglang_indexcache import Pattern
from sglang_indexcache.families.dsa import DSA
from sglang_indexcache.families.dsa.blocks import grouped
from sglang_indexcache.families.dsa.exact import ExactAttention
from sglang_indexcache.io.errors import ProofError
from sglang_indexcache.io.extensions import extensions
from tests.core.test_grouped import KV_DIM, V_DIM, Backend, grouped_layers
from tests.core.test_grouped import attend as attend_in_blocks
from tests.core.test_grouped import select as select_in_blocks
from tests.served import UNFUSED, sglang_modules

__all__ = ["sglang_modules"]
pytestmark = pytest.mark.usefixtures("sglang_modules")
HEADS, TOPK, CACHE = 4, 16, 400
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes of these tests would never pay."""
    monkeypatch.setattr(serving, "LEAST_ROWS", 1)
    monkeypatch.setattr(serving, "pays", lambda sizes, **_: True)


def runner(pattern: Pattern, *, heads: int = HEADS, group: dict[str, bool] | None = None, **changes: Any) -> Any:
    """A `ModelRunner` whose prompts attend over unions."""
    backend = Backend()
    shape = {"kv_lora_rank": V_DIM, "qk_rope_head_dim": KV_DIM - V_DIM, "num_local_heads": heads}
    modules = [(layer, SimpleNamespace(**shape)) for layer in range(len(pattern))]
    dtype = changes.pop("kv_cache_dtype", torch.float32)
    vars(backend).update(dsa_index_topk=TOPK, **changes)
    arguments = SimpleNamespace(enable_prefill_cp=False, attn_cp_size=1)
    found = SimpleNamespace(attn_backend=backend, model=modules, kv_cache_dtype=dtype, server_args=arguments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(DSA.sglang), "modules", lambda _, model: iter(model))
        DSA.sglang.group(found, pattern, unions=True, **(group or {}))
    return found


def exact_on(found: Any) -> Any:
    placed = grouped.placed(found.attn_backend)
    assert placed is not None
    return placed.exact


def table(rows: int, seed: int, empty: int = 0) -> Tensor:
    """Selections of neighbours that have most keys in common; the last `empty` rows are of padding."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.stack([torch.randperm(40, generator=generator)[:TOPK] + 8 * (row // 8) for row in range(rows)]).int()
    found[rows // 2, 3:] = -1
    found[rows - empty :] = -1
    return found


def batch() -> Any:
    return SimpleNamespace(lengths=None, more={})


def attend(backend: Any, of: Any, selected: Tensor, layer: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + layer)
    q = torch.randn(len(selected), HEADS, KV_DIM, generator=generator)
    kv = torch.randn(CACHE, 1, KV_DIM, generator=generator)
    out = backend.forward_extend(q, kv, SimpleNamespace(layer_id=layer), forward_batch=of, topk_indices=selected)
    assert isinstance(out, Tensor)
    return out


def a_pass(backend: Any, pattern: Pattern, of: Any, rows: int, seed: int, empty: int = 0) -> None:
    """All layers of a pass give what SGLang's kernel does; S layers get copies, as SGLang hands them over."""
    selected = table(rows, seed)
    for layer in range(len(pattern)):
        if pattern[layer] == "F":
            selected = table(rows, 10 * seed + layer, empty)
        wanted = attend(Backend(), batch(), selected, layer)
        torch.testing.assert_close(attend(backend, of, selected.clone(), layer), wanted, rtol=1e-5, atol=1e-5)
    assert serving._UNIONS not in vars(of)  # nothing is kept behind the pass


@pytest.mark.parametrize("letters", ["FSSFFS", "FFFFFF"])
def test_prompts_attend_as_before(letters: str) -> None:
    """Chunks of one and of several requests (a block may have two of them), rows of padding; SGLang does nothing."""
    pattern = Pattern(letters)
    found = runner(pattern)
    backend = found.attn_backend
    for number, (rows, empty) in enumerate(((64, 0), (61, 0), (9, 0), (50, 11), (1, 0))):
        a_pass(backend, pattern, batch(), rows, number, empty)
    assert backend.rows == []
    assert sorted(exact_on(found).layers) == [0, 1, 2, 3, 4, 5] and grouped_layers(backend) == ()
    assert exact_on(found).passes == {"unions": 5 * letters.count("F"), "sglang": 0}


def test_selections_are_united_once_for_all_layers_that_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    pattern, united = Pattern("FSSFFS"), []
    backend, unite = runner(pattern).attn_backend, serving.unite
    monkeypatch.setattr(serving, "unite", lambda *given, **named: united.append(1) or unite(*given, **named))
    a_pass(backend, pattern, batch(), 40, 1)
    assert len(united) == 3


class Keeps(UnionAttention):
    """A planted fault: unions of the first pass serve all others."""

    def begin(self, layer: int, forward_batch: Any) -> None:
        """Nothing ends."""

    def _unite(self, group: Any, selected: Tensor, cache: int) -> Unions | None:
        kept: dict[int, Unions | None] = self.__dict__.setdefault("kept", {})
        return kept.setdefault(group.layers[0], super()._unite(group, selected, cache))


def test_unions_of_another_pass_are_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where SGLang uses an object, and tensors, again; the comparison finds a kernel that does."""
    pattern = Pattern("FSSFFS")
    backend, same = runner(pattern).attn_backend, batch()
    for number in range(3):
        a_pass(backend, pattern, same, 40, number)
    monkeypatch.setattr("sglang_indexcache.families.dsa.exact.exact_attention", lambda: Keeps)
    faulty = runner(pattern).attn_backend
    a_pass(faulty, pattern, same, 40, 0)
    with pytest.raises(AssertionError):
        a_pass(faulty, pattern, same, 40, 1)


def test_a_pass_that_ended_early_leaves_nothing_for_the_next() -> None:
    """S layers whose F layer did not unite in this pass are SGLang's."""
    found = runner(Pattern("FSFS"))
    backend, same = found.attn_backend, batch()
    attend(backend, same, table(40, 0), 0)
    assert serving._UNIONS in vars(same)
    wanted = attend(Backend(), batch(), table(40, 1), 3)
    assert torch.equal(attend(backend, same, table(40, 1), 3), wanted) and backend.rows == [40]
    attend(backend, same, table(40, 0), 0)
    backend._indexcache_grouped.exact.begin(0, same)  # F attends by another method, such as over everything
    assert torch.equal(attend(backend, same, table(40, 1), 1), attend(Backend(), batch(), table(40, 1), 1))
    assert backend.rows == [40, 40]


def test_the_first_layer_of_a_pipeline_stage_unites() -> None:
    """Its indices come from the stage below."""
    served = Served(device=CPU, dtype=torch.float32, heads=4, dim=24, v_dim=16, topk=16, selecting={4: 3, 5: 3, 6: 6})
    exact, of = UnionAttention(served), batch()
    given = {"q_all": torch.randn(9, 4, 24), "kv_cache": torch.randn(CACHE, 1, 24), "page_table_1": table(9, 1)}
    for layer, expected in ((4, True), (5, False), (6, False)):
        exact.begin(layer, of)
        assert exact.attend(layer, of, {**given, "sm_scale": 1.0, "v_head_dim": 16}) is not None
        assert (serving._UNIONS in vars(of)) is expected


def test_small_passes_and_passes_that_were_slower_are_sglangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """After unions that don't pay, 63 passes go by SGLang's kernel, and then they are tried again."""
    monkeypatch.setattr(serving, "LEAST_ROWS", 40)
    monkeypatch.setattr(serving, "pays", lambda sizes, **_: sizes.keys < 30)
    pattern = Pattern("FS")
    found = runner(pattern)
    backend, passes = found.attn_backend, exact_on(found).passes
    a_pass(backend, pattern, batch(), 39, 0)
    assert passes == {"unions": 0, "sglang": 1} and backend.rows == [39, 39]
    for number in range(66):  # unions have 40 keys here
        a_pass(backend, pattern, batch(), 40, number)
    assert passes == {"unions": 2, "sglang": 65}


def test_the_host_gets_the_means_of_blocks() -> None:
    """Blocks without keys count as such."""
    keys = torch.tensor([[3, 9, 20, 20], [7, 7, 7, 7], [1, 1, 1, 1]], dtype=torch.int32)
    counts = torch.tensor([3, 1, 0], dtype=torch.int32)
    unions, pace = Unions(keys, torch.zeros_like(keys, dtype=torch.uint8), counts, 8, 24, 30), Pace(CPU)
    pace.see(unions, layers=2, topk=4)
    assert pace._host.tolist() == pytest.approx([4 / 3, 17 / 3])
    assert pace._seen == {"queries": 8, "cache": 30, "layers": 2, "topk": 4} and pace.goes()


@pytest.mark.parametrize(
    ("queries", "layers", "keys", "selections", "expected"),
    [  # docs/evidence/kernels.md: H200
        *((8, 1, 32, size, True) for size in (1.31, 2.19, 3.26, 4.66)),
        *((8, 1, 128, size, size < 5) for size in (1.34, 2.32, 3.62, 5.51, 7.35)),
        (8, 4, 128, 5.0, True),
        (8, 4, 32, 5.86, False),
        *((4, 1, 32, size, size < 2.7) for size in (1.13, 1.53, 2.03, 2.76, 3.45)),
        *((4, 1, 128, size, size < 2) for size in (1.14, 2.14, 2.98, 3.81)),
        (2, 1, 128, 1.05, False),
        (2, 8, 128, 1.05, True),
    ],
)
def test_they_are_used_where_they_were_faster(
    queries: int, layers: int, keys: int, selections: float, expected: bool
) -> None:
    sizes = Sizes(2048 * selections, 1024 * keys)
    assert pays(sizes, queries=queries, layers=layers, topk=2048, cache=1024 * keys) is expected


def test_a_large_pool_costs_more() -> None:
    """There are marks for fewer blocks at a time."""
    sizes, others = Sizes(2048 * 3.0, 131072), {"queries": 8, "layers": 1, "topk": 2048}
    assert pays(sizes, cache=2**20, **others) and not pays(sizes, cache=2**22, **others)


def test_blocks_are_as_before_beside_it() -> None:
    """Layers that select in blocks, and rows of theirs that select by themselves, never go by unions."""
    torch.manual_seed(0)
    pattern = Pattern.parse("FSFFS+2q4")
    found = runner(pattern)
    assert grouped_layers(found.attn_backend) == (2,) and sorted(exact_on(found).layers) == [0, 1, 3, 4]
    of, selected = select_in_blocks([0], [300], UNFUSED)
    backend, alone = found.attn_backend, Backend()
    wanted = attend_in_blocks(alone, of, selected, 2)
    torch.testing.assert_close(attend_in_blocks(backend, of, selected, 2), wanted, rtol=1e-5, atol=1e-5)
    assert backend.rows != [] and exact_on(found).passes["unions"] == 0
    attend_in_blocks(backend, of, selected, 0)
    assert len(backend.rows) == 1 and exact_on(found).passes["unions"] == 1
    assert grouped_layers(runner(pattern, group={"together": False}).attn_backend) == ()


def test_a_replaced_method_is_found() -> None:
    found = runner(Pattern("FSFS"))
    found.attn_backend._forward_flashmla_sparse = print
    with pytest.raises(ProofError, match="something has replaced"):
        grouped.placed(found.attn_backend)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"dsa_prefill_impl": "flashmla_kv"},
            "--dsa-prefill-backend flashmla_kv can't be combined with --indexcache-un",
        ),
        ({"heads": 64}, "64 heads a rank can't be combined"),
        ({"heads": 12}, "12 heads a rank can't be combined"),
        ({"device": "cuda", "kv_cache_dtype": torch.float8_e4m3fn}, "a KV cache of torch.float8_e4m3fn"),
    ],
)
def test_what_it_can_not_serve_is_refused(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ProofError, match=line):
        runner(Pattern("FSFS"), **changes)


def test_other_devices_and_sinks_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hopper, "fits", lambda q, v_dim: False)
    meta = Served(
        device=torch.device("meta"), dtype=torch.bfloat16, heads=8, dim=576, v_dim=512, topk=64, selecting={0: 0}
    )
    with pytest.raises(ProofError, match="expected a Hopper GPU"):
        UnionAttention(meta)
    with pytest.raises(ProofError, match="has 0 kinds of layers"):
        runner(Pattern.parse("FS+0q4"))
    of = batch()
    of.more = {"attn_sink": torch.zeros(4)}
    with pytest.raises(SystemExit):
        attend(runner(Pattern("FS")).attn_backend, of, table(40, 0), 0)
    assert "attention sinks can't be combined with --indexcache-union-attention" in capsys.readouterr().err


def test_a_kernel_that_is_wrong_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(q: Tensor, *_: Any, out: Tensor, **__: Any) -> Tensor:
        return out.fill_(float("nan"))

    monkeypatch.setattr(serving, "union_attention", wrong)
    with pytest.raises(ProofError, match="differs from its definition"):
        runner(Pattern("FS"))


def test_without_the_extension_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dict(extensions("attention", ExactAttention)) == {"union": UnionAttention}
    monkeypatch.setattr("sglang_indexcache.families.dsa.exact.extensions", lambda *_: {})
    with pytest.raises(ProofError, match="no extension has attention over unions"):
        runner(Pattern("FS"))
