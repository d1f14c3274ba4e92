"""What all command lines have in common: numbers within bounds, and options that are read or refused."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest
import typer
from typer.testing import CliRunner

from indexcache_search import cli, distill_cli, eval_cli
from indexcache_search.lab.eviction import cli as eviction
from indexcache_search.lab.key_delta import cli as key_delta
from indexcache_search.lab.offload import cli as offload_cli

MODED = {"search": cli, "eval": eval_cli, "distill": distill_cli, "offload": offload_cli}
LAB = {
    "lab key-delta search": key_delta.search,
    "lab key-delta eval": key_delta.evaluate,
    "lab eviction": eviction.eviction,
}
COMMANDS = {**MODED, **LAB}
CALIBRATION, TRAINING = ("search", "lab key-delta search"), ("distill", "lab eviction")


def function_of(module: Any) -> Any:
    """What a command line calls."""
    if not isinstance(module, ModuleType):
        return module
    [command] = module.app.registered_commands
    return command.callback


@pytest.mark.parametrize("module", COMMANDS.values(), ids=COMMANDS)
def test_every_number_has_bounds(module: Any) -> None:
    hints = get_type_hints(function_of(module), include_extras=True)
    numbers: dict[str, Any] = {}
    for name, hint in hints.items():
        kind, *about = get_args(hint) or (hint,)
        if {int, float} & {kind, *get_args(kind)}:
            numbers[name] = about[0].callback
    assert len(numbers) > 9
    for name, check in numbers.items():
        assert check is not None and check(None) is None, name
        for value in (10**400, -(10**30), math.nan, math.inf, -math.inf):
            with pytest.raises(typer.BadParameter, match="expected") as caught:
                check(value)
            assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("module", "arguments", "line"),
    [
        (
            cli,
            ["--batch-size", "1000000000"],
            "'--batch-size': found 1000000000, expected 1 to 65536: more at once takes memory and no less time",
        ),
        (eval_cli, ["--prefix-cache-gb", "nan"], "'--prefix-cache-gb': found nan, expected 0 to 1e+06"),
        (distill_cli, ["--seed", "1" + "0" * 30], "found 100000000000... (31 digits), expected 0 to 92233720368547758"),
        (offload_cli, ["--memory-gb", "1e400"], "'--memory-gb': found inf, expected 1e-06 to 1e+06"),
    ],
    ids=MODED,
)
def test_bounds_say_why(module: ModuleType, arguments: list[str], line: str) -> None:
    done = CliRunner().invoke(module.app, arguments)
    assert done.exit_code == 2 and line in done.stderr


# -- options that a mode does not read

RUNS = (
    *("run.run", "compare.run.run", "distill.run.run"),
    *("lab.offload.run.run", "lab.key_delta.run.run", "lab.eviction.run.run"),
)
AFTERWARDS = {"json_", "max_increase", "dry_run"}  # read when a run is over, or in the place of one
URL = ["http://127.0.0.1:9"]
MODES: dict[str, list[dict[str, Any]]] = {
    "search": [
        {},
        {"strategy": "greedy"},
        {"queries": "4", "reply": 16},
        {"engine": "sglang"},
        {"engine": "sglang", "endpoint": URL},
    ],
    "eval": [
        {"pattern": ["FSFSFS"], "uniform": False},
        {"pattern": ["here.yaml"], "tasks": "multi_key"},
        {"endpoint": URL * 2},
    ],
    "distill": [{}, {"warmup_steps": 0}, {"steps": 0}],
    "offload": [{}, {"endpoint": URL}],
    "lab key-delta search": [{}],
    "lab key-delta eval": [{"pattern": ["FFFFFF"]}],
    "lab eviction": [{}, {"body": True}],
}
VALUES: dict[str, Any] = {
    "endpoint": URL,
    "calibration": ["b"],
    "evaluation": ["b"],
    "training": ["b"],
    "retain": "1/3",
    "strategy": "uniform",
    "score": "compressed_keys",
    "queries": "8",
    "steps": "ema:0.5",
    "pages": "32",
    "skip": "0.3",
    "objective": "nll",
    "device": "cpu",
    "dtype": "bfloat16",
    "attention": "naive",
    "decode_retain": "1/2",
    "pattern": ["FFSFFS"],
    "tasks": "common_words",
    "haystack": "b",
    "threshold": "0.7",
    "loss": "own",
    "turns": "each",
    "bias": "training",
    "schedule": "wsd",
    "shared_indexers": "keep",
    "buffers": "1,2",
    "kv_dtype": "bfloat16",
    "recent_pages": 3,
    "sink_pages": 2,
    "page_tokens": 32,
    "query_pages": 5,
    "output": Path("b"),
    "work_dir": Path("b"),
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What runs were asked for, in words."""
    found: list[str] = []

    def note(*arguments: Any) -> None:
        found.append(repr(arguments))
        raise typer.Exit(0)

    for name in RUNS:
        monkeypatch.setattr(f"indexcache_search.{name}", note)
    return found


def call(module: Any, given: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Call what a command line calls: the exit code, and what it says."""
    function = function_of(module)
    parameters = inspect.signature(function).parameters.items()
    values = {name: item.default for name, item in parameters if item.default is not item.empty} | given
    origin = {name: SimpleNamespace(name="COMMANDLINE" if name in given else "DEFAULT") for name in values}
    context: Any = SimpleNamespace(params=values, args=[], get_parameter_source=origin.__getitem__)
    first = [context] if typer.Context in get_type_hints(function).values() else []
    with pytest.raises(typer.Exit) as caught:
        function(*first, **values)
    return caught.value.exit_code, capsys.readouterr().err


def value_for(module: Any, option: str) -> Any:
    """Something else than the default, of the option's kind."""
    function = function_of(module)
    kind = get_type_hints(function)[option]
    kinds, value = {kind, *get_args(kind)}, VALUES.get(option)
    if kind is bool:
        return not inspect.signature(function).parameters[option].default
    if float in kinds or int in kinds:
        return 0.5 if float in kinds else value if type(value) is int else 28
    return value[0] if isinstance(value, list) and str in kinds else value


@pytest.mark.parametrize("name", MODED)
def test_every_option_is_classified(name: str) -> None:
    module: Any = COMMANDS[name]
    assert set(module.NEEDS) == set(list(inspect.signature(function_of(module)).parameters)[1:])


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_read_or_refused_in_every_mode(
    name: str,
    asked: list[str],
    model_folder: Path,
    dense_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module: Any = COMMANDS[name]
    (tmp_path / "template").write_text("{{ messages }}")
    monkeypatch.setitem(VALUES, "chat_template", tmp_path / "template")
    data = "calibration" if name in CALIBRATION else "training" if name in TRAINING else "evaluation"
    options, refused = set(get_type_hints(function_of(module))) - {"context", "called", "return"}, 0
    for mode in MODES[name]:
        base = {"model": str(dense_folder if name in LAB else model_folder), data: ["a"], **mode}
        assert call(module, base, capsys) == (0, ""), mode
        plain = asked[-1]
        for option in sorted(options - set(mode) - AFTERWARDS - {"model", "engine"}):
            number = len(asked)
            code, line = call(module, {**base, option: value_for(module, option)}, capsys)
            if code == 2 and " needs " in line and "\n" not in line.strip():
                refused += 1
                assert len(asked) == number
            else:
                assert code == 0, (mode, option, line)
                assert asked[-1] != plain, f"{option} is not read with {mode}"
    assert refused > 2 or name in LAB
