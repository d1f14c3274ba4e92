"""Control requests on a rank, on stand-ins: what they change and refuse; against SGLang itself in tests/live."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sglang_indexcache import IndexCacheError, Pattern
from sglang_indexcache.calibration import protocol
from sglang_indexcache.calibration.control import Controller
from sglang_indexcache.calibration.divergence import Divergence
from sglang_indexcache.calibration.measure import Action, Measure
from sglang_indexcache.calibration.overlap import Overlap
from sglang_indexcache.calibration.preflight import Calibration
from sglang_indexcache.families.dsa import DSA
from sglang_indexcache.families.dsa.needs import RULE
from sglang_indexcache.families.dsa.override import to_sglang
from sglang_indexcache.io.messages import BEGINS_SHARED, BUSY, OTHER_LENGTH
from sglang_indexcache.sglang.probes import SglangSource

LAYERS = 6
NATIVE = Pattern("FFFFSF")  # layer 4 is locked


class Attention(nn.Module):
    def __init__(self, layer_id: int) -> None:
        super().__init__()
        self.layer_id, self.skip_topk, self.next_skip_topk = layer_id, NATIVE[layer_id] == "S", False
        self.weight = nn.Parameter(torch.zeros(1))


class Scheduler:
    """As much of SGLang's as control requests see; layers `stage` are on this rank."""

    def __init__(self, dp_rank: int | None = None, stage: range = range(LAYERS)) -> None:
        runner = SimpleNamespace(
            model=nn.ModuleList([Attention(layer) for layer in stage]),
            model_config=SimpleNamespace(hf_config=SimpleNamespace(**to_sglang(NATIVE)), hidden_size=4),
            dtype=torch.bfloat16,
            server_args=SimpleNamespace(chunked_prefill_size=64),
        )
        self.ps, self.tp_worker = SimpleNamespace(dp_rank=dp_rank), SimpleNamespace(model_runner=runner)
        self.idle, self.flushed = True, 0

    def is_fully_idle(self) -> bool:
        return self.idle

    def flush_cache(self) -> None:
        self.flushed += 1

    @property
    def roles(self) -> str:
        return "".join("FS"[module.skip_topk] for module in self.tp_worker.model_runner.model)


@pytest.fixture(autouse=True)
def _no_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_indexcache.calibration.control.version", lambda name: "0.0")
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)


def controller(
    divergence: Divergence | None = None, overlap: Overlap | None = None, added: Sequence[Measure] = ()
) -> Controller:
    """One on an SGLang that has the places for the given measures alone."""
    calibration = Calibration(SglangSource(Path(), "0.0"))
    calibration._family, calibration.pattern, calibration.config_sha256 = DSA, NATIVE, "digest"
    given = [measure.feature for measure in (divergence, overlap, *added) if measure is not None]
    calibration.has = lambda feature: feature in given  # type: ignore[method-assign]
    return Controller(calibration, (divergence or Divergence(1), overlap or Overlap(), *added))


def ask(scheduler: Scheduler, action: str, control: Controller | None = None, **body: Any) -> dict[str, Any]:
    return (control or controller()).execute(scheduler, {"action": action, **body})


def test_switching_is_two_attributes_a_layer_and_the_configuration() -> None:
    scheduler = Scheduler()
    answer = ask(scheduler, "switch", pattern="FSSFSS")
    assert scheduler.roles == answer["pattern"] == "FSSFSS" and scheduler.flushed == 1
    following = [module.next_skip_topk for module in scheduler.tp_worker.model_runner.model]
    assert following == [True, True, False, True, True, False]
    assert answer["fingerprint"] == Pattern("FSSFSS").fingerprint and answer["config_sha256"] == "digest"
    assert ask(scheduler, "status")["pattern"] == "FSSFSS"


@pytest.mark.parametrize("action", ["check", "switch"])
@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("FSSF", OTHER_LENGTH.format(4, 6)),
        ("FFFFFF", "layer 4"),
        ("SFFFSF", BEGINS_SHARED),
        (None, "pattern is NoneType, expected a string"),
        (["F"], "pattern is list, expected a string"),
    ],
)
def test_patterns_that_do_not_fit(action: str, pattern: Any, message: str) -> None:
    scheduler = Scheduler()
    with pytest.raises(IndexCacheError, match=message):
        ask(scheduler, action, pattern=pattern)
    assert scheduler.roles == NATIVE.roles and not scheduler.flushed


def test_a_busy_rank_does_not_switch() -> None:
    scheduler = Scheduler()
    scheduler.idle = False
    with pytest.raises(IndexCacheError, match=f"busy: {BUSY}"):
        ask(scheduler, "switch", pattern="FSSFSS")
    assert scheduler.roles == NATIVE.roles
    assert ask(scheduler, "status")["pattern"] == NATIVE.roles


@pytest.mark.parametrize("name", ["prefill_cuda_graph_runner", "decode_cuda_graph_runner", "graph_runner"])
def test_cuda_graphs_keep_their_pattern(name: str) -> None:
    scheduler = Scheduler()
    runner = scheduler.tp_worker.model_runner
    setattr(runner, name, object())
    with pytest.raises(IndexCacheError, match="CUDA graphs are on, and they keep the pattern they were captured with"):
        ask(scheduler, "switch", pattern="FSSFSS")
    assert scheduler.roles == NATIVE.roles
    runner.eager_runner = getattr(runner, name)  # what SGLang has in the place of graphs
    ask(scheduler, "switch", pattern="FSSFSS")


def test_requests_for_one_data_parallel_rank_leave_the_others_alone() -> None:
    first, second = Scheduler(None), Scheduler(1)
    second.idle = False
    for scheduler in (first, second):
        ask(scheduler, "switch", pattern="FSSFSS", dp_rank=0)
    assert (first.roles, second.roles) == ("FSSFSS", NATIVE.roles)
    assert ask(second, "status")["dp_rank"] == 1


def test_every_answer_counts_the_switches_of_its_rank_since_its_start() -> None:
    """By whomever: a client that compares them knows that all between ran the pattern it set."""
    control, scheduler = controller(), Scheduler(0)
    first = ask(scheduler, "status", control)
    for number, (pattern, rank) in enumerate([("FSSFSS", None), ("FSSFSS", 0), ("FFFFSF", 0)], start=1):
        answer = ask(scheduler, "switch", control, pattern=pattern, dp_rank=rank)
        assert (answer["boot"], answer["switches"]) == (first["boot"], number)
    ask(scheduler, "switch", control, pattern="FSSFSS", dp_rank=1)  # another rank's
    with pytest.raises(IndexCacheError):
        ask(scheduler, "switch", control, pattern="FS")
    assert ask(scheduler, "status", control)["switches"] == 3
    again = ask(scheduler, "status", controller())
    assert again["boot"] != first["boot"] and again["switches"] == 0 and again["protocol"] == protocol.VERSION


def test_a_rank_that_does_not_run_what_its_configuration_says_ends(capsys: pytest.CaptureFixture[str]) -> None:
    scheduler = Scheduler()
    scheduler.tp_worker.model_runner.model[3].skip_topk = True
    with pytest.raises(SystemExit):
        ask(scheduler, "status")
    assert "layer 3 does not run what the configuration says" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("action", "body", "message"),
    [
        ("explode", {}, "action is 'explode', expected status, check, switch, baseline, kl, sample, overlap"),
        ("baseline", {"data": "x"}, "ranges are None, expected"),
        ("baseline", {"data": "x", "ranges": [[3, 3]]}, "a range is empty"),
        ("baseline", {"data": "x", "ranges": [[0, 10**12]]}, "GB of host memory on each rank, allowed are 1"),
        ("kl", {}, "requests is missing"),
        ("kl", {"requests": {"indexcache:kl:0::n": [[1, 2]]}}, "it was not run"),
        ("sample", {"positions": "all"}, "positions is missing"),
    ],
)
def test_requests_that_make_no_sense(action: str, body: dict[str, Any], message: str) -> None:
    with pytest.raises(IndexCacheError, match=message):
        ask(Scheduler(), action, controller(Divergence(1), Overlap()), **body)


def test_what_can_be_measured_is_said_and_the_rest_refused() -> None:
    assert ask(Scheduler(), "status", controller(Divergence(1), Overlap()))["measures"] == ["kl", "overlap"]
    assert ask(Scheduler(), "status", controller(Divergence(1)))["measures"] == ["kl"]
    stage = Scheduler(stage=range(3))
    control = controller(Divergence(1), Overlap())
    assert ask(stage, "status", control)["measures"] == []
    for scheduler, asked in ((stage, control), (Scheduler(), controller())):
        with pytest.raises(IndexCacheError, match="kl is not measured with pipeline stages"):
            ask(scheduler, "baseline", asked, data="x", ranges=[[0, 1]])
        with pytest.raises(IndexCacheError, match="index overlap is not measured"):
            ask(scheduler, "sample", asked, positions=[3])


class Heads(Measure):
    """What another package may measure; of this model it can't."""

    name, feature, refusal = "heads", RULE, "heads are not counted of this model"

    def __init__(self, fitting: bool = True) -> None:
        self.fitting, self.baseline = fitting, list[bool]()

    def actions(self) -> dict[str, Action]:
        return {"heads": lambda calibration, runner, body: {"heads": [body["layer"], calibration.family.name]}}

    def fits(self, calibration: Calibration) -> bool:
        return self.fitting

    def switched(self, is_baseline: bool) -> None:
        self.baseline.append(is_baseline)


def test_a_measure_of_another_package_is_asked_for_as_the_others() -> None:
    heads = Heads()
    control, scheduler = controller(Divergence(1), added=[heads]), Scheduler()
    assert ask(scheduler, "heads", control, layer=3)["heads"] == [3, "dsa"]
    assert ask(scheduler, "switch", control, pattern="FSSFSS")["measures"] == ["kl", "heads"]
    assert heads.baseline == [False]
    for asked, other in ((controller(added=[Heads(False)]), scheduler), (control, Scheduler(stage=range(3)))):
        assert "heads" not in ask(other, "status", asked)["measures"]
        with pytest.raises(IndexCacheError, match="heads are not counted of this model"):
            ask(other, "heads", asked, layer=3)


def test_switching_tells_what_is_kept_which_pattern_runs() -> None:
    divergence = Divergence(1)
    control, scheduler = controller(divergence), Scheduler()
    ask(scheduler, "switch", control, pattern="FSSFSS")
    assert not divergence.keeping
    ask(scheduler, "switch", control, pattern=NATIVE.roles)
    assert divergence.keeping


def test_flags_that_losses_depend_on_are_told() -> None:
    """A search is not gone on with on a server that computes something else with the same weights."""
    scheduler, flags = Scheduler(), {"json_model_override_args": '{"rope_theta": 7}', "kv_cache_dtype": "fp8_e4m3"}
    plain = ask(scheduler, "status")["versions"]
    unset = {"quantization": None, "load_format": "auto", "json_model_override_args": "{}"}
    scheduler.tp_worker.model_runner.server_args = SimpleNamespace(chunked_prefill_size=64, **unset)
    assert ask(scheduler, "status")["versions"] == plain
    scheduler.tp_worker.model_runner.server_args = SimpleNamespace(chunked_prefill_size=64, **flags)
    assert ask(scheduler, "status")["versions"] == {**plain, **flags}
