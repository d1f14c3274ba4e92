"""Check all command lines: few options, numbers within bounds, every option read or refused."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest
import typer
import yaml
from typer.testing import CliRunner, Result

import sglang_indexcache
from indexcache_lab import cli as lab_cli
from indexcache_lab.edge import cli as edge_cli
from indexcache_lab.eviction import cli as eviction_cli
from indexcache_lab.key_delta import cli as key_delta_cli
from indexcache_lab.offload import cli as offload_cli
from indexcache_search.cli import evaluate, search
from indexcache_search.cli.bounded import Bounds
from indexcache_search.cli.command import application
from indexcache_search.errors import SearchError
from indexcache_search.searching.job import SearchJob
from indexcache_train import cli as distill
from indexcache_watch import cli as watch_cli
from sglang_indexcache import check, launch_server

COMMANDS = {
    "search": search.search,
    "eval": evaluate.evaluate,
    "distill": distill.distill,
    "offload": offload_cli.offload,
    "lab key-delta search": key_delta_cli.search,
    "lab key-delta eval": key_delta_cli.evaluate,
    "lab eviction": eviction_cli.eviction,
}
EVERY = {**COMMANDS, "lab edge": edge_cli.edge, "watch": watch_cli.watch}
Function = Callable[..., None]


def invoke(function: Function, words: list[str]) -> Result:
    """Run a command line."""
    return CliRunner().invoke(application({"run": function}), words)


def kind_of(hint: Any) -> Any:
    """The dataclass of a group of settings, if the option is one."""
    return next(filter(is_dataclass, get_args(hint)), None)


@pytest.mark.parametrize(("name", "most"), {"search": 29, "eval": 25, "distill": 28, "offload": 24}.items())
def test_there_are_few_options(name: str, most: int) -> None:
    options = set(get_type_hints(COMMANDS[name])) - {"context", "return"}
    assert len(options) <= most and {"config", "version"} <= options


def numbers_of(hint: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Numbers that an annotation names, and what bounds them."""
    if get_origin(hint) is Annotated:
        kind, about = get_args(hint)
        if {int, float} & {kind, *get_args(kind)}:
            yield where, about.check if isinstance(about, Bounds) else about.callback
            return
        hint = kind
    if hint in (int, float):
        yield where, None
    elif is_dataclass(hint) and not hasattr(hint, "parse"):
        hints = get_type_hints(hint, include_extras=True)
        for item in fields(hint):
            yield from numbers_of(hints[item.name], f"{where} {item.name}")
    for inner in get_args(hint):
        yield from numbers_of(inner, where)


@pytest.mark.parametrize("function", EVERY.values(), ids=EVERY)
def test_every_number_has_bounds(function: Function) -> None:
    hints = get_type_hints(function, include_extras=True)
    numbers = {where: bounds for name, hint in hints.items() for where, bounds in numbers_of(hint, name)}
    assert len(numbers) >= (2 if function is edge_cli.edge else 5)
    for name, bounds in numbers.items():
        assert bounds is not None and bounds(None) is None, name
        for value in (10**400, -(10**30)):
            with pytest.raises(typer.BadParameter, match="expected") as caught:
                bounds(value)
            assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("function", "arguments", "line"),
    [
        (
            search.search,
            ["--batch-size", "1000000000"],
            "'--batch-size': found 1000000000, expected 1 to 65536: more at once takes memory and no less time",
        ),
        (key_delta_cli.evaluate, ["--near", "window=nan"], "'--near': window: found nan, expected 0 to 1"),
        (
            distill.distill,
            ["--seed", "1" + "0" * 30],
            "found 100000000000... (31 digits), expected 0 to 92233720368547758",
        ),
        (
            offload_cli.offload,
            ["--server", "memory_gb=1e400"],
            "'--server': memory_gb: found inf, expected 1e-06 to 1e+06",
        ),
        (evaluate.evaluate, ["--chat"], "No such option: --chat; expected --tasks chat=VALUE"),
        (distill.distill, ["--warmup-lr", "1"], "No such option: --warmup-lr"),
        (offload_cli.offload, ["--step-ms=3"], "No such option: --step-ms; expected --server step_ms=VALUE"),
        (search.search, ["--output", ""], "--output is empty, expected a path"),  # an unset variable
        (watch_cli.watch, ["--output="], "--output is empty, expected a path"),
        (evaluate.evaluate, ["--config", ""], "--config is empty, expected a path"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_is_wrong_is_said(function: Function, arguments: list[str], line: str) -> None:
    done = invoke(function, arguments)
    assert done.exit_code == 2 and line in done.stderr


def test_the_lab_without_an_experiment_names_them() -> None:
    with pytest.raises(SearchError, match="which experiment") as error:
        lab_cli.app([], standalone_mode=False)
    assert all(name in str(error.value) for name in typer.main.get_command(lab_cli.app).commands)


# -- options that nothing reads

RUNS = (
    *("search.searching.run", "search.eval.run", "harness.run"),
    *("train.distill.run", "train.distill.search_first", "lab.offload.run", "lab.key_delta.run", "lab.eviction.run"),
)
ELSEWHERE = {"max_increase", "dry_run", "estimate", "hourly_price", "config", "version"}
"""Read when a run is over, or in the place of one."""
URL = "http://127.0.0.1:9"
MODES: dict[str, list[dict[str, Any]]] = {
    "search": [
        {},
        {"strategy": "greedy"},
        {"prefill": "0.4"},
        {"engine": "sglang"},
        {"engine": "sglang", "endpoint": [URL]},
    ],
    "eval": [
        {"pattern": ["FSFSFS"], "uniform": False},
        {"pattern": ["here.yaml"], "tasks": "multi_key"},
        {"endpoint": [URL, URL], "evaluation": []},
        {"endpoint": [URL, URL], "evaluation": [], "speed": "16384"},
        {"endpoint": [URL, URL], "harness": "gsm8k", "evaluation": []},
    ],
    "distill": [{}, {"warmup": "steps=0"}, {"sparse": "steps=0"}],
    "offload": [{}, {"endpoint": [URL]}],
    "lab key-delta search": [{}],
    "lab key-delta eval": [{"pattern": ["FFFFFF"]}],
    "lab eviction": [{}, {"body": "lr=1e-6"}],
}
VALUES: dict[str, Any] = {
    **{name: ["b"] for name in ("calibration", "evaluation", "training")},
    **dict.fromkeys(("output", "work_dir"), "b"),
    **dict.fromkeys(("prefix_cache_gb", "max_transfer", "max_device_gb"), 0.5),
    "endpoint": [URL],
    "pattern": ["FFSFFS"],
    "retain": "1/3",
    "search_first": "1/3",
    "skip": "0.3",
    "objective": "nll",
    "device": "cpu",
    "dtype": "bfloat16",
    "threshold": "0.7",
    "loss": "own",
}
SETTINGS: dict[str, list[str]] = {
    "selection": [
        *("pages=32", "page_tokens=32", "recent_pages=3", "sink_pages=2", "score=compressed_keys", "steps=ema:0.5"),
        "heads=key",
    ],
    "rows": ["turns=each", "skip_bad=3", "chat_template=template", "documents=apart"],
    "engine": [
        *("name=sglang", "attention=naive", "prefix_cache_gb=0.5", "gradient_checkpointing=no", "micro_batch=2"),
        "memory_check=no",
    ],
    "strategy": ["name=uniform", "flips=3", "race=no", "swaps=3", "name=greedy,blocks=2"],
    "buffers": ["sizes=1/2"],
    "prefill": [f"time=0.5{more}" for more in ("", ",queries=4/8", ",prices=glm-5-dp")],
    "decode": ["time=0.9", "time=0.9,prices=glm-5-dp"],
    "bytes": ["share=0.2"],
    "tasks": [f"names=common_words{more}" for more in ("", ",samples=3", ",haystack=b", ",chat=yes")],
    "speed": [f"contexts=32768{more}" for more in ("", ",output_tokens=8", ",turns=7", ",prices=glm-5-dp")],
    "harness": [
        *("tasks=b", "tasks=b,include=b", "tasks=b,sampling=paper", "tasks=b,limit=3", "tasks=b,fewshot=3"),
        *("tasks=b,chat=yes", "tasks=b,lengths=64/128", "tasks=b,output_tokens=64", "tasks=b,concurrency=3"),
        *("tasks=b,seed=3", "tasks=b,max_fall=0.5"),
    ],
    "warmup": ["steps=3", "lr=0.5"],
    "sparse": ["steps=3", "lr=0.5", "indexer_lr=0.5", "weight_decay=0.5"],
    "optimizer": ["schedule=wsd", "ramp_steps=3", "max_norm=0.5"],
    "every": ["evaluate=3", "checkpoint=3", "show=3"],
    "write": ["shared_indexers=keep", "tensorboard=yes"],
    "server": [*("bandwidth=3", "step_ms=3", "batch=3", "memory_gb=3", "context=333", "kv_dtype=bfloat16")],
    "heads": ["lr=0.5", "bias=training", "query_pages=5", "detach=yes"],
    "body": ["lr=0.5", "weight_decay=0.5"],
    "near": ["window=0.5", "max_window=3", "recent=3"],
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Record the arguments of each run as text, but for the command line itself."""
    found: list[str] = []

    def note(*arguments: Any, **options: Any) -> None:
        if isinstance(arguments[0], SearchJob):
            arguments = (replace(arguments[0], command=None),)
        found.append(repr((arguments, options)))
        raise typer.Exit(0)

    for name in RUNS:
        monkeypatch.setattr(f"indexcache_{name}.run", note)
    monkeypatch.setattr("indexcache_harness.run.check", lambda addresses: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "template").write_text("{{ messages }}")
    return found


def words_of(values: dict[str, Any]) -> list[str]:
    """Return the command-line words for `values`."""
    words: list[str] = []
    for name, value in values.items():
        flag = f"--{'no-' if value is False else ''}{name.replace('_', '-')}"
        given = value if isinstance(value, list) else [value]
        words += [flag] if isinstance(value, bool) else [word for item in given for word in (flag, str(item))]
    return words


def values_for(function: Function, option: str) -> list[Any]:
    """Other values than the default: of a group of settings one for each of its keys."""
    kind = get_type_hints(function)[option]
    group = kind_of(kind)
    if group:
        keys = {"name", *group.settable()} if hasattr(group, "settable") else {field.name for field in fields(group)}
        known = [item for item in SETTINGS[option] if item.rpartition(",")[2].partition("=")[0] in keys]
        known = [item for item in known if item != "name=sglang" or function is search.search]
        assert len({item.rpartition(",")[2].partition("=")[0] for item in known}) >= len(keys) - ("name" in keys), (
            option
        )
        return known
    if kind is bool:
        return [not inspect.signature(function).parameters[option].default]
    return [VALUES.get(option, 28)]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_read_or_refused_in_every_mode(
    name: str, asked: list[str], model_folder: Path, dense_folder: Path
) -> None:
    function = COMMANDS[name]
    options = set(get_type_hints(function)) - {"context", "return", "model"} - ELSEWHERE
    data = next(item for item in ("calibration", "training", "evaluation") if item in options)
    refused = 0
    for mode in MODES[name]:
        base = {"model": str(dense_folder if name.startswith("lab") else model_folder), data: ["a"], **mode}
        plain_run = invoke(function, words_of(base))
        assert (plain_run.exit_code, plain_run.stderr) == (0, ""), (mode, plain_run.stderr)
        plain = asked[-1]
        for option in sorted(options - set(mode)):
            for value in values_for(function, option):
                number = len(asked)
                done = invoke(function, words_of({**base, option: value}))
                if done.exit_code == 2 and (" needs " in done.stderr or "has no setting" in done.stderr):
                    refused += 1
                    assert len(asked) == number
                else:
                    assert done.exit_code == 0, (mode, option, value, done.stderr)
                    assert asked[-1] != plain, f"{option} {value} is not read with {mode}"
                if mode is MODES[name][0]:
                    check_config(function, base, option, value, done, asked)
    assert refused > 2 or name.startswith("lab") or name == "distill"


def check_config(
    function: Function, base: dict[str, Any], option: str, value: Any, done: Any, asked: list[str]
) -> None:
    """A configuration file says the same as flags: it is read alike, or refused alike."""
    value = value[0] if isinstance(value, list) else value
    if option in SETTINGS:
        value = dict(item.split("=") for item in value.split(","))
    Path("run.yaml").write_text(yaml.safe_dump({**base, option: value}))
    again = invoke(function, ["--config", "run.yaml"])
    assert again.exit_code == done.exit_code, again.stderr
    if done.exit_code == 0:
        assert asked[-1] == asked[-2]
    else:
        assert "run.yaml: " in again.stderr and (" needs " in again.stderr or "has no setting" in again.stderr)


def test_every_command_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    found = [invoke(function, ["--version"]) for function in EVERY.values()]
    found.append(CliRunner().invoke(lab_cli.app, ["--version"]))
    assert {done.exit_code for done in found} == {0}
    assert {done.output.split()[1] for done in found} == {sglang_indexcache.__version__}
    launch_server.main(["--version"])
    with pytest.raises(SystemExit, match="0"):
        check.main(["--version"])
    said = [f"{name} {sglang_indexcache.__version__}" for name in ("sglang-indexcache", "indexcache-check")]
    assert capsys.readouterr().out.splitlines() == said


MISTAKES = {
    "indexcache_search.cli.search": [
        *(
            "--strategy nope",
            "--strategy greedy:race=no",
            "--retain 7/2",
            "--decode 0.4",
            "--prefill 4",
            "--prefill 0.4:queries=3",
        ),
        *("--engine sglang:attention=naive", "--model x", "--device tpu", "--dtype int8", "--pages 3", "--nope"),
        *("--config none.yaml", "--selection pages=1", "--rows chat_template=none", "--endpoint x"),
    ],
    "indexcache_search.cli.evaluate": [
        "--tasks nope",
        "--uniform --endpoint http://x",
        "--retain x",
        "--selection steps=x",
    ],
    "indexcache_train.cli": [
        "--sparse steps=0,lr=1",
        "--model x",
        "--pattern none.yaml",
        "--engine naive:x=1",
    ],
    "indexcache_lab.offload.cli": ["--buffers 0", "--server batch=0", "--model x", "--engine sglang"],
    "indexcache_lab.eviction.cli": ["--body lr=-1", "--model x", "--heads bias=x --model x --training x"],
    "indexcache_lab.key_delta.cli": ["search --near window=2 --model x --calibration x"],
    "indexcache_lab.edge.cli": ["--model x --contexts x"],
    "indexcache_watch.cli": [
        *("--served x", "--served x --reference http://y --requests z", "--buckets 9,8", "--sample 2", "--nope"),
    ],
}
ASK = """
import json, sys
from importlib import import_module
from typer.testing import CliRunner
for module, mistakes in json.loads(sys.argv[1]).items():
    app = import_module(module).app
    for item in mistakes:
        done = CliRunner().invoke(app, item.split())
        assert done.exit_code == 2 and "Traceback" not in done.output and done.stderr.strip(), (item, done.output)
    assert CliRunner().invoke(app, ["--help"]).exit_code == 0, module
    assert not {"torch", "transformers", "scipy", "matplotlib"} & set(sys.modules), module
"""


def test_mistakes_are_answered_before_anything_large_is_imported(tmp_path: Path) -> None:
    """By no command of them all, which one process imports one after the other."""
    asked = [sys.executable, "-c", ASK, json.dumps(MISTAKES)]
    done = subprocess.run(asked, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
