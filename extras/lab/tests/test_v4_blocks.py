"""Blocks of prompt queries on DeepSeek-V4: what they mean on transformers' model, and the engine that evaluates it."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from indexcache_lab import unread as lab_unread
from indexcache_lab.v4_blocks import RATIO, check_queries, needs, serving
from indexcache_lab.v4_blocks import __main__ as launcher
from indexcache_lab.v4_blocks.definition import in_blocks
from indexcache_lab.v4_blocks.engine import EntryBlocksEngine
from indexcache_lab.v4_blocks.plugin import ATTRIBUTE, VARIABLE
from indexcache_lab.v4_blocks.selection import EntryBlocks, EntryPlan, placed
from indexcache_lab.v4_blocks.serving import check
from indexcache_search.engines.transformers import TransformersEngine
from indexcache_search.errors import SearchError
from indexcache_search.hf.roles import apply_roles
from sglang_indexcache import Pattern
from sglang_indexcache.families import describe
from sglang_indexcache.families.deepseek_v4 import DEEPSEEK_V4
from sglang_indexcache.families.dsa.blocks.selection import WholePlan, blocks_of
from sglang_indexcache.io.errors import PatternError, ProofError
from sglang_indexcache.pattern_file.pattern_name import PatternSpec
from sglang_indexcache.serving.preflight import Preflight, PreflightError
from sglang_indexcache.sglang.asked import Asked
from tests.conftest import TOPK, random_tokens, tiny_config, tiny_model, tiny_v4_config
from tests.core.test_exact import AnySglang

LENGTH, LETTERS = 164, 4  # tokens are no whole blocks of 8
PATTERN = Pattern.parse("FSFF+0q4+2q8")


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model(tiny_v4_config())


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(3, 96, (2, LENGTH), generator=torch.Generator().manual_seed(seed))


def prompt(count: int = 120) -> Tensor:
    return (torch.arange(LENGTH) < count).expand(2, -1)


def run(model: Any, pattern: Pattern, given: Tensor, asked: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
    """Logits, and by letter what F layers selected, `[2, LENGTH, k]`."""
    found: dict[int, Tensor] = {}

    def keep(letter: int, chosen: Tensor) -> None:
        if pattern[letter] == "F":
            found[letter] = chosen

    with torch.inference_mode(), in_blocks(model, pattern.indexers, asked), apply_roles(model, pattern.plain(), keep):
        return model(input_ids=given, use_cache=False).logits, found


def inputs(model: Any, letter: int, given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Index queries, gates and keys of a letter where nothing selects in blocks."""
    indexer, seen = DEEPSEEK_V4.transformers.indexer_modules(model)[letter], []
    scorer = indexer.scorer
    own = type(scorer).forward

    def forward(q: Tensor, compressed: Tensor, hidden: Tensor) -> Tensor:
        seen[:] = [q, scorer.weights_proj(hidden), compressed]
        return own(scorer, q, compressed, hidden)

    scorer.forward = forward
    try:
        with torch.inference_mode():
            model(input_ids=given, use_cache=False)
    finally:
        del scorer.forward
    q, gates, keys = seen
    return q, gates, keys


@pytest.mark.parametrize("queries", [2, 4, 8])
def test_a_block_has_the_best_entries_of_its_mean(model: Any, queries: int) -> None:
    """Entry by entry, of the first letter, whose input no other letter changes."""
    given, count = tokens(), 120
    q, gates, keys = inputs(model, 0, given)
    _, found = run(model, Pattern.parse(f"FFFF+0q{queries}"), given, prompt(count))
    plain = run(model, Pattern("FFFF"), given, prompt(count))[1]
    assert torch.equal(found[0][:, count:], plain[0][:, count:])
    seen = 0
    for row in range(2):
        for begin in range(0, count, queries):
            block = slice(begin, begin + queries)
            visible = (begin + 1) // RATIO
            leader, gate = q[row, block].mean(0), gates[row, block].mean(0)
            scores = (torch.relu(leader @ keys[row, :visible].T) * gate[:, None]).sum(0)
            if visible < TOPK:
                continue
            wanted = set(scores.topk(TOPK).indices.tolist())
            assert all(set(found[0][row, at].tolist()) == wanted for at in range(begin, begin + queries)), begin
            seen += visible > TOPK
    assert seen > 10
    assert not torch.equal(found[0].sort(-1).values, plain[0].sort(-1).values)


def test_without_prompts_or_blocks_nothing_changes(model: Any) -> None:
    given = tokens()
    plain = run(model, Pattern("FSFF"), given, prompt())[0]
    assert torch.equal(run(model, PATTERN, given, prompt(0))[0], plain)
    apart = (run(model, PATTERN, given, prompt())[0] - plain).abs().amax((0, 2))
    assert apart[: RATIO * TOPK].max() < 1e-5, "everything is selected"
    assert apart[RATIO * TOPK :].max() > 1e-3


def test_no_block_sees_what_comes_after_it(model: Any) -> None:
    given, changed = tokens(), tokens()
    changed[:, 96:] = tokens(1)[:, 96:]
    first, second = (run(model, PATTERN, item, prompt())[0][:, :96] for item in (given, changed))
    assert torch.allclose(first, second, atol=1e-5)


def test_blocks_fit_into_windows_and_selections(model: Any) -> None:
    check_queries(64, 512, 128)
    check_queries(8, 4, 11)
    for queries, topk, window, line in (
        (128, 512, 128, "blocks of 128 queries reach behind a window of 128 tokens"),
        (8, 4, 10, "blocks of 8 queries reach behind a window of 10 tokens"),
        (64, 24, 128, "96 tokens are no whole blocks of 64 queries"),
    ):
        with pytest.raises(PatternError, match=line):
            check_queries(queries, topk, window)
    with pytest.raises(PatternError, match="reach behind a window of 16 tokens"), torch.inference_mode():
        run(model, Pattern.parse("FFFF+0q16"), tokens(), prompt())


@pytest.mark.parametrize("queries", [2, 4, 8, 16, 64])
def test_what_a_block_leaves_out_is_in_the_window_of_its_last_query(queries: int) -> None:
    window = queries + RATIO - 1
    for begin in range(0, 4 * queries, queries):
        last = begin + queries - 1
        inside = range((begin + 1) // RATIO, (last + 1) // RATIO)
        assert all(RATIO * entry > last - window for entry in inside)
    assert any(RATIO * ((begin + 1) // RATIO) <= begin + queries - 1 - (window - RATIO) for begin in (queries, 2, 64))


def test_a_cache_is_refused(model: Any) -> None:
    with (
        pytest.raises(ValueError, match="expected all 164 of a sequence"),
        torch.inference_mode(),
        in_blocks(model, PATTERN.indexers, prompt()),
    ):
        model(input_ids=tokens()[:, :80], use_cache=False)


def test_the_engine_evaluates_patterns_with_blocks(model: Any) -> None:
    """By the definition, from the first layer, whatever ran before; the plain engine refuses them."""
    description = describe(tiny_v4_config(), "v4")
    data = random_tokens(3, LENGTH, first_sparse_position=RATIO * TOPK).ending_in_replies(32)
    engine = EntryBlocksEngine(model, description)
    plans = [Pattern("FSFF"), PATTERN, Pattern("FSFF"), Pattern.parse("FSFF+2q8")]
    losses = {str(found.pattern): found.losses for found in engine.evaluate(plans, data, "nll")}
    assert len({tuple(np.round(item, 6)) for item in losses.values()}) == 3
    for pattern in (PATTERN, Pattern("FSFF")):
        [alone] = EntryBlocksEngine(model, description).evaluate([pattern], data, "nll")
        assert losses[str(pattern)] == pytest.approx(alone.losses, abs=1e-6)
    ids = torch.from_numpy(data.tokens[:2].astype(np.int64))
    logits = run(model, PATTERN, ids, torch.from_numpy(data.prompt[:2]))[0]
    for row in range(2):
        at = np.flatnonzero(data.scored[row])
        picked = logits[row].log_softmax(-1)[at - 1, ids[row, at]]
        assert losses[str(PATTERN)][row] == pytest.approx(-picked.sum().item(), rel=1e-4)
    with pytest.raises(SearchError, match="0q4: prompt tokens count"):
        list(engine.evaluate([PATTERN], random_tokens(1, LENGTH), "nll"))
    with pytest.raises(SearchError, match="indexers of deepseek_v4 can't select in blocks"):
        list(TransformersEngine(model, description).evaluate([PATTERN], data, "nll"))


def checked(folder: Path, config: dict[str, Any], pattern: Pattern | None, blocks: str = "0q4", **flags: Any) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    plan = None
    if pattern is not None:
        plan = Preflight(PatternSpec("x", letters=pattern), Asked(allow_unread=True), AnySglang(Path(), "0.0"))
    check(plan, SimpleNamespace(**{ATTRIBUTE: blocks, "model_path": str(folder), "device": "cuda", **flags}))


@pytest.mark.parametrize(
    ("pattern", "changes", "line"),
    [
        (None, {}, "the engine serves no pattern"),
        (Pattern("FSFF"), {"blocks": "1q4"}, "1q4 is of F layers, but layer 1 is S"),
        (Pattern("FSFF"), {"blocks": "fast"}, "indexer is 'fast'"),
        *(
            (Pattern("FFFF"), {name: value}, f"{flag} can't be combined with {VARIABLE}")
            for name, value, flag in (
                ("enable_prefill_cp", True, "--enable-prefill-cp"),
                ("attn_cp_size", 2, "--attn-cp-size"),
                ("dcp_size", 2, "--dcp-size"),
                ("enable_hisparse", True, "--enable-hisparse"),
                ("enable_two_batch_overlap", True, "--enable-two-batch-overlap"),
                ("enable_deepseek_v4_fp4_indexer", True, "--enable-deepseek-v4-fp4-indexer"),
                ("enable_return_indexer_topk", True, "--enable-return-indexer-topk"),
                ("hicache_storage_backend", "file", "--hicache-storage-backend"),
                ("disaggregation_mode", "prefill", "--disaggregation-mode"),
                ("cuda_graph_backend_prefill", "breakable", "graphs of prompts"),
                ("device", "npu", "--device npu"),
            )
        ),
    ],
)
def test_what_a_server_can_not_have(
    pattern: Pattern | None, changes: dict[str, Any], line: str, tmp_path: Path
) -> None:
    """Also where all letters are F, of which the core refuses none of these."""
    with pytest.raises((PreflightError, PatternError), match=line):
        checked(tmp_path, tiny_v4_config(), pattern, **changes)


def test_what_a_server_can_have(tmp_path: Path) -> None:
    checked(tmp_path, tiny_v4_config(), Pattern("FSFF"), disaggregation_mode="null", tp_size=8, attn_cp_size=1)
    checked(tmp_path, tiny_v4_config(), Pattern("FFFF"), cuda_graph_backend_prefill="disabled")
    with pytest.raises(PreflightError, match="is not served on dsa, expected DeepSeek-V4"):
        checked(tmp_path, tiny_config(), Pattern("FSSFSS"))


WIDTH = 8  # of selections


class Metadata:
    """SGLang's of a pass: `core_metadata` is another name of `core_attn_metadata`."""

    def __init__(self, core: Any, indexer: Any) -> None:
        self.core_attn_metadata, self.indexer_metadata = core, indexer

    @property
    def core_metadata(self) -> Any:
        return self.core_attn_metadata


@dataclasses.dataclass
class OfIndexer:
    """SGLang's of an indexer."""

    page_table: Tensor
    compressed_seq_lens: Tensor
    use_prefill_cuda_graph: bool = False
    rows_per_request: int = 1


class Indexer:
    """A C4 indexer whose queries are given; its keys are its backend's."""

    layer_id, index_topk = 3, WIDTH

    def __init__(self, q: Tensor, gates: Tensor) -> None:
        self.q, self.gates = q, gates

    def compute_q(self, q_lora: Tensor, positions: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return self.q, self.gates


class Backend:
    """Scores and selects as SGLang's, row by row of its metadata; slots are entries and 100 for each request."""

    def __init__(self, keys: Tensor, metadata: Metadata) -> None:
        self.keys, self.forward_metadata, self.rows = keys, metadata, list[int]()

    def forward_c4_indexer(
        self, x: Tensor, q_lora: Tensor, forward_batch: Any, c4_indexer: Any, enable_multi_stream: bool = False
    ) -> None:
        core, of_rows = self.forward_metadata.core_metadata, self.forward_metadata.indexer_metadata
        q, gates = c4_indexer.compute_q(q_lora, core.positions, x)
        self.rows.append(len(q))
        assert len(q) == len(of_rows.page_table) == len(core.c4_sparse_page_indices)
        for row, visible in enumerate(of_rows.compressed_seq_lens.tolist()):
            request = int(of_rows.page_table[row, 0])
            scores = (torch.relu(q[row].float() @ self.keys[request, :visible].T) * gates[row]).sum(0)
            chosen = scores.topk(min(c4_indexer.index_topk, visible)).indices
            core.c4_sparse_raw_indices[row, : len(chosen)] = chosen.int()
            core.c4_sparse_page_indices[row, : len(chosen)] = chosen.int() + 100 * request


def a_pass(prefixes: list[int], lengths: list[int], mode: str = "EXTEND") -> tuple[Backend, dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    positions = torch.cat([torch.arange(p, p + n) for p, n in zip(prefixes, lengths, strict=True)])
    requests = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    count = len(positions)
    core = SimpleNamespace(positions=positions)
    for name in ("c4_sparse_page_indices", "c4_sparse_raw_indices"):
        setattr(core, name, torch.full((count, WIDTH), -1, dtype=torch.int32))
    indexer = OfIndexer(requests[:, None].int(), ((positions + 1) // RATIO).int())
    backend = Backend(torch.randn(len(lengths), 400, 16, generator=generator), Metadata(core, indexer))
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(name=mode), extend_seq_lens_cpu=lengths, extend_prefix_lens_cpu=prefixes
    )
    q, gates = (torch.randn(count, 4, size, generator=generator) for size in (16, 1))
    x = torch.zeros(count, 1)
    return backend, {"x": x, "q_lora": x, "forward_batch": batch, "c4_indexer": Indexer(q, gates)}


CASES = {
    "one": ([0], [400]),
    "chunk": ([256], [256]),
    "batch": ([0, 64, 300], [300, 5, 290]),
    "unaligned": ([33, 0], [301, 200]),
}


@pytest.mark.parametrize("queries", [2, 8, 16])
@pytest.mark.parametrize("case", CASES)
def test_sglangs_method_selects_once_for_a_block(case: str, queries: int) -> None:
    """Leaders are means over the definition's blocks; all other queries, and what other layers wrote, are SGLang's."""
    prefixes, lengths = CASES[case]
    plain, given = a_pass(prefixes, lengths)
    plain.forward_c4_indexer(**given)
    backend, given = a_pass(prefixes, lengths)
    whole, indexer = backend.forward_metadata, given["c4_indexer"]
    found = EntryBlocks(backend, {3: queries, 5: 4})
    backend.forward_c4_indexer(**given)
    assert backend.forward_metadata is whole and given["c4_indexer"] is indexer
    runs = blocks_of(prefixes, lengths, queries, RATIO * WIDTH)
    shared = torch.zeros(sum(lengths), dtype=torch.bool)
    for run_ in runs:
        for row in range(run_.row, run_.row + run_.count * queries, queries):
            block = slice(row, row + queries)
            shared[block] = True
            visible = (run_.begin + row - run_.row + 1) // RATIO
            leader, gate = indexer.q[block].mean(0), indexer.gates[block].mean(0)
            scores = (torch.relu(leader @ backend.keys[run_.request, :visible].T) * gate).sum(0)
            wanted = sorted(scores.topk(WIDTH).indices.tolist())
            for at in range(row, row + queries):
                assert sorted(whole.core_metadata.c4_sparse_raw_indices[at].tolist()) == wanted
                slots = whole.core_metadata.c4_sparse_page_indices[at].tolist()
                assert sorted(slots) == [entry + 100 * run_.request for entry in wanted]
    for name in ("c4_sparse_page_indices", "c4_sparse_raw_indices"):
        ours, theirs = (getattr(item.forward_metadata.core_metadata, name) for item in (backend, plain))
        assert torch.equal(ours[~shared], theirs[~shared]) and not torch.equal(ours, theirs)
    blocks = sum(item.count for item in runs)
    assert (found.passes, found.blocks) == (1, blocks) and blocks > 3
    assert backend.rows == [blocks + int((~shared).sum())]
    backend.forward_c4_indexer(**given)
    assert (found.passes, found.blocks) == (1, 2 * blocks), "two layers of one pass have one plan"


@pytest.mark.parametrize(
    "change",
    [
        lambda backend, given: setattr(given["forward_batch"].forward_mode, "name", "DECODE"),
        lambda backend, given: setattr(given["forward_batch"].forward_mode, "name", "MIXED"),
        lambda backend, given: setattr(backend.forward_metadata.indexer_metadata, "use_prefill_cuda_graph", True),
        lambda backend, given: setattr(backend.forward_metadata.indexer_metadata, "rows_per_request", 2),
        lambda backend, given: given.update(x=torch.zeros(401, 1)),
        lambda backend, given: given.update(enable_multi_stream=True),
        lambda backend, given: setattr(given["c4_indexer"], "layer_id", 4),
        lambda backend, given: setattr(given["forward_batch"], "extend_seq_lens_cpu", [399]),
    ],
    ids=["decode", "mixed", "graph", "grouped", "padding", "streams", "another-layer", "fewer-rows"],
)
def test_other_passes_are_sglangs(change: Any) -> None:
    backend, given = a_pass([0], [400])
    found = EntryBlocks(backend, {3: 8})
    change(backend, given)
    backend.forward_c4_indexer(**given)
    assert backend.rows == [400] and (found.passes, found.blocks) == (0, 0)


def test_metadata_is_put_back_when_sglang_fails() -> None:
    backend, given = a_pass([0], [400])
    whole = backend.forward_metadata
    EntryBlocks(backend, {3: 8})
    backend.keys = torch.zeros(0, 400, 16)
    with pytest.raises(IndexError):
        backend.forward_c4_indexer(**given)
    assert backend.forward_metadata is whole


def test_a_plan_without_raw_indices() -> None:
    """Where SGLang keeps slots alone, as in dense prefill."""
    backend, _ = a_pass([0], [400])
    core = backend.forward_metadata.core_metadata
    core.c4_sparse_raw_indices = None
    rows = WholePlan.of(blocks_of([0], [400], 8, RATIO * WIDTH), [400], 8, torch.device("cpu"))
    plan = EntryPlan.of(backend.forward_metadata, rows)
    plan.metadata.core_metadata.c4_sparse_page_indices[:] = torch.arange(len(rows.first))[:, None].int()
    plan.spread()
    assert torch.equal(core.c4_sparse_page_indices[:, 0], plan.row_of.int())


def test_something_in_its_place_is_seen() -> None:
    """An extension that wraps the method afterwards would select for each query, or for blocks that are none."""
    backend, _ = a_pass([0], [10])
    found = EntryBlocks(backend, {3: 4})
    assert placed(backend) is found and placed(SimpleNamespace()) is None
    backend.forward_c4_indexer = print  # type: ignore[method-assign,assignment]
    with pytest.raises(ProofError, match="something has replaced forward_c4_indexer"):
        placed(backend)


@dataclasses.dataclass(eq=False)
class Plan:
    """An engine's that serves a pattern."""

    pattern: Pattern


def runner(monkeypatch: pytest.MonkeyPatch, backend: Any, blocks: str = "0q4+2q8", **changes: Any) -> Any:
    """A `ModelRunner` of a model with letters FSFF, of which this stage has the first three."""
    plan, roles = Plan(Pattern("FSFF")), {0: "F", 1: "S", 2: "F"}
    indexers = {letter: SimpleNamespace(layer_id=2 * letter + 1, index_topk=512) for letter in roles}
    adapter = SimpleNamespace(modules=lambda model: indexers.items(), role=lambda letter, module: roles[letter])
    monkeypatch.setattr(serving, "DEEPSEEK_V4", SimpleNamespace(sglang=adapter))
    monkeypatch.setattr(serving.engines, "plan_of", lambda server_args: plan)
    model = SimpleNamespace(config=SimpleNamespace(sliding_window=128))
    return SimpleNamespace(
        attn_backend=backend, model=model, server_args=SimpleNamespace(**{ATTRIBUTE: blocks}), roles=roles, **changes
    )


def test_it_stands_on_the_targets_backend_and_status_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, _ = a_pass([0], [2400])
    target = runner(monkeypatch, backend, "0q4+2q8+3q2")
    for silent in (SimpleNamespace(server_args=SimpleNamespace(**{ATTRIBUTE: ""})), target):
        reply = SimpleNamespace(internal_state={})
        if silent is target:
            with pytest.raises(ProofError, match="nothing selects in blocks"):
                serving.ready({}, silent)
            serving.place(None, SimpleNamespace(is_draft_worker=True, server_args=target.server_args))
            serving.place(None, silent)
            found = placed(backend)
            serving.place(None, silent)  # graphs are captured again after an update
            assert found is not None and placed(backend) is found
            assert found.queries == {1: 4, 5: 8}, "letter 3 is another stage's"
        else:
            serving.place(None, silent)
        serving.ready({}, silent)
        serving.status(reply, silent)
        expected = {"layers": {"1": 4, "5": 8}, "passes": 0, "blocks": 0}
        assert reply.internal_state == ({serving.KEY: expected} if silent is target else {})
    backend.forward_c4_indexer = print  # type: ignore[method-assign,assignment]
    with pytest.raises(ProofError, match="something has replaced"):
        serving.status(reply, target)


def test_what_is_loaded_otherwise_is_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    other = runner(monkeypatch, SimpleNamespace())
    with pytest.raises(ProofError, match="the attention backend is SimpleNamespace"):
        serving.place(None, other)
    other.roles[2] = "S"
    with pytest.raises(ProofError, match="letter 2 should select in blocks, but its indexer does not run"):
        serving.place(None, other)
    other.model.config.sliding_window = 4
    with pytest.raises(PatternError, match="reach behind a window of 4 tokens"):
        serving.place(None, other)


def test_a_source_that_nobody_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the functions and classes, one at a time."""
    assert {need.target.removeprefix("sglang.") for need in needs.BLOCKS.reads} == needs.READ.keys()
    source: Any = SimpleNamespace(version="0.5.99", definition=lambda need: need.target)
    monkeypatch.setattr(lab_unread, "digest", lambda text: next(iter(needs.READ[text.removeprefix("sglang.")]), ""))
    assert needs.unread(source) is None
    for changed in needs.BLOCKS.reads:
        read = {**needs.READ, changed.target.removeprefix("sglang."): {"": "0.5.23"}}
        monkeypatch.setattr(
            lab_unread, "digest", lambda text, was=dict(needs.READ): next(iter(was[text.removeprefix("sglang.")]))
        )
        with monkeypatch.context() as patch:
            patch.setattr(needs, "READ", read)
            line = needs.unread(source)
        assert line is not None and changed.target in line and "0.5.99" in line and "\n" not in line


def test_the_launcher_asks_and_needs_the_plugin(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setattr(launcher.launch_server, "main", lambda words: asked.append((os.environ[VARIABLE], words)))
    monkeypatch.setattr(launcher, "entry_points", lambda group: [SimpleNamespace(name=launcher.ENTRY)])
    for words, plugins, line in (
        (["--tp", "8"], "", "the first argument is --tp, expected blocks as 0q4"),
        (["0q4"], "indexcache", f"leaves the plugin {launcher.ENTRY} out"),
    ):
        monkeypatch.setenv("SGLANG_PLUGINS", plugins)
        with pytest.raises(SystemExit):
            launcher.main(words)
        assert line in capsys.readouterr().err and not asked
    monkeypatch.setenv("SGLANG_PLUGINS", f"indexcache, {launcher.ENTRY}")
    launcher.main(["0q4", "--tp", "8"])
    assert asked == [("0q4", ["--tp", "8"])]
    monkeypatch.setattr(launcher, "entry_points", lambda group: ())
    with pytest.raises(SystemExit):
        launcher.main(["0q4"])
    assert "would not find the plugin" in capsys.readouterr().err
