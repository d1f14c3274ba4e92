"""Commands as processes of their own: killed, in a group, and without a place for what they print."""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from indexcache_search.engines.own_server import free_port
from tests.conftest import save_model, tiny_config
from tests.forked import forked
from tests.search.distilling import arguments, distill, records
from tests.search.test_search import arguments as search_words
from tests.search.test_search import run as search

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def killed_at(process: BaseProcess, file: Path, lines: int, delay: float = 0.0) -> None:
    """Kill a process `delay` seconds after a file has grown to so many lines."""
    while process.exitcode is None and (not file.exists() or file.read_bytes().count(b"\n") < lines):
        time.sleep(0.001)
    time.sleep(delay)
    process.kill()
    process.join()


@pytest.mark.newest
@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_kills_at_random_moments_end_in_identical_files(
    kills: int, model_folder: Path, token_file: Path, tmp_path: Path
) -> None:
    def finish(folder: Path) -> str:
        result = search(*search_words(model_folder, token_file, folder))
        assert result.exit_code == 0, result.output
        return re.sub(r"^created: .*\n", "", (folder / "pattern.yaml").read_text(), flags=re.MULTILINE)

    reference = finish(tmp_path / "reference")
    whole = (tmp_path / "reference" / "work" / "journal.jsonl").read_bytes().count(b"\n")
    draw, interrupted = random.Random(7), 0
    for number in range(kills):
        folder = tmp_path / str(number)
        process = forked("indexcache_search", search_words(model_folder, token_file, folder))
        killed_at(process, folder / "work" / "journal.jsonl", draw.randint(0, whole), draw.uniform(0.0, 0.03))
        interrupted += not (folder / "pattern.yaml").exists()
        assert finish(folder) == reference
    assert 2 * interrupted >= kills, "kills came too late to say anything"


@pytest.mark.parametrize("lines", [4, pytest.param(7, marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_to_the_same_losses(
    trained: Path, model_folder: Path, training: Path, tmp_path: Path, lines: int
) -> None:
    process = forked("indexcache_search.distill", arguments(model_folder, training, tmp_path / "out"))
    killed_at(process, tmp_path / "out" / "log.jsonl", lines)
    assert process.exitcode == -signal.SIGKILL
    code, text = distill(model_folder, training, tmp_path / "out")
    assert code == 0, text
    assert records(tmp_path / "out") == records(trained)
    ours, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (tmp_path / "out", trained))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def train_alike(one: Path, two: Path, bound: float) -> None:
    """Whether the log of one run is that of the other, and the model has the same tensors."""
    for ours, theirs in zip(records(one), records(two), strict=True):
        assert ours.keys() == theirs.keys()
        for name in ("loss", "kl", "losses", "held_out_kl", "kl_layers"):
            if name in ours:
                assert theirs[name] == pytest.approx(ours[name], rel=bound, abs=bound)
    ours, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (one, two))
    assert ours.keys() == theirs.keys()


def test_two_processes_train_as_one_does(trained: Path, model_folder: Path, training: Path, tmp_path: Path) -> None:
    """FSDP2 over gloo: weights, gradients and optimizer sharded, the same losses."""
    words = arguments(model_folder, training, tmp_path / "out")
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    log = tmp_path / "log"
    processes = [
        forked("indexcache_search.distill", words, stderr=str(log), RANK=rank, LOCAL_RANK=rank, **group)
        for rank in "01"
    ]
    for process in processes:
        process.join(300)
    for process in processes:
        process.kill()
    assert [process.exitcode for process in processes] == [0, 0], log.read_text()[-3000:]
    train_alike(trained, tmp_path / "out", 1e-5)


KERNELS_ON_CPU = """
import torch

from indexcache_search.__main__ import distill
from indexcache_search.distill import model, run

run.resolve_attention = lambda attention, _: attention  # kernels with their definitions in PyTorch
forward = model.Distillation.__call__


def checked(self, tokens):
    output = forward(self, tokens)
    assert output.divergences.dtype == torch.float32
    assert output.token_losses is None or output.token_losses.dtype == torch.float32
    return output


model.Distillation.__call__ = checked
distill()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dtype", "attention", "bound"),
    [
        ("glm_moe_dsa", "float32", "naive", 1e-5),
        ("deepseek_v32", "bfloat16", "kernels", 1e-2),
        ("deepseek_v32", "float32", "naive", 1e-5),
        ("glm_moe_dsa", "bfloat16", "kernels", 1e-2),
    ],
)
def test_two_processes_of_torchrun_train_as_one_does(
    kind: str, dtype: str, attention: str, bound: float, training: Path, tmp_path: Path
) -> None:
    model = save_model(tiny_config(kind), tmp_path / "model")
    script = ["-m", "indexcache_search.distill"]
    if attention == "kernels":
        script = [str(tmp_path / "kernels_on_cpu.py")]
        Path(script[0]).write_text(KERNELS_ON_CPU)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for name, launcher in (("one", []), ("two", torchrun)):
        command = [sys.executable, *launcher, *script]
        command += arguments(model, training, tmp_path / name, dtype=dtype, attention=attention)
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
    train_alike(tmp_path / "one", tmp_path / "two", bound)


def test_a_search_whose_result_nobody_can_print(model_folder: Path, token_file: Path, tmp_path: Path) -> None:
    """On a full device, in ASCII, on 20 columns: its files are written, and one line says what could not be."""
    folder, log = tmp_path / "a[b]c [/b] :x:", tmp_path / "log"
    words = search_words(model_folder, token_file, folder, "--strategy", "uniform", "--retain", "1/2")
    streams = {"stdout": "/dev/full", "stderr": str(log), "PYTHONIOENCODING": "ascii", "COLUMNS": "20"}
    process = forked("indexcache_search", words, **streams)
    process.join(120)
    said = log.read_text()
    assert process.exitcode == 2 and said.splitlines()[-1] == "indexcache-search: stdout: No space left on device"
    assert "Traceback" not in said
    assert {"pattern.yaml", "metrics.json"} <= {path.name for path in folder.iterdir()}
