"""Several engines in one program, each with what it was asked for; and weights that are updated while one runs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from safetensors.torch import load_file, save_file

from dsa_cpu_platform import recorder
from scripts.tools import random_models
from scripts.tools.inprocess import ARGUMENTS, call, load_runner
from scripts.tools.pattern_files import write_pattern
from sglang_indexcache import Pattern
from sglang_indexcache.io.messages import NO_INDEXER, NOT_LOADED
from tests.live.ending import launch
from tests.live.server import LAUNCHER, command, environment

pytestmark = pytest.mark.sglang

FIRST, SECOND = Pattern("FSSFSS"), Pattern("FSFSFS")
ONCE = {"passes": {"extend": 1}, "longest_prompt": 80}

PROGRAM = """
import json, os, sys, sglang
from safetensors.torch import load_file

VARIABLE = "SGLANG_INDEXCACHE_PATTERN"

def start(model, pattern, own="{}"):
    os.environ.pop(VARIABLE, None)
    if pattern is not None:
        os.environ[VARIABLE] = pattern
    return sglang.Engine(model_path=model, skip_tokenizer_init=True, json_model_override_args=own, **arguments)

def state(engine):
    [found] = engine.get_server_info()["internal_states"]
    return found.get("indexcache")

def named(engine):
    short = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
    return engine.generate(input_ids=[[2, 3, 4]], sampling_params=short)[0]["meta_info"].get("indexcache")

def update(engine, tensors, name):
    engine.begin_weight_update()
    during = named(engine) if name == "steady" else None
    engine.update_weights_from_tensor(tensors)
    meanwhile = state(engine)["proven"]
    success, message = engine.end_weight_update()
    say(name=name, during=during, meanwhile=meanwhile, success=success, message=message, state=state(engine))

def say(**what):
    print("SAY " + json.dumps(what), flush=True)

def ask(engine, name):
    os.environ.pop(VARIABLE, None)
    sampling = {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}
    answer = engine.generate(input_ids=[list(range(2, 82))], sampling_params=sampling, rid=[name])
    meta = answer[0]["meta_info"].get("indexcache")
    say(name=name, state=state(engine), ids=answer[0]["output_ids"], meta=meta)

if __name__ == "__main__":
    model, moe, first, second, text = sys.argv[1:]
    arguments = json.loads(text)
    one = start(model, first)
    ask(one, "first")
    two = start(moe, None)  # while the first one runs
    ask(two, "plain")
    ask(one, "first-again")
    weights = [(name, tensor) for name, tensor in load_file(model + "/model.safetensors").items() if "indexer" in name]
    update(one, [(name, tensor * float("nan")) for name, tensor in weights if ".layers.3." in name], "broken")
    update(one, weights, "healed")
    ask(one, "updated")
    update(one, weights, "steady")
    ask(one, "steady-again")

    two.tokenizer_manager._subprocess_watchdog.stop()
    one.shutdown()  # ends the processes of all engines of this one
    ask(start(moe, None, json.dumps({"indexcache": second})), "second")
"""

THREADS = """
import json, os, sys, threading, sglang
from sglang.srt.plugins import load_plugins

def run(number, own):
    engine = sglang.Engine(model_path=model, skip_tokenizer_init=True, json_model_override_args=own, **arguments)
    sampling = {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}
    barrier.wait()  # a scheduler ends with the thread that launched it
    engine.generate(input_ids=[list(range(2, 82))], sampling_params=sampling, rid=[f"from-{number}"])
    [state] = engine.get_server_info()["internal_states"]
    print("SAY " + json.dumps({"name": number, "state": state.get("indexcache")}), flush=True)
    barrier.wait()

if __name__ == "__main__":
    model, text, *patterns = sys.argv[1:]
    arguments, barrier = json.loads(text), threading.Barrier(len(patterns))
    load_plugins()  # SGLang says that they are loaded before they are
    owns = [json.dumps({"indexcache": pattern}) for pattern in patterns]
    threads = [threading.Thread(target=run, args=item, daemon=True) for item in enumerate(owns)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os._exit(0)
"""


def without_an_indexer(model: Path, folder: Path, torn: bool = False) -> Path:
    """The model without the indexer of layer 3; `torn`: with an index that says it is there."""
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    kept = {name: value for name, value in weights.items() if ".layers.3.self_attn.indexer." not in name}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    if torn:
        index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "model.safetensors")}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.timeout(2000)
def test_engines_of_one_program(tmp_path: Path) -> None:
    """One after the other and at once: a pattern, none and another model, another pattern."""
    model, moe = (random_models.build(kind, tmp_path / kind) for kind in ("glm-dense", "glm-moe"))
    first = write_pattern(FIRST, model, tmp_path / "first.yaml")
    second = write_pattern(SECOND, moe, tmp_path / "second.yaml")
    record = tmp_path / "record"
    record.mkdir()
    (tmp_path / "program.py").write_text(PROGRAM)
    words = [model, moe, first, second, json.dumps(ARGUMENTS)]
    arguments = [sys.executable, str(tmp_path / "program.py"), *map(str, words)]
    result = subprocess.run(
        arguments, env=environment(DSA_CPU_RECORD=str(record)), capture_output=True, text=True, timeout=1800
    )
    lines = [line.removeprefix("SAY ") for line in result.stdout.splitlines() if line.startswith("SAY ")]
    said = {item["name"]: item for item in map(json.loads, lines)}
    assert "second" in said, result.stderr[-4000:]
    ran: dict[str, set[int]] = {}
    for run in recorder.read(record):
        for request in run.requests:
            ran.setdefault(request, set()).add(run.layer)
    for name, pattern in {"first": FIRST, "plain": None, "second": SECOND, "first-again": FIRST}.items():
        expected = range(6) if pattern is None else pattern.full_layers
        assert ran[name] == set(expected), name
        state, meta = said[name]["state"], said[name]["meta"]
        assert meta == (None if pattern is None else [pattern.fingerprint]), name
        assert state is None if pattern is None else state["fingerprint"] == pattern.fingerprint and state["proven"]
    broken, healed, updated = said["broken"], said["healed"], said["updated"]
    assert not broken["meanwhile"] and not broken["success"] and not broken["state"]["proven"], broken
    assert "the update has ended, but the pattern is not proven" in broken["message"]
    assert not healed["meanwhile"] and healed["success"] and healed["state"]["proven"], healed
    assert healed["state"]["counted"]["to_come"] == ["extend"]
    assert updated["ids"] == said["first-again"]["ids"] and updated["state"]["counted"] == ONCE
    steady, again = said["steady"], said["steady-again"]
    assert steady["during"] == [] and steady["success"] and steady["state"]["proven"], steady
    assert updated["meta"] == again["meta"] == [FIRST.fingerprint] and again["ids"] == updated["ids"]


@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_threads_that_launch_engines_at_once(tmp_path: Path) -> None:
    """Each engine is launched behind the other, and runs its own pattern."""
    model = random_models.build("glm-dense", tmp_path / "glm")
    (tmp_path / "program.py").write_text(THREADS)
    words = [str(tmp_path / "program.py"), str(model), json.dumps(ARGUMENTS), FIRST.letters, SECOND.letters]
    result = subprocess.run([sys.executable, *words], env=environment(), capture_output=True, text=True, timeout=1800)
    lines = [line.removeprefix("SAY ") for line in result.stdout.splitlines() if line.startswith("SAY ")]
    said = {item["name"]: item["state"] for item in map(json.loads, lines)}
    assert [said[number]["fingerprint"] for number in (0, 1)] == [FIRST.fingerprint, SECOND.fingerprint], result.stderr
    assert all(state["proven"] for state in said.values())


def updated(model: Path, lacking: Path, torn: Path) -> list[dict[str, Any]]:
    """Status and answer after each of some updates by SGLang's own code, and layer 3's largest indexer weight."""
    import torch
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput, UpdateWeightsFromTensorReqInput
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    from sglang_indexcache.serving import engines

    runner = load_runner(model)
    plan = engines.plan_of_runner(runner)
    assert plan is not None
    manager = SchedulerWeightUpdaterManager(
        tp_worker=SimpleNamespace(model_runner=runner, weight_update_runners=lambda: [("target", runner)]),
        draft_worker=None,
        memory_saver_adapter=None,
        flush_cache=lambda **_: True,
        is_fully_idle=lambda **_: True,
        scheduler=SimpleNamespace(record_weight_version_change=lambda **_: None),
    )
    indexer = dict(plan.family.sglang.modules(runner.model))[3].indexer
    found = []
    for path in (model, lacking, torn, model, None, model):
        if path is None:
            request = UpdateWeightsFromTensorReqInput(serialized_named_tensors=[], load_format=None, flush_cache=True)
            answer = manager.update_weights_from_tensor(request)  # no session is open, so SGLang refuses it
        else:
            request = UpdateWeightFromDiskReqInput(model_path=str(path), load_format="auto")
            answer = manager.update_weights_from_disk(request)
        largest = max(parameter.abs().max().item() for parameter in indexer.parameters())
        status = plan.proven.status("")
        found.append({"success": answer.success, "message": answer.message, "largest": largest, **status})
    assert torch.isfinite(torch.tensor([item["largest"] for item in found])).all()
    return found


def test_weights_that_are_updated(tmp_path: Path) -> None:
    """Proven again, refused with nothing changed, or not proven any more; and never NaN."""
    model = random_models.build("glm-dense", tmp_path / "glm")
    file = write_pattern(FIRST, model, tmp_path / "first.yaml")
    folders = [without_an_indexer(model, tmp_path / name, name == "torn") for name in ("lacking", "torn")]
    same, lacking, torn, healed, tensor, again = call(updated, model, *folders, SGLANG_INDEXCACHE_PATTERN=file)
    assert same["success"] and same["proven"]
    assert not lacking["success"] and lacking["proven"]
    assert lacking["message"].startswith(f"indexcache: pattern has F for layer 3, but the checkpoint has {NO_INDEXER}")
    assert not torn["success"] and not torn["proven"] and torn["since"].startswith("20")
    assert f"layer 3 is F, but {NOT_LOADED}" in torn["message"]
    assert "layer 3 is F" in torn["reason"]
    assert healed["success"] and healed["proven"] and "reason" not in healed
    assert not tensor["proven"] and "update_weights_from_tensor" in tensor["reason"]
    assert again["proven"] and len({item["largest"] for item in (same, lacking, torn, healed, tensor, again)}) == 1


def test_ray_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    """Its actors load no plugins."""
    model = random_models.build("glm-dense", tmp_path / "glm")
    file = write_pattern(FIRST, model, tmp_path / "pattern.yaml")
    for mode in (("--indexcache-pattern", file), ("--indexcache-calibrate",)):
        arguments = command(model, *mode, "--skip-tokenizer-init", "--use-ray")
        code, lines = launch(arguments[len(LAUNCHER) :])
        assert code == 2 and len(lines) == 1
        assert lines[0].startswith("indexcache: --use-ray can't be combined with")
        # The launcher knows before SGLang is imported; a calibration server's plan asks the installed source.
        of_the_launcher = "Ray actors of SGLang load no plugins"
        of_the_source = "needs load_plugins in sglang.srt.ray.scheduler_actor.SchedulerActor"
        assert (of_the_launcher if "--indexcache-pattern" in mode else of_the_source) in lines[0]


def test_the_users_overrides_are_kept_however_they_are_spelled(tmp_path: Path) -> None:
    """SGLang's own parser reads them: abbreviated, with =, or in a file. They contradict the pattern, to be seen."""
    model = random_models.build("glm-dense", tmp_path / "glm")
    file = write_pattern(FIRST, model, tmp_path / "pattern.yaml")
    other = '{"index_topk_pattern": "FFFFFF"}'
    (tmp_path / "c.yaml").write_text(f"json-model-override-args: '{other}'\n")
    spellings: list[tuple[str, ...]] = [
        ("--json-model-override", other),
        (f"--json-model={other}",),
        ("--config", str(tmp_path / "c.yaml")),
    ]
    for flags in spellings:
        arguments = command(model, "--indexcache-pattern", file, "--skip-tokenizer-init", *flags)
        code, lines = launch(arguments[len(LAUNCHER) :])
        assert code == 2 and len(lines) == 1 and "index_topk_pattern means FFFFFF" in lines[0], (flags, lines)
