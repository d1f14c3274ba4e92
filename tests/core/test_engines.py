"""What is asked for belongs to an engine, not to its process; on a stand-in of SGLang (the real one: tests/live)."""

from __future__ import annotations

import json
import os
import random
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from scripts.tools.pattern_files import pattern_file
from sglang_indexcache import Pattern
from sglang_indexcache.io import refusal
from sglang_indexcache.io.errors import ProofError
from sglang_indexcache.io.messages import NO_INDEXER, NOT_COMBINED, NOT_LOADED, OTHER_LENGTH
from sglang_indexcache.serving import engines
from tests import fake_sglang
from tests.conftest import TOPK, tiny_config

ASK, CALIBRATE = refusal.PATTERN_VARIABLE, refusal.CALIBRATE_VARIABLE
LAYERS = {"six": 6, "eight": 8}


class Process:
    """A program that starts engines; `env` becomes its environment while a scheduler of an engine is started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.folder, self.env_between = folder, dict[str, str]()
        self.engine = fake_sglang.install(monkeypatch, self._between)
        for name, layers in LAYERS.items():
            config = tiny_config(num_hidden_layers=layers)
            (folder / name).mkdir()
            (folder / name / "config.json").write_text(json.dumps(config))
            for letters in patterns(layers):
                pattern_file(Pattern(letters), config).save(folder / f"{letters}.yaml")

    def _between(self) -> None:
        self.set(self.env_between)

    def set(self, wanted: dict[str, str]) -> None:
        for name in (ASK, CALIBRATE):
            os.environ.pop(name, None)
        os.environ.update(wanted)

    def start(self, model: str, env: dict[str, str], own: Any = None, **flags: Any) -> Any:
        self.set(env)
        overrides = json.dumps({"rope_theta": 7, **({} if own is None else {"indexcache": own})})
        return self.engine(model_path=str(self.folder / model), json_model_override_args=overrides, **flags)

    def file(self, letters: str) -> str:
        return str(self.folder / f"{letters}.yaml")


def patterns(layers: int) -> tuple[str, ...]:
    return tuple((letters * 2)[:layers] for letters in ("FSSFSS", "FSFSFS", "FFSSSS"))


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Process]:
    monkeypatch.setenv(ASK, "")  # what a test leaves is put back
    monkeypatch.setenv(CALIBRATE, "")
    yield Process(monkeypatch, tmp_path)
    for name in (ASK, CALIBRATE):
        os.environ.pop(name, None)


def check(engine: Any, letters: str | None, layers: int, calibrates: bool = False) -> None:
    """An engine runs what it was asked for, and says so."""
    state, info = engine.state(), engine.infos[0].get("indexcache")
    assert engine.roles() == (letters or "F" * layers)
    if letters is None:
        assert state is None and (info is not None) == calibrates
    else:
        assert state["pattern"] == info["pattern"] == letters and state["proven"]
    overrides = engine.scheduler.tp_worker.model_runner.model_config.overrides
    assert overrides["rope_theta"] == 7
    assert ("index_topk_pattern" in overrides) == (letters is not None or calibrates)
    request = SimpleNamespace(method="indexcache", body={"action": "no"})
    answered = engine.scheduler.handle_dumper_control(request) if not calibrates else None
    assert calibrates or answered == "SGLang's own"


@pytest.mark.parametrize("seed", range(12))
def test_any_engines_one_after_the_other_and_at_once(process: Process, seed: int) -> None:
    """Patterns, none, calibration, two models; from the environment, which changes all the while, or overrides."""
    rng, alive = random.Random(seed), list[tuple[Any, str | None, int, bool]]()
    for _ in range(12):
        model = rng.choice(list(LAYERS))
        layers = LAYERS[model]
        kind = rng.choice(["none", "environment", "own", "both", "carried", "calibrate"])
        letters = None if kind in ("none", "calibrate") else rng.choice(patterns(layers))
        other = rng.choice(patterns(rng.choice([6, 8])))
        process.env_between = rng.choice([{}, {ASK: process.file(other)}, {CALIBRATE: "1"}, {ASK: "no.yaml"}])
        env: dict[str, str] = {CALIBRATE: "1"} if kind == "calibrate" else {}
        own: Any = None
        if letters is not None:
            if kind in ("environment", "both"):
                env = {ASK: rng.choice([process.file(letters), letters])}
            if kind in ("own", "both"):
                own = process.file(letters)
            elif kind == "carried":
                own = {"source": "x", "pattern": letters}
        engine = process.start(model, env, own)
        alive.append((engine, letters, layers, kind == "calibrate"))
        process.set(rng.choice([{}, {ASK: process.file(other)}, {CALIBRATE: "1"}]))
        for one in rng.sample(alive, min(3, len(alive))):
            check(*one)
        if rng.random() < 0.3:
            alive.pop(rng.randrange(len(alive)))
    for one in alive:
        check(*one)
    assert not {name for name in os.environ if name.startswith("SGLANG_INDEXCACHE")} - {ASK, CALIBRATE}


def test_server_arguments_that_are_used_again_are_for_another_engine(process: Process) -> None:
    first, second = patterns(6)[:2]
    arguments = fake_sglang.ServerArgs(str(process.folder / "six"), '{"rope_theta": 7}')
    for letters in (first, None, second, second, None):
        process.set({} if letters is None else {ASK: process.file(letters)})
        check(process.engine(server_args=arguments), letters, 6)


def test_engines_that_are_launched_in_threads(process: Process) -> None:
    """Each with its own overrides; all their schedulers start once all of them are launched."""
    wanted: list[str | None] = [*patterns(6), None]
    meet, found = threading.Barrier(len(wanted)), dict[str | None, Any]()
    process._between = meet.wait  # type: ignore[method-assign]
    process.engine = fake_sglang_engine = process.engine
    process.set({})

    def start(letters: str | None) -> None:
        own = {} if letters is None else {"indexcache": letters}
        text = json.dumps({"rope_theta": 7, **own})
        found[letters] = fake_sglang_engine(model_path=str(process.folder / "six"), json_model_override_args=text)

    fake_sglang_engine(model_path=str(process.folder / "six"))  # plugins are loaded
    threads = [threading.Thread(target=start, args=(letters,)) for letters in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for letters in wanted:
        check(found[letters], letters, 6)


@pytest.mark.parametrize(
    ("env", "own", "flags", "line"),
    [
        ({ASK: "FSSFSS", CALIBRATE: "1"}, None, {}, f"{ASK} and {CALIBRATE} are set, expected one of them"),
        ({ASK: "FSSFSS"}, "FSFSFS", {}, f"{ASK} asks for FSSFSS, the indexcache section of the model overrides for"),
        ({CALIBRATE: "1"}, "FSFSFS", {}, f"{CALIBRATE} is set and the model overrides have an indexcache section"),
        ({}, {"pattern": "FSSFSS"}, {}, "the indexcache section of the model overrides is not a pattern, nor its"),
        ({}, 5, {}, "the indexcache section of the model overrides is not a pattern"),
        ({ASK: "no.yaml@1/2"}, None, {}, "no.yaml: No such file or directory"),
        ({ASK: "FSSF"}, None, {}, OTHER_LENGTH.format(4, 6)),
        ({ASK: "FSSFSS"}, None, {"use_ray": True}, f"--use-ray {NOT_COMBINED} on this SGLang: needs"),
        ({CALIBRATE: "1"}, None, {"use_ray": True}, "--use-ray can't be combined with calibration on this SGLang"),
    ],
)
def test_what_can_not_be_served_ends_the_process(
    process: Process,
    env: dict[str, str],
    own: Any,
    flags: dict[str, Any],
    line: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also after an engine that was asked for nothing; before anything of it is built."""
    check(process.start("six", {}), None, 6)
    process.env_between = {"BUILT": "1"}
    with pytest.raises(SystemExit) as caught:
        process.start("six", env, own, **flags)
    error = capsys.readouterr().err
    assert caught.value.code == 2 and error.startswith(f"indexcache: {line}") and error.count("\n") == 1
    assert "BUILT" not in os.environ


@pytest.mark.parametrize("env", [{ASK: "FSSFSS"}, {CALIBRATE: "1"}], ids=["serves", "calibrates"])
def test_how_many_tokens_indexers_select_is_read_back(
    env: dict[str, str], process: Process, capsys: pytest.CaptureFixture[str]
) -> None:
    """An SGLang that reads the key no more, as happened to patterns, would select what config.json says."""

    def start() -> Any:
        process.set(env)
        return process.engine(model_path=str(process.folder / "six"), json_model_override_args='{"index_topk": 16}')

    assert {layer.indexer.index_topk for layer in start().scheduler.tp_worker.model_runner.model} == {16}
    resolve_name("sglang.srt.configs.model_config:ModelConfig").ignores = {"index_topk"}
    with pytest.raises(SystemExit):
        start()
    line = f"the loaded indexers select {TOPK} tokens, the model's index_topk is 16"
    assert line in capsys.readouterr().err


def test_an_engine_of_rays_class_is_refused(process: Process, capsys: pytest.CaptureFixture[str]) -> None:
    ray = type("RayEngine", (process.engine,), {"__module__": "sglang.srt.ray.engine"})
    process.set({ASK: "FSSFSS"})
    with pytest.raises(SystemExit):
        ray(model_path=str(process.folder / "six"))
    assert capsys.readouterr().err.startswith(f"indexcache: RayEngine {NOT_COMBINED} on this SGLang")


def test_a_scheduler_that_has_lost_its_server_arguments_ends_the_launch(
    process: Process, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It looks into the environment then, and ends; without anything there, whoever launched it gets no proof."""
    process.start("six", {})
    monkeypatch.setattr(fake_sglang.pickle, "loads", lambda sent: fake_sglang.ServerArgs(str(process.folder / "six")))
    for asked, found, line in (
        ({}, {ASK: "FSSFSS"}, "the process that launched this engine had not loaded the plugin"),
        ({ASK: "FSSFSS"}, {}, "scheduler 0 has not proven that it runs the pattern"),
        ({ASK: "FSSFSS"}, {ASK: "FSFSFS"}, "the process that launched this engine had not loaded the plugin"),
    ):
        process.env_between = found
        with pytest.raises(SystemExit):
            process.start("six", asked)
        assert capsys.readouterr().err.startswith(f"indexcache: {line}")


@pytest.mark.parametrize("letters", ["FSSFSS", None])
def test_a_launch_that_loads_the_plugins_itself(
    process: Process, letters: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """SGLang's HTTP server, started from a program: the place that is watched for a launch is on the stack already."""
    process.engine.loads_plugins = False
    process.env_between = {ASK: "FFSSSS"}
    check(process.start("six", {} if letters is None else {ASK: letters}), letters, 6)
    if letters is not None:
        again = fake_sglang.install(monkeypatch, process._between)
        again.loads_plugins = False
        monkeypatch.setattr(fake_sglang.pickle, "loads", lambda _: fake_sglang.ServerArgs(str(process.folder / "six")))
        process.set({ASK: letters})
        with pytest.raises(SystemExit):
            again(model_path=str(process.folder / "six"))
        assert capsys.readouterr().err.startswith("indexcache: the process that launched this engine had not loaded")


# -- weights that are updated


def update(engine: Any, method: str = "update_weights_from_disk", **request: Any) -> Any:
    content = {"model_path": "elsewhere", "value": 2.0, "lost": None, "error": None, "tensors": [0, 3], **request}
    return getattr(engine.scheduler.updater, method)(SimpleNamespace(**content))


def weights(engine: Any) -> list[float]:
    model: nn.Module = engine.scheduler.tp_worker.model_runner.model
    return [layer.indexer.wk.weight.mean().item() for layer in model]  # type: ignore[union-attr, operator]


def test_an_update_from_disk_is_proven_again_or_not_proven_any_more(process: Process) -> None:
    engine, plain = process.start("six", {ASK: "FSSFSS"}), process.start("six", {})
    assert update(engine).success and engine.state()["proven"] and weights(engine) == [2.0] * 6

    reply = update(engine, value=3.0, lost=3)  # an F layer
    assert not reply.success and f"layer 3 is F, but {NOT_LOADED} wk.weight" in reply.message
    assert weights(engine) == [3.0, 3.0, 3.0, 2.0, 3.0, 3.0]  # never NaN
    state = engine.state()
    assert not state["proven"] and state["since"][:2] == "20" and "layer 3 is F" in state["reason"]

    assert update(engine, value=4.0).success and engine.state()["proven"]
    assert not update(engine, error="Failed to get weights iterator").success  # nothing was touched
    assert engine.state()["proven"] and weights(engine) == [4.0] * 6
    assert update(plain, value=3.0, lost=3).success and plain.state() is None  # as SGLang does
    assert update(engine, value=5.0, lost=1).success and engine.state()["proven"]  # an S layer has nothing to run


def test_a_checkpoint_that_lacks_an_indexer_is_refused_before_anything_is_loaded(process: Process) -> None:
    engine = process.start("six", {ASK: "FSSFSS"})
    folder = process.folder / "lacking"
    folder.mkdir()
    (folder / "config.json").write_text((process.folder / "six" / "config.json").read_text())
    names = {f"model.layers.{layer}.self_attn.indexer.wk.weight": "x.safetensors" for layer in (0, 1, 2, 4, 5)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    reply = update(engine, model_path=str(folder))
    assert not reply.success and engine.state()["proven"] and weights(engine) == [1.0] * 6
    assert reply.message == (
        f"indexcache: pattern has F for layer 3, but the checkpoint has {NO_INDEXER}; expected S; nothing was updated"
    )


@pytest.mark.parametrize(
    ("method", "request_", "holds"),
    [
        ("update_weights_from_tensor", {}, True),
        ("update_weights_from_tensor", {"error": "no such tensor"}, False),
        ("update_weights_from_tensor", {"selector": "draft", "error": "no such tensor"}, True),
        ("begin_weight_update", {}, False),
        ("end_weight_update", {}, True),
        ("release_memory_occupation", {"tags": None}, False),
        ("release_memory_occupation", {"tags": ["weights", "kv_cache"]}, False),
        ("release_memory_occupation", {"tags": ["kv_cache"]}, True),
    ],
)
def test_other_updates_are_proven_at_their_end(
    process: Process, method: str, request_: dict[str, Any], holds: bool
) -> None:
    engine, other = process.start("six", {ASK: "FSSFSS"}), process.start("six", {ASK: "FSFSFS"})
    update(engine, method, **request_)
    assert engine.state()["proven"] is holds and other.state()["proven"]
    assert holds or method in engine.state()["reason"]
    assert update(engine).success and engine.state()["proven"]


def test_complete_answers_name_what_is_proven(process: Process) -> None:
    """And nothing while weights are updated, in engines without a pattern, and for SGLang's frontend in Rust."""
    engine, other = process.start("six", {ASK: "FSSFSS"}), process.start("six", {ASK: "FSFSFS"})
    plain, search = process.start("six", {}), process.start("six", {CALIBRATE: "1"})
    own = Pattern("FSSFSS").fingerprint
    assert engine.answers(False, True, True) == {"indexcache": [[], [own], [own]]}
    assert engine.answers(False) == engine.answers() == plain.answers(True) == search.answers(True) == {}
    update(engine, "begin_weight_update")
    assert engine.answers(True) == {"indexcache": [[]]}
    assert other.answers(True) == {"indexcache": [[Pattern("FSFSFS").fingerprint]]}
    update(engine, "end_weight_update")
    assert engine.answers(True) == {"indexcache": [[own]]}
    assert not update(engine, value=3.0, lost=3).success
    assert engine.answers(True) == {"indexcache": [[]]}
    other.scheduler.output_streamer.rust_server = object()
    assert other.answers(True) == {}


def test_an_sglang_that_says_no_more_in_answers_serves_all_the_same(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As 0.5.17 does: `/server_info` has it."""
    module = sys.modules["sglang.srt.managers.scheduler_components.output_streamer"]
    monkeypatch.delattr(module, "SchedulerOutputStreamer")
    engine = process.start("six", {ASK: "FSSFSS"})
    assert engine.answers(True) == {} and engine.state()["proven"]


def test_released_weights_must_be_loaded_before_a_prompt(process: Process) -> None:
    """As trainers do every step: release, resume, then all tensors in some calls, or by mistake not all."""
    engine = process.start("six", {ASK: "FSSFSS"})
    update(engine, "release_memory_occupation")
    update(engine, "resume_memory_occupation")
    assert "nothing was loaded since" in engine.state()["reason"]
    update(engine, "begin_weight_update")
    update(engine, "update_weights_from_tensor", tensors=[0])
    assert not engine.state()["proven"]
    reply = update(engine, "end_weight_update")
    assert not reply.success
    assert f"layer 3 is F, but {NOT_LOADED} wk.weight" in reply.message

    plan = engines.plan_of(engine.scheduler.server_args)
    assert plan is not None
    asked: list[Any] = []
    plan.proven.counters.append(SimpleNamespace(again=asked.append))  # type: ignore[arg-type]
    update(engine, "update_weights_from_tensor", tensors=[])
    with pytest.raises(ProofError, match=r"a prompt came when the pattern was not proven since .*layer 3 is F"):
        asked[-1]()
    update(engine, "update_weights_from_tensor", tensors=[3])
    plan.proven.counters.clear()
    assert engine.state()["proven"]
    asked[-1]()


def test_released_weights_that_were_kept_in_host_memory_are_proven_at_once(process: Process) -> None:
    engine = process.start("six", {ASK: "FSSFSS"}, enable_weights_cpu_backup=True)
    update(engine, "release_memory_occupation")
    assert not engine.state()["proven"]
    update(engine, "resume_memory_occupation")
    assert engine.state()["proven"]


def test_stages_take_updates_one_after_the_other_so_they_are_not_proven_again(process: Process) -> None:
    engine = process.start("six", {ASK: "FSSFSS"}, pp_size=2)
    assert update(engine).success
    assert engine.state()["reason"] == "update_weights_from_disk was called on 2 pipeline stages"


def test_a_calibration_server_whose_weights_change_measures_nothing_any_more(process: Process) -> None:
    """What it says of its weights would be wrong."""
    from sglang_indexcache import calibration
    from sglang_indexcache.calibration.preflight import CalibrationError

    engine = process.start("six", {CALIBRATE: "1"})
    assert update(engine).success
    [controller] = calibration._controllers.values()
    with pytest.raises(CalibrationError, match=r"not proven since 20.*update_weights_from_disk.*expected a new server"):
        controller.execute(engine.scheduler, {"action": "status"})
