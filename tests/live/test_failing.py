"""A plugin that fails at any of its steps: the server never answers a request, and says why in one line."""

from __future__ import annotations

import time
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import pytest

pytest.importorskip("sglang")

from indexcache_search.engines.own_server import free_port
from scripts.tools import random_models
from scripts.tools.pattern_files import write_pattern
from sglang_indexcache import Pattern
from tests.live.ending import launch, load
from tests.live.server import LAUNCHER, START_TIMEOUT, command, kill_group, running, start

pytestmark = pytest.mark.sglang

PATTERN = Pattern("FSSFSS")
PLAIN = (LAUNCHER[0], "-m", "sglang.launch_server")

# Every process runs it before anything else; `spawned` says whether it is one of a server's schedulers.
SABOTAGE = """
import os, sys

STEP, ERROR = os.environ.get("TEST_STEP"), os.environ.get("TEST_ERROR")
if STEP:
    module, _, path = STEP.partition(":")
    assert module not in sys.modules

    def fail(*args, **kwargs):
        errors = [AttributeError("gone"), KeyError("BEFORE"), OSError(5, "bad disk")]
        raise next(error for error in errors if type(error).__name__ == ERROR)

    class Finder:  # patches the module once it has been imported
        def find_spec(self, name, *args):
            if name != module:
                return None
            sys.meta_path.remove(self)
            from importlib.util import find_spec
            spec = find_spec(name)
            load = spec.loader.exec_module

            def execute(loaded):
                load(loaded)
                owner, _, last = path.rpartition(".")
                setattr(getattr(loaded, owner) if owner else loaded, last, fail)

            spec.loader.exec_module = execute
            return spec

    sys.meta_path.insert(0, Finder())
if os.environ.get("TEST_LOSE") and spawned:
    os.environ.pop("SGLANG_INDEXCACHE_PATTERN", None)  # as Ray, or a wrapper that cleans the environment
    if os.environ["TEST_LOSE"] == "plugin":
        os.environ["SGLANG_PLUGINS"] = "dsa_cpu"
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_models.build("glm-dense", tmp_path_factory.mktemp("glm"))


@pytest.fixture(scope="module")
def file(model: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_pattern(PATTERN, model, tmp_path_factory.mktemp("file") / "pattern.yaml")


@pytest.fixture(scope="module")
def sabotage(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a server whose processes run the script."""
    script = tmp_path_factory.mktemp("sabotage") / "script.py"
    script.write_text(SABOTAGE)
    return {"TEST_SABOTAGE": str(script)}


def never_answers(
    model: Path, log: Path, *flags: str, launcher: tuple[str, ...] = LAUNCHER, **changes: str
) -> list[str]:
    """Start a server that must end by itself, and ask it all the while; the lines of ours in its log."""
    port = free_port()
    arguments = command(model, *flags, "--skip-tokenizer-init", "--port", str(port), launcher=launcher)
    process = start(arguments, log, **changes)
    try:
        deadline = time.monotonic() + START_TIMEOUT
        while process.poll() is None and time.monotonic() < deadline:
            for path in ("/health", "/server_info"):
                try:
                    with urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
                        pytest.fail(f"{path} answered {answer.status}: {log.read_text()[-3000:]}")
                except HTTPError as error:
                    assert error.code >= 500
                except (URLError, OSError):
                    pass
            time.sleep(0.2)
        assert process.poll() is not None, log.read_text()[-3000:]
    finally:
        kill_group(process)
    assert process.returncode != 0
    return [line for line in log.read_text().splitlines() if line.startswith("indexcache: ")]


MAIN = [
    ("sglang_indexcache.serving:require", "AttributeError", "the plugin could not be registered: AttributeError: gone"),
    ("sglang_indexcache.serving.preflight:Preflight.check", "KeyError", "KeyError: 'BEFORE'"),
    ("sglang_indexcache.serving.preflight:Preflight.family_at", "OSError", "OSError: [Errno 5] bad disk"),
    ("sglang_indexcache.serving.ready:launch", "KeyError", "KeyError: 'BEFORE'"),
    ("sglang_indexcache.sglang.hooks:Hooks.apply", "KeyError", "KeyError: 'BEFORE'"),
    ("sglang_indexcache.checkpoint.checkpoint:Checkpoint.read", "AttributeError", "AttributeError: gone"),
]
LOADING = [
    ("sglang_indexcache.serving.proof:prepare", "AttributeError", "AttributeError: gone"),
    ("sglang_indexcache.serving.proof:effective_roles", "KeyError", "KeyError: 'BEFORE'"),
]
SCHEDULER = [
    ("sglang_indexcache.serving.proof:prove", "OSError", "OSError: [Errno 5] bad disk"),
    ("sglang_indexcache.serving.ready:report", "AttributeError", "AttributeError: gone"),
    ("sglang_indexcache.serving.metrics:report", "KeyError", "KeyError: 'BEFORE'"),
    ("sglang_indexcache.serving.ready:check", "OSError", "OSError: [Errno 5] bad disk"),
]


@pytest.mark.parametrize(("step", "error", "line"), MAIN, ids=[step for step, _, _ in MAIN])
def test_steps_of_the_main_process(
    model: Path, file: str, sabotage: dict[str, str], step: str, error: str, line: str
) -> None:
    """Refused before there is a port; in a process that has imported SGLang already, which takes a second."""
    arguments = command(model, "--indexcache-pattern", file, "--skip-tokenizer-init")
    code, lines = launch(arguments[len(LAUNCHER) :], TEST_STEP=step, TEST_ERROR=error, **sabotage)
    assert code == 2 and len(lines) == 1
    assert line in lines[0] and lines[0].endswith("; see the traceback above")


@pytest.mark.parametrize(("step", "error", "line"), LOADING, ids=[step for step, _, _ in LOADING])
def test_steps_of_loading_a_model(
    model: Path, file: str, sabotage: dict[str, str], step: str, error: str, line: str
) -> None:
    """In a model runner alone, which is what a scheduler has."""
    code, lines = load(model, SGLANG_INDEXCACHE_PATTERN=file, TEST_STEP=step, TEST_ERROR=error, **sabotage)
    assert code == 2 and len(lines) == 1 and line in lines[0]


@pytest.mark.parametrize(
    ("step", "error", "line"),
    SCHEDULER,
    ids=[step for step, _, _ in SCHEDULER],
)
def test_steps_of_a_scheduler(
    model: Path, file: str, sabotage: dict[str, str], tmp_path: Path, step: str, error: str, line: str
) -> None:
    """With another launcher and the variable; metrics are on, so that their step runs."""
    changes = {**sabotage, "TEST_STEP": step, "TEST_ERROR": error, "SGLANG_INDEXCACHE_PATTERN": file}
    lines = never_answers(model, tmp_path / "log", "--enable-metrics", launcher=PLAIN, **changes)
    assert line in lines[0]


def test_a_model_that_is_loaded_in_another_way(
    model: Path, file: str, sabotage: dict[str, str], tmp_path: Path
) -> None:
    """The hook on the loader is applied, and never called: no proof, and no word that the scheduler is ready."""
    changes = {**sabotage, "DSA_CPU_BREAK": "loader"}
    lines = never_answers(model, tmp_path / "log", "--indexcache-pattern", file, **changes)
    assert "the loaded model was not compared with the pattern" in lines[0]


def test_a_scheduler_without_the_plugin(model: Path, file: str, sabotage: dict[str, str], tmp_path: Path) -> None:
    """It would serve, unproven; the process that was told the pattern ends."""
    changes = {**sabotage, "TEST_LOSE": "plugin"}
    lines = never_answers(model, tmp_path / "log", "--indexcache-pattern", file, **changes)
    assert lines[0].startswith("indexcache: scheduler 0 has not proven that it runs the pattern; expected the plugin")


def test_a_scheduler_that_lost_the_variable_serves_the_pattern(
    model: Path, file: str, sabotage: dict[str, str], tmp_path: Path
) -> None:
    """The pattern travels with the server arguments; status comes from the proof, and metrics are there."""
    flags = ("--indexcache-pattern", file, "--skip-tokenizer-init", "--enable-metrics")
    with running(model, tmp_path / "log", *flags, TEST_LOSE="variable", **sabotage) as server:
        assert PATTERN.fingerprint in server.get("/server_info")
        assert "sglang:indexcache_info" in server.get("/metrics")


def test_overrides_that_change_the_number_of_layers(model: Path, file: str) -> None:
    arguments = command(model, "--indexcache-pattern", file, "--skip-tokenizer-init")
    flags = ("--json-model-override-args", '{"num_hidden_layers": 3}')
    code, lines = launch([*arguments[len(LAUNCHER) :], *flags])
    assert code == 2 and "num_hidden_layers is 3, the pattern has 6 letters" in lines[0]
