"""Counting which indexers run in the first passes, on stand-ins; real ones: tests/live/test_combinations.py."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sglang_indexcache import Pattern
from sglang_indexcache.families.deepseek_v4 import DEEPSEEK_V4
from sglang_indexcache.families.deepseek_v4.sglang import keep_selection
from sglang_indexcache.families.dsa import DSA
from sglang_indexcache.io.messages import RAN_INDEXER
from sglang_indexcache.serving import counted, proof
from sglang_indexcache.serving.counted import Counter, batch_of, kind_of, kinds_of
from sglang_indexcache.serving.proven import Proof, ProofHolder
from sglang_indexcache.sglang.attention import Observed, unobserved

PATTERN = Pattern("FSSF")


class Indexer(nn.Module):
    def forward(self, x: Tensor, return_indices: bool = True) -> Tensor:
        return self.forward_cuda(x, return_indices)

    def forward_cuda(self, x: Tensor, return_indices: bool = True) -> Tensor:
        return x

    def _get_topk_ragged(self, enable_dual_stream: bool, forward_batch: Any) -> str:
        return "selected"


class Attention(nn.Module):
    """As SGLang's: an F layer runs its indexer, a NextN layer does unless indices are handed to it."""

    def __init__(self, layer_id: int, shared: bool, is_nextn: bool = False) -> None:
        super().__init__()
        self.layer_id, self.skip_topk, self.next_skip_topk, self.is_nextn = layer_id, shared, False, is_nextn
        self.indexer = Indexer() if is_nextn or not shared else None
        self.times, self.dense, self.direct = 1, False, False

    def forward(self, hidden_states: Tensor, forward_batch: Any, prev_topk_indices: Tensor | None = None) -> Tensor:
        if self.dense and self.indexer is not None:
            self.indexer(hidden_states, return_indices=False)
            return hidden_states
        runs = not self.skip_topk or (self.is_nextn and prev_topk_indices is None)
        for _ in range(self.times if runs and len(hidden_states) else 0):
            assert self.indexer is not None
            (self.indexer.forward_cuda if self.direct else self.indexer)(hidden_states)
        return hidden_states


class Model(nn.Module):
    def __init__(self, pattern: Pattern = PATTERN) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention(layer, letter == "S") for layer, letter in enumerate(pattern.roles))

    def run(self, mode: str, rows: int = 2, tokens: int = 0, **given: Any) -> None:
        batch = batch_like(mode, tokens)
        for layer in self.layers:
            layer(hidden_states=torch.zeros(rows, 1), forward_batch=batch, **given)


def batch_like(mode: str, tokens: int) -> Any:
    return SimpleNamespace(forward_mode=SimpleNamespace(name=mode), seq_lens_cpu=torch.tensor([1, tokens]))


def counter_of(model: nn.Module, draft: bool = False, selects_after: int | None = None) -> Counter:
    name = "layer of the draft model" if draft else "layer"
    return Counter(DSA.sglang.attentions(model, PATTERN, draft), name, selects_after)


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def ended_by(capsys: pytest.CaptureFixture[str], model: Model, mode: str, **given: Any) -> str:
    with pytest.raises(SystemExit):
        model.run(mode, **given)
    return capsys.readouterr().err.splitlines()[-1]


def test_it_ends_when_every_kind_of_pass_was_counted() -> None:
    model = Model()
    counter = counter_of(model)
    counter.begin({"extend", "decode"})
    assert hooks(model) == 4 * 2 + 2 * 2
    for mode in ("EXTEND", "MIXED", "EXTEND", "IDLE"):
        model.run(mode, rows=0 if mode == "IDLE" else 2)
    assert counter.missing == {"decode"} and counter.counting
    model.run("DECODE")
    assert counter.passes == {"extend": 2, "mixed": 1, "decode": 1}
    assert not counter.missing and not counter.counting and hooks(model) == 0
    model.layers[0].times = 2
    model.run("DECODE")  # nothing of ours is left to see it
    counter.again()
    assert counter.missing == {"extend"} and counter.passes == {}


def test_it_does_not_end_between_a_pass_and_its_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """With graphs of prompts those of decoding come last, and each pass runs before it is captured."""
    module = SimpleNamespace(get_is_capture_mode=lambda: True)
    monkeypatch.setitem(sys.modules, "sglang.srt.model_executor.runner_utils.capture_mode", module)
    model = Model()
    counter = counter_of(model)
    counter.begin({"extend", "decode"})
    model.run("EXTEND")
    model.run("DECODE")
    with monkeypatch.context() as capturing:
        capturing.setattr(counted, "_capturing", lambda: True)
        model.run("DECODE")
    assert counter.counting and not counter.missing
    module.get_is_capture_mode = lambda: False
    model.run("EXTEND")
    assert not counter.counting
    assert counter.passes == {"extend": 1, "extend (captured)": 1, "decode": 1, "decode (captured)": 1}


@pytest.mark.parametrize("mode", ["EXTEND", "DECODE", "TARGET_VERIFY", "MIXED"])
def test_an_indexer_too_many_or_too_few_ends_the_process(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    kind = mode.lower().replace("_", " ")
    for times, name, value in ((0, "skip_topk", True), (2, "times", 2)):
        model = Model()
        counter_of(model).begin({"extend", "decode", "target verify", "mixed"})
        setattr(model.layers[3], name, value)
        line = f"indexcache: layer 3 {RAN_INDEXER} {times} times in a pass ({kind}), expected 1"
        assert ended_by(capsys, model, mode) == line


def test_indexers_that_are_called_past_their_module_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    model = Model()
    for layer in model.layers:
        layer.direct = True
    counter = counter_of(model)
    counter.begin({"extend", "decode"})
    model.run("EXTEND")
    assert counter.passes == {"extend": 1}
    model.layers[3].times = 2
    assert (
        ended_by(capsys, model, "DECODE") == f"indexcache: layer 3 {RAN_INDEXER} 2 times in a pass (decode), expected 1"
    )
    model.layers[3].times, model.layers[0].direct = 1, False
    model.run("DECODE")
    assert not counter.counting and not hooks(model)
    assert not any("forward_cuda" in vars(layer.indexer) for layer in model.layers if layer.indexer is not None)


def test_an_indexer_that_fails_in_its_module_is_counted_again() -> None:
    model = Model()
    counter = counter_of(model)
    counter.begin({"extend"})
    model.layers[0].indexer.forward = lambda x: 1 / 0
    with pytest.raises(ZeroDivisionError):
        model.run("EXTEND")
    del model.layers[0].indexer.forward
    for layer in model.layers:
        layer.direct = True
    model.run("EXTEND")
    assert counter.passes == {"extend": 1}


def test_an_s_layer_that_selects_ends_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    """Where S layers have indexers of their own (SGLang 0.5.17), and where they borrow one."""
    for own in (True, False):
        model = Model()
        if own:
            model.layers[1].indexer = Indexer()
        counter_of(model).begin({"decode"})
        if not own:
            model.layers[1].indexer = model.layers[0].indexer
        model.layers[1].skip_topk = False
        assert ended_by(capsys, model, "DECODE") == (
            f"indexcache: layer 1 {RAN_INDEXER} 1 times in a pass (decode), expected 0"
        )


def test_short_prompts_that_attend_to_everything_write_index_keys_alone() -> None:
    """In SGLang up to 0.5.14 S layers do, too, in which they have an indexer."""
    model = Model()
    for layer in model.layers:
        layer.dense, layer.indexer = True, Indexer()
    counter = counter_of(model)
    counter.begin({"extend"})
    model.run("EXTEND")
    assert counter.passes == {"extend": 1}


def test_another_layers_indexer_ends_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    model = Model()
    counter_of(model).begin({"decode"})
    model.layers[3].indexer = model.layers[0].indexer
    assert ended_by(capsys, model, "DECODE") == "indexcache: layer 3 ran the indexer of 0 in a pass (decode)"


def test_draft_models_select_unless_indices_are_handed_over(capsys: pytest.CaptureFixture[str]) -> None:
    model = Model()
    model.layers = nn.ModuleList([Attention(4, True, is_nextn=True)])
    counter = counter_of(model, draft=True)
    counter.begin({"draft extend"})
    assert not list(DSA.sglang.attentions(model, PATTERN, False))
    model.run("DECODE", prev_topk_indices=torch.zeros(1))
    model.run("DECODE")
    model.layers[0].times = 0
    assert ended_by(capsys, model, "DRAFT_EXTEND_V2") == (
        f"indexcache: layer of the draft model 0 {RAN_INDEXER} 0 times in a pass (draft extend), expected 1"
    )


def test_captured_passes_are_called_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counted, "_capturing", lambda: True)
    model = Model()
    counter = counter_of(model)
    counter.begin({"decode"})
    model.run("DECODE")
    assert counter.passes == {"decode (captured)": 1} and not counter.counting


def test_what_is_compiled_is_left_alone() -> None:
    model = Model(Pattern("F"))
    counter = counter_of(model)
    counter.begin({"decode"})
    compiled = torch.compile(model.layers[0], backend="eager", fullgraph=True)
    batch = SimpleNamespace(forward_mode=SimpleNamespace(name="DECODE"))
    compiled(torch.zeros(2, 1), batch)
    assert counter.passes == {}
    counter.end()
    assert hooks(model) == 0


def test_nothing_is_counted_where_attention_is_called_otherwise(caplog: pytest.LogCaptureFixture) -> None:
    """By an SGLang that nobody has read: roles are proven all the same."""
    model = Model(Pattern("F"))
    counter = counter_of(model)
    counter.begin({"decode"})
    model.layers[0](torch.zeros(2, 1), "words")
    assert hooks(model) == 0 and counter.missing == {"decode"} and "are not counted" in caplog.text


def test_batches_are_found_wherever_they_stand() -> None:
    batch = SimpleNamespace(forward_mode=SimpleNamespace(name="SPLIT_PREFILL"))
    assert batch_of((1, batch), {}) is batch_of((), {"forward_batch": batch}) is batch
    assert kind_of(batch, {}) == "extend" and kind_of(batch, {"x": torch.zeros(0, 1)}) is None


@pytest.mark.parametrize(
    ("arguments", "kinds", "draft"),
    [
        ({}, {"extend", "decode"}, {"draft extend"}),
        ({"speculative_algorithm": "EAGLE"}, {"extend", "target verify"}, {"draft extend"}),
        ({"disaggregation_mode": "prefill"}, {"extend"}, {"extend"}),
        ({"disaggregation_mode": "decode", "speculative_algorithm": "NEXTN"}, {"target verify"}, {"draft extend"}),
        ({"disaggregation_mode": "null"}, {"extend", "decode"}, {"draft extend"}),
    ],
)
def test_kinds_of_passes(arguments: Mapping[str, str], kinds: set[str], draft: set[str]) -> None:
    assert kinds_of(SimpleNamespace(**arguments)) == kinds
    assert kinds_of(SimpleNamespace(**arguments), draft=True) == draft


class C4Indexer(nn.Module):
    def __init__(self, layer_id: int) -> None:
        super().__init__()
        self.layer_id, self.wq_b = layer_id, nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        selected: Tensor = self.wq_b(x)
        return selected


class V4Layer(nn.Module):
    def __init__(self, layer_id: int) -> None:
        super().__init__()
        self.indexer = C4Indexer(layer_id)

    def forward(self, x: Tensor, forward_batch: Any) -> Any:
        return self.indexer(x)


class V4(nn.Module):
    """Four layers that run `PATTERN` as DeepSeek-V4's do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(V4Layer(layer) for layer in range(4))
        self.config = SimpleNamespace(compress_ratios=[4] * 4, num_hidden_layers=4)
        for layer in PATTERN.shared_layers:
            self.layers[layer].indexer.forward = keep_selection  # type: ignore[union-attr,assignment]

    def run_prompt(self, tokens: int = 65) -> None:
        for layer in self.layers:
            layer(x=torch.zeros(1, 1), forward_batch=batch_like("EXTEND", tokens))


def test_deepseek_v4_is_counted_where_an_indexer_projects_its_queries(capsys: pytest.CaptureFixture[str]) -> None:
    model = V4()
    counter = Counter(DEEPSEEK_V4.sglang.attentions(model, PATTERN, False))
    counter.begin({"extend"})
    model.run_prompt()
    assert counter.passes == {"extend": 1}
    counter.again()
    del model.layers[1].indexer.forward
    with pytest.raises(SystemExit):
        model.run_prompt()
    assert re.search(rf"layer 1 {RAN_INDEXER} 1 times in a pass \(extend\), expected 0", capsys.readouterr().err)


class Graphs:
    """SGLang's runner of graphs of prompts: a replay calls no module."""

    def __init__(self) -> None:
        self.replays = 0

    def execute(self, forward_batch: Any, **kwargs: Any) -> str:
        self.replays += 1
        return "logits"


def watched_graphs(counter: Counter, graphs: Any, eager: Any = None) -> None:
    plan = SimpleNamespace(proven=SimpleNamespace(counters=[counter]))
    proof.observe_replays(plan, SimpleNamespace(prefill_cuda_graph_runner=graphs, eager_runner=eager))  # type: ignore


def test_prompts_of_deepseek_v4_that_are_replayed_in_graphs_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its graphs hold whole indexers: without the call that replays them, such a server waits for ever."""
    model, graphs, checks = V4(), Graphs(), list[str]()
    counter = Counter(DEEPSEEK_V4.sglang.attentions(model, PATTERN, False), selects_after=64)
    counter.begin({"extend", "decode"})
    with monkeypatch.context() as capturing:
        capturing.setattr(counted, "_capturing", lambda: True)
        model.run_prompt()
    counter.observe_replays(graphs)
    for tokens in (3, 65):
        assert graphs.execute(batch_like("EXTEND", tokens), pp_proxy_tensors=None) == "logits"
    graphs.execute(batch_like("TARGET_VERIFY", 65))
    assert counter.passes == {"extend (captured)": 1, "extend (replayed)": 2} and counter.longest == 65
    assert counter.missing == {"decode"} and counter.counting
    counter.again(lambda: checks.append("looked"))  # after an update of weights: what was captured stays
    assert counter.missing == {"extend"} and counter.passes == {}
    graphs.execute(batch_like("EXTEND", 70))
    assert counter.passes == {"extend (replayed)": 1} and counter.longest == 70 and checks == ["looked"]
    assert not counter.counting and vars(graphs) == {"replays": 4}


def test_graphs_whose_indexers_nobody_could_count_are_said_so(caplog: pytest.LogCaptureFixture) -> None:
    """TorchDynamo compiles what it traces, and hooks are left out of that: nothing is waited for, nothing claimed."""
    graphs = Graphs()
    counter = Counter(DEEPSEEK_V4.sglang.attentions(V4(), PATTERN, False), selects_after=64)
    counter.begin({"extend"})
    watched_graphs(counter, graphs)
    with caplog.at_level("INFO"):
        graphs.execute(batch_like("EXTEND", 65))
    assert counter.passes == {"extend (replayed, not counted)": 1} and not counter.missing and not counter.counting
    [record] = caplog.records
    assert record.levelname == "WARNING" and "graphs whose indexers can't be counted" in record.message


def test_graphs_are_not_watched_where_their_parts_are() -> None:
    """A replay on a DSA model calls what selects; an eager runner in the place of graphs replays nothing."""
    graphs, dsa, v4 = Graphs(), counter_of(Model()), Counter(DEEPSEEK_V4.sglang.attentions(V4(), PATTERN, False))
    for counter in (dsa, v4):
        counter.begin({"extend"})
    watched_graphs(dsa, graphs)
    watched_graphs(v4, graphs, eager=graphs)
    watched_graphs(v4, None)
    assert vars(graphs) == {"replays": 0}


def test_server_info_says_what_was_counted_and_what_is_to_come() -> None:
    model, holder = Model(), ProofHolder()
    holder.set(Proof(PATTERN, 4, 1))
    assert "counted" not in holder.status("p.yaml")
    counter = counter_of(model)
    holder.counters.append(counter)
    counter.begin({"extend", "decode"})
    model.run("EXTEND")
    assert holder.status("p.yaml")["counted"] == {"passes": {"extend": 1}, "to_come": ["decode"]}
    model.run("DECODE")
    assert holder.status("p.yaml")["counted"] == {"passes": {"decode": 1, "extend": 1}}


def test_prompts_count_once_one_is_longer_than_a_selection() -> None:
    """A warm-up of three tokens attends to everything, whatever the pattern."""
    model, holder = Model(), ProofHolder()
    holder.set(Proof(PATTERN, 4, 1))
    counter = counter_of(model, selects_after=64)
    holder.counters.append(counter)
    counter.begin({"extend", "decode"})
    for tokens in (3, 64):
        model.run("EXTEND", tokens=tokens)
        model.run("DECODE", tokens=tokens + 1)
    counted = {"passes": {"decode": 2, "extend, all selected": 2}, "to_come": ["extend"]}
    assert holder.status("p.yaml")["counted"] == counted
    model.run("EXTEND", tokens=65)
    assert holder.status("p.yaml")["counted"] == {
        "passes": {"decode": 2, "extend": 1, "extend, all selected": 2},
        "longest_prompt": 65,
    }
    assert not counter.counting


def test_a_long_prompt_whose_f_layers_select_nothing_ends_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    model = Model()
    counter_of(model, selects_after=64).begin({"extend"})
    for layer in model.layers:
        layer.dense = True
    model.run("EXTEND", tokens=64)
    assert ended_by(capsys, model, "EXTEND", tokens=65) == (
        f"indexcache: layer 0 {RAN_INDEXER} 1 times and selected 0 times in a pass (extend), expected 1"
    )


def test_the_capture_of_a_graph_of_prompts_shows_no_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    counter = counter_of(model, selects_after=64)
    counter.begin({"extend"})
    module = SimpleNamespace(get_is_capture_mode=lambda: True)
    monkeypatch.setitem(sys.modules, "sglang.srt.model_executor.runner_utils.capture_mode", module)
    model.run("EXTEND", tokens=9000)  # made up, before it is captured
    with monkeypatch.context() as capturing:
        capturing.setattr(counted, "_capturing", lambda: True)
        model.run("EXTEND", tokens=9000)
    assert counter.missing == {"extend"} and counter.passes == {"extend (captured)": 2} and counter.longest == 0
    replay(model, "03")  # SGLang says that it captures all the while
    assert counter.passes == {"extend (captured)": 2, "extend (replayed)": 1} and not counter.counting


def replay(model: Model, letters: str, tokens: int = 65) -> None:
    """A graph of prompts: no module is called, SGLang calls the indexers' method between its parts."""
    batch = batch_like("EXTEND", tokens)
    for layer in map(int, letters):
        assert model.layers[layer].indexer._get_topk_ragged(False, batch) == "selected"


def test_graphs_of_prompts_that_are_replayed_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    model = Model()
    counter = counter_of(model, selects_after=64)
    counter.begin({"extend"})
    replay(model, "0")
    assert counter.missing == {"extend"}
    replay(model, "3")
    assert counter.passes == {"extend (replayed)": 1} and counter.longest == 65 and not counter.counting
    assert not any("_get_topk_ragged" in vars(layer.indexer) for layer in model.layers if layer.indexer is not None)
    for letters, line in (
        ("3", "layer 3 selected for a prompt (extend (replayed)) where layer 0 was next"),
        ("00", "layer 0 selected for a prompt (extend (replayed)) where layer 3 was next"),
        ("01", "layer 1 selected for a prompt (extend (replayed)) where layer 3 was next"),
    ):
        model.layers[1].indexer = Indexer()  # as in SGLang 0.5.17
        counter = counter_of(model, selects_after=64)
        counter.begin({"extend"})
        with pytest.raises(SystemExit):
            replay(model, letters)
        assert capsys.readouterr().err.splitlines()[-1] == f"indexcache: {line}"
        counter.end()


def test_what_is_watched_goes_back_to_what_stood_there() -> None:
    indexer, calls = Indexer(), list[Any]()
    observed = [Observed(indexer, "_get_topk_ragged", lambda *args: calls.append(args)) for _ in range(2)]
    assert indexer._get_topk_ragged(False, None) == "selected" and len(calls) == 2
    assert unobserved(vars(indexer)["_get_topk_ragged"]) is None
    observed[1].remove()
    observed[0].remove()
    assert "_get_topk_ragged" not in vars(indexer)
    placed = vars(indexer)["_get_topk_ragged"] = lambda *args: "placed"
    found = Observed(indexer, "_get_topk_ragged", lambda *args: None)
    assert indexer._get_topk_ragged(False, None) == "placed" and unobserved(indexer._get_topk_ragged) is placed
    found.remove()
    assert indexer._get_topk_ragged is placed
    found = Observed(indexer, "_get_topk_ragged", lambda *args: None)
    vars(indexer)["_get_topk_ragged"] = print  # somebody else's, who came later
    found.remove()
    assert vars(indexer)["_get_topk_ragged"] is print


@pytest.mark.parametrize("graphs", [True, False])
def test_a_server_that_only_decodes_waits_for_no_prompt_after_an_update(
    graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, looked = Model(), list[int]()
    counter = counter_of(model, selects_after=64)
    counter.begin(kinds_of(SimpleNamespace(disaggregation_mode="decode")))
    with monkeypatch.context() as capturing:
        capturing.setattr(counted, "_capturing", lambda: graphs)
        model.run("DECODE")
    assert not counter.counting
    for _ in range(2):  # graphs stay through several updates
        counter.again(lambda: looked.append(1))
        assert counter.missing == (set() if graphs else {"decode"}) and counter.counting is not graphs
        model.run("DECODE")
        assert not counter.counting
    assert len(looked) == (0 if graphs else 2)
