"""Every refusal, from the real server: its exit code, and its one line."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")

from safetensors.torch import load_file, save_file

from indexcache_search.engines.own_server import free_port
from scripts.tools import random_models
from scripts.tools.inprocess import call
from scripts.tools.pattern_files import pattern_file, write_pattern
from sglang_indexcache import Pattern
from sglang_indexcache.check import main as check_main
from sglang_indexcache.families.dsa import DSA, needs
from sglang_indexcache.families.dsa.override import indexer_types
from sglang_indexcache.io.messages import BEGINS_SHARED, NO_INDEXER, NOT_COMBINED, NOT_LOADED, OTHER_LENGTH, WOULD_RUN
from sglang_indexcache.sglang import probes
from tests.live.ending import changed_source, launch, load
from tests.live.server import LAUNCHER, command, ended

pytestmark = pytest.mark.sglang

PATTERN = Pattern("FSSFSS")
OVERRIDES = "--json-model-override-args"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_models.build("glm-dense", tmp_path_factory.mktemp("glm"))


@pytest.fixture
def file(model: Path, tmp_path: Path) -> str:
    return write_pattern(PATTERN, model, tmp_path / "pattern.yaml")


def refused(model: Path, file: str, *flags: str, **changes: str) -> str:
    """The line of a launch that the main process refuses."""
    arguments = command(model, "--indexcache-pattern", file, "--skip-tokenizer-init", *flags)
    code, lines = launch(arguments[len(LAUNCHER) :], **changes)
    assert code == 2 and len(lines) == 1, (code, lines)
    return lines[0].removeprefix("indexcache: ")


def copy_with(model: Path, folder: Path, **changes: Any) -> Path:
    """The model with another config.json."""
    shutil.copytree(model, folder)
    config = {**json.loads((model / "config.json").read_text()), **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# -- the file and the command line


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("pattern: FSSFSS", "pattern: FSSFSX", "pattern has 'X' for layer 5, expected F or S"),
        ("pattern: FSSFSS", "pattern: SFSFSS", f"{BEGINS_SHARED}, but layer 0 has no earlier layer"),
        ("pattern: FSSFSS", "pattern: FSSFS", "5 letters"),
        ("pattern: FSSFSS", "pattern: FSSFSS\nretentoin: 1", "retentoin"),
        ("pattern: FSSFSS", "pattern: FSSFSC+5c4", "C layers (candidates) are not supported since version 0.2.0"),
    ],
)
def test_bad_files(model: Path, file: str, old: str, new: str, message: str) -> None:
    text = Path(file).read_text()
    assert old in text
    Path(file).write_text(text.replace(old, new))
    assert message in refused(model, file)


def test_a_file_that_is_not_there(model: Path) -> None:
    assert refused(model, "nothing.yaml") == "nothing.yaml: No such file or directory"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            (OVERRIDES, '{"index_topk_pattern": "FFFFFF"}'),
            f"{OVERRIDES}: index_topk_pattern means FFFFFF, the pattern file FSSFSS; expected one of them",
        ),
        ((OVERRIDES, json.dumps({"indexer_types": indexer_types(Pattern("FSFFSS"))})), "indexer_types means FSFFSS"),
        ((OVERRIDES, '{"cli_factor": 2}'), "cli_factor is 2, which wins over any pattern"),
        (("--enable-two-batch-overlap",), f"--enable-two-batch-overlap {NOT_COMBINED}"),
        (("--enable-lmcache",), f"--enable-lmcache {NOT_COMBINED}: its cache keys don't carry"),
        (("--enable-flexkv",), f"--enable-flexkv {NOT_COMBINED}"),
        (("--enable-unified-cache-external-linker",), "--enable-unified-cache-external-linker can't be combined"),
    ],
)
def test_command_lines_that_contradict(model: Path, file: str, flags: tuple[str, ...], message: str) -> None:
    assert message in refused(model, file, *flags)


def test_a_plugin_that_sglang_is_told_to_leave_out(model: Path, file: str) -> None:
    assert "SGLANG_PLUGINS leaves the plugin out" in refused(model, file, SGLANG_PLUGINS="dsa_cpu")


# -- the model


def test_another_length(model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    longer = {**config, "num_hidden_layers": 7, "indexer_types": ["full"] * 7}
    pattern_file(Pattern("FSSFSSS"), longer).save(tmp_path / "p.yaml")
    assert OTHER_LENGTH.format(7, 6) in refused(model, str(tmp_path / "p.yaml"))


def test_another_config(model: Path, file: str, tmp_path: Path) -> None:
    other = copy_with(model, tmp_path / "other", index_topk=32)
    assert "model.config: index_topk is 16 in the file, 32 in other" in refused(other, file)


def test_layers_without_indexer_weights(model: Path, file: str, tmp_path: Path) -> None:
    other = copy_with(model, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    kept = {name: value for name, value in weights.items() if ".layers.3.self_attn.indexer." not in name}
    save_file(kept, other / "model.safetensors", metadata={"format": "pt"})
    assert refused(other, file) == f"pattern has F for layer 3, but the checkpoint has {NO_INDEXER}; expected S"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LongcatFlashForCausalLM"]}, "LongCat's sharing (cli_factor) is trained in"),
        ({"architectures": ["DeepseekV4ForCausalLM"]}, "layer_types has 'indexed_attention' for layer 0; expected"),
        ({"architectures": ["GraniteForCausalLM"]}, "GraniteForCausalLM has no attention known here"),
        ({"cli_factor": 2}, "cli_factor is 2: LongCat's sharing is trained in and wins over patterns"),
    ],
)
def test_models_that_take_no_pattern(
    model: Path, file: str, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    assert message in refused(copy_with(model, tmp_path / "other", **changes), file)


# -- what only shows on the loaded model


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("roles", f"layer 1 {WOULD_RUN} F, the pattern says S"),
        ("weights", f"layer 3 is F, but {NOT_LOADED} wq_b.weight"),
    ],
)
def test_a_model_that_does_not_run_the_pattern(model: Path, file: str, broken: str, message: str) -> None:
    code, lines = load(model, SGLANG_INDEXCACHE_PATTERN=file, DSA_CPU_BREAK=broken)
    assert code == 2 and lines == [f"indexcache: {message}"]


def two_nodes(
    model: Path, first: dict[str, str], second: dict[str, str], wait: int = 20
) -> list[tuple[int, list[str]]]:
    """Exit codes and lines of two nodes with one rank each and these environments; they `wait` seconds to meet."""
    address = f"127.0.0.1:{free_port()}"
    shared = ("--skip-tokenizer-init", "--tp-size", "2", "--nnodes", "2", "--dist-init-addr", address)
    launcher = (sys.executable, "-m", "sglang.launch_server")

    def run(rank: int, changes: dict[str, str]) -> tuple[int, list[str]]:
        arguments = command(model, *shared, "--node-rank", str(rank), launcher=launcher)
        return ended(arguments, SGLANG_CPU_OMP_THREADS_BIND="0|1", SGLANG_INDEXCACHE_MEET_SECONDS=str(wait), **changes)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, (0, 1), (first, second)))


@pytest.mark.slow
def test_two_nodes_with_different_files(model: Path, file: str, tmp_path: Path) -> None:
    """Each node reads its own copy of the file; all ranks compare what they serve before the first request."""
    other = write_pattern(Pattern("FSFFSS"), model, tmp_path / "other.yaml")
    results = two_nodes(model, {"SGLANG_INDEXCACHE_PATTERN": file}, {"SGLANG_INDEXCACHE_PATTERN": other})
    line = (
        f"indexcache: rank 1 serves a pattern with fingerprint {Pattern('FSFFSS').fingerprint[:16]}, rank 0 one with "
        f"{PATTERN.fingerprint[:16]}; expected the same file on every node"
    )
    assert [set(lines) for _, lines in results] == [{line}, {line}]
    assert all(code != 0 for code, _ in results)


def test_a_node_that_was_started_without_the_pattern(model: Path, file: str) -> None:
    [(code, lines), (other, _)] = two_nodes(model, {"SGLANG_INDEXCACHE_PATTERN": file}, {}, wait=3)
    assert code != 0 and other != 0 and len(set(lines)) == 1
    assert lines[0].startswith("indexcache: not every rank serves a pattern after 3 s")
    assert lines[0].endswith("expected SGLANG_INDEXCACHE_PATTERN on every node")


# -- an SGLang that has changed

REQUIRED = list(dict.fromkeys(need for feature in (*probes.REQUIRED, DSA.sglang.serving) for need in feature.needs))


def without(need: probes.Need, folder: Path) -> dict[str, str]:
    """The environment of a launch whose SGLang has another name for `need`."""

    def renamed(text: str) -> str:
        owner, _, name = need.name.rpartition(".")
        start = text.index(f"class {owner}") if owner else 0
        return text[:start] + re.sub(rf"\b(def|class) {name}\b", rf"\1 renamed_{name}", text[start:], count=1)

    return changed_source(need.module, renamed, folder)


@pytest.mark.parametrize("need", REQUIRED, ids=lambda need: need.name)
def test_each_place_that_serving_needs_and_this_sglang_lacks(
    model: Path, file: str, tmp_path: Path, need: probes.Need
) -> None:
    line = refused(model, file, **without(need, tmp_path))
    assert line == f"needs {need.target}, which is not in SGLang 0.5.23"


@pytest.mark.parametrize(
    ("need", "flags"),
    [
        (probes.STORAGE, ("--enable-hierarchical-cache", "--hicache-storage-backend", "file")),
        (needs.STAGES, ("--pp-size", "2")),
    ],
    ids=lambda item: getattr(item, "name", None),
)
def test_flags_that_need_what_this_sglang_lacks(
    model: Path, file: str, tmp_path: Path, need: probes.Need, flags: tuple[str, ...]
) -> None:
    line = refused(model, file, *flags, **without(need, tmp_path))
    said = line.replace(" on this SGLang", "")  # the launcher judges storage itself
    assert said.startswith(f"{flags[-2]} {flags[-1]} {NOT_COMBINED}: needs {need.target}")


@pytest.mark.parametrize(
    "removed", ["managers.scheduler.Scheduler", "model_executor.model_runner.ModelRunner.load_model"]
)
def test_a_hook_that_the_registry_could_not_apply(model: Path, file: str, removed: str) -> None:
    """SGLang's registry logs that and goes on; here something deletes the target after it was probed."""
    arguments = command(model, "--indexcache-pattern", file, "--skip-tokenizer-init")
    code, lines = ended(arguments, DSA_CPU_REMOVE=f"sglang.srt.{removed}")
    assert code != 0 and len(set(lines)) == 1
    assert lines[0].startswith(f"indexcache: SGLang did not apply the hook on sglang.srt.{removed}")


def test_the_installed_sglang_enables_everything() -> None:
    arguments = [sys.executable, "-m", "sglang_indexcache.check", "--environment", "--json"]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=300)
    features = json.loads(result.stdout)["features"]
    assert result.returncode == 0 and [row["name"] for row in features if row["refused"] is not None] == []


# -- HY-V4, whose layers 2 and 5 have no indexer here


@pytest.fixture(scope="module")
def hy_v4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_models.build("hy-v4", tmp_path_factory.mktemp("hy-v4"))


@pytest.mark.parametrize(
    ("letters", "flags", "message"),
    [
        ("FFFFFS", (), f"F for layer 2, but the checkpoint has {NO_INDEXER}"),
        ("FFSFSS", ("--pp-size", "2"), f"--pp-size 2 {NOT_COMBINED} on hy_v4"),
        ("FFSFSS", (OVERRIDES, '{"index_topk_freq": 3}'), f"{OVERRIDES}: index_topk_freq means FFSSFS"),
    ],
)
def test_what_hy_v4_can_not_be_served_with(hy_v4: Path, letters: str, flags: tuple[str, ...], message: str) -> None:
    assert message in refused(hy_v4, letters, *flags)


def checked(*words: str) -> tuple[int, str]:
    """Exit code of a check, and what it prints."""
    with redirect_stdout(StringIO()) as said:
        return check_main(list(words)), said.getvalue()


def test_what_sglang_would_run_of_hy_v4(hy_v4: Path) -> None:
    code, said = call(checked, "FFSFSS", "--model", str(hy_v4), "--json")
    report = json.loads(said)
    assert (code, report["effective"], report["locked_layers"]) == (0, "FFSFSS", [2, 5])
