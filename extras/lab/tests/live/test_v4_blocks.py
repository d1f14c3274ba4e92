"""DeepSeek-V4 in real SGLang, some of whose letters select in blocks: attention reads what the definition says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

pytest.importorskip("sglang")

from dsa_cpu_platform import recorder
from extras.dense.tests.live.selecting import in_blocks as which_queries
from extras.dense.tests.live.selecting import passes, random_prompts
from indexcache_lab.v4_blocks.definition import in_blocks
from indexcache_lab.v4_blocks.needs import unread
from indexcache_lab.v4_blocks.plugin import VARIABLE
from indexcache_lab.v4_blocks.serving import KEY
from indexcache_search.hf.roles import apply_roles
from scripts.tools import random_models
from scripts.tools.inprocess import Served, _generate, call
from scripts.tools.pattern_files import write_pattern
from scripts.tools.random_models import TOPK
from sglang_indexcache import Pattern
from sglang_indexcache.checkpoint.checkpoint import Checkpoint
from sglang_indexcache.sglang.probes import SglangSource
from tests.live.ending import load
from tests.live.reference import TOLERANCE, load_reference
from tests.live.server import running
from tests.live.test_server import states

pytestmark = pytest.mark.sglang

STEPS, PAGE = 3, 256
PATTERN = Pattern.parse("FSFFSF+0q4+2q4")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_models.build("deepseek-v4", tmp_path_factory.mktemp("deepseek-v4"))


@pytest.fixture
def record(tmp_path: Path) -> Path:
    folder = tmp_path / "record"
    folder.mkdir()
    return folder


def blocks_in(pattern: Pattern) -> str:
    return pattern.letters.partition("+")[2]


def check(
    model: Path,
    pattern: Pattern,
    served: Served,
    requests: Sequence[str],
    computed: Sequence[tuple[int, int]],
    runs: Sequence[recorder.Run],
) -> int:
    """All selections of a sequence, S letters' included, and its logprobs; how many queries were in blocks."""
    reference, letters = (
        load_reference(model),
        {layer: at for at, layer in enumerate(Checkpoint.read(str(model)).model.layers)},
    )
    attended: dict[tuple[int, int], frozenset[int]] = {}
    for rid in requests:
        for run in (run for run in runs if run.what == "attention"):
            for owner, position, row in zip(run.requests, run.positions, run.selected, strict=True):
                if owner == rid:
                    attended[letters[run.layer], position] = frozenset(entry for entry in row.tolist() if entry >= 0)
    prompt = which_queries(computed, len(served.ids) - 1, pattern, 4 * TOPK)
    wanted: dict[int, torch.Tensor] = {}
    ids = torch.tensor([list(served.ids[:-1])])
    with (
        torch.inference_mode(),
        in_blocks(reference, pattern.indexers, prompt),
        apply_roles(reference, pattern.plain(), lambda letter, chosen: wanted.update({letter: chosen[0]})),
    ):
        logits = reference(ids, use_cache=False).logits[0]
    differing = [
        (letter, position)
        for letter, chosen in wanted.items()
        for position, row in enumerate(chosen.tolist())
        if {entry for entry in row if entry >= 0} != attended[letter, position]
    ]
    assert not differing, f"{len(differing)} differ: {differing[:5]}"
    logprobs = logits.log_softmax(-1).gather(1, torch.tensor(served.ids[1:])[:, None])[:, 0]
    found = torch.tensor(served.logprobs)
    assert (logprobs[-len(found) :] - found).abs().max().item() <= TOLERANCE
    return int(prompt.sum())


@pytest.mark.parametrize("letters", ["FSFFSF+0q4+2q4", pytest.param("FFSFSS+1q16+3q16", marks=pytest.mark.slow)])
def test_served_selections_are_the_definitions(letters: str, model: Path, record: Path, tmp_path: Path) -> None:
    """A batch of mixed lengths, one of them with nothing to share; one letter in blocks more or fewer is seen."""
    pattern = Pattern.parse(letters)
    file = write_pattern(pattern.plain(), model, tmp_path / "pattern.yaml")
    environment = {"DSA_CPU_RECORD": str(record), "SGLANG_INDEXCACHE_PATTERN": file, VARIABLE: blocks_in(pattern)}
    answers = call(_generate, model, random_prompts(400, 280, 90), STEPS, **environment)
    runs, shared = recorder.read(record), []
    for index, served in enumerate(answers):
        shared.append(check(model, pattern, served, [str(index)], [(0, served.prompt)], runs))
    assert shared[0] > 190 and shared[1] > 70 and shared[2] == 0
    fewer = Pattern.parse(letters.rpartition("+")[0])
    with pytest.raises(AssertionError):
        check(model, fewer, answers[0], ["0"], [(0, answers[0].prompt)], runs)


@pytest.mark.slow
def test_a_server(model: Path, record: Path, tmp_path: Path) -> None:
    """Two ranks, chunks and a prefix hit; status says what stands there and how often it selected."""
    file = write_pattern(PATTERN.plain(), model, tmp_path / "pattern.yaml")
    flags = (
        "--indexcache-pattern",
        file,
        "--chunked-prefill-size",
        str(PAGE),
        "--tp-size",
        "2",
        "--skip-tokenizer-init",
    )
    changes = {"DSA_CPU_RECORD": str(record), "SGLANG_CPU_OMP_THREADS_BIND": "0|1", VARIABLE: blocks_in(PATTERN)}
    with running(model, tmp_path / "log", *flags, **changes) as server:
        long = random_prompts(700)[0]
        before = json.loads(server.get("/server_info"))["internal_states"][0][KEY]
        [(first, _)] = server.generate([long], ["first"], steps=STEPS)
        [(second, cached)] = server.generate(
            [long[:300] + random_prompts(250)[0]], ["second"], steps=STEPS, inputs=False
        )
        [state] = states(server)
        assert cached == PAGE and state["proven"] and state["pattern"] == PATTERN.roles
        after = json.loads(server.get("/server_info"))["internal_states"][0][KEY]
    runs = recorder.read(record)
    computed, again = passes(runs, "first"), passes(runs, "second")
    assert [length for _, length in computed] == [PAGE, PAGE, 700 - 2 * PAGE] and again[0][0] == PAGE
    in_first = check(model, PATTERN, first, ["first"], computed, runs)
    in_both = check(model, PATTERN, second, ["first", "second"], [computed[0], *again], runs)
    assert in_first > 200 and in_both > 150
    layers = Checkpoint.read(str(model)).model.layers
    assert after["layers"] == {str(layers[item.layer]): item.queries for item in PATTERN.indexers}
    own = int(which_queries(again, 550, PATTERN, 4 * TOPK).sum())
    assert after["blocks"] - before["blocks"] == 2 * (in_first + own) // 4
    assert after["passes"] - before["passes"] == 4


@pytest.mark.parametrize(
    ("letters", "blocks", "message"),
    [
        ("", "0q4", f"{VARIABLE} is set, but the engine serves no pattern"),
        ("FSFFSF", "1q4", "1q4 is of F layers, but layer 1 is S"),
    ],
    ids=["no-pattern", "an-s"],
)
def test_what_it_can_not_be_served_with(letters: str, blocks: str, message: str, model: Path) -> None:
    code, lines = load(model, **({"SGLANG_INDEXCACHE_PATTERN": letters} if letters else {}), **{VARIABLE: blocks})
    assert code == 2 and len(lines) == 1 and message in lines[0], lines


def test_other_models_are_refused(tmp_path: Path) -> None:
    folder = random_models.build("glm-dense", tmp_path / "glm")
    code, lines = load(folder, SGLANG_INDEXCACHE_PATTERN="FSFFSF", **{VARIABLE: "0q4"})
    assert code == 2 and lines == [
        f"indexcache: {VARIABLE} is not served on dsa, expected DeepSeek-V4; DSA models have blocks"
    ]


def test_the_installed_source_was_read() -> None:
    source = SglangSource.installed()
    assert source is not None and unread(source) is None
