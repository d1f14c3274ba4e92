"""What SGLang computes with a pattern is what transformers computes with the same roles, for every kind of model."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from dsa_cpu_platform import recorder
from indexcache_search import demo
from scripts.tools import random_models
from scripts.tools.inprocess import Served, generate
from scripts.tools.pattern_files import write_pattern
from sglang_indexcache import Pattern
from sglang_indexcache.checkpoint.checkpoint import Checkpoint
from tests.live.reference import TOLERANCE, load_reference, replay, selections

pytestmark = pytest.mark.sglang

STREAMS_TOLERANCE = 2e-5  # DeepSeek-V4, with two ranks: 1.0e-5 is seen
TRAINED_TOLERANCE = 1e-4  # the demo: 4e-5 is seen, between transformers in float32 and in float64 as well
NOISE_RATIO = 1.5  # how much farther than transformers' float32 SGLang may be from float64, root mean square
NEGLIGIBLE = 4e-6  # 1e-6 on an Intel CPU, 1.4e-6 on an AMD one, by the kernels that PyTorch picks
MAX_DISPUTED = 1e-3
STEPS = 4
KINDS = ("demo", *random_models.KINDS)


@pytest.fixture(scope="module", params=KINDS)
def served_model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, Any]]:
    """A checkpoint folder, and the same in transformers."""
    kind = request.param
    folder = demo.MODEL if kind == "demo" else random_models.build(kind, tmp_path_factory.mktemp(kind))
    yield folder, load_reference(folder)


def prompts(folder: Path) -> list[list[int]]:
    """A batch of two sequences, longer than `index_topk`: the demo's own data, or random tokens."""
    if folder == demo.MODEL:
        rows = [json.loads(line)["input_ids"] for line in demo.data_file("multi").open()]
        return [rows[0][:400], rows[1][:150]]
    rng = random.Random(0)
    return [[rng.randrange(2, random_models.VOCAB) for _ in range(length)] for length in (200, 90)]


def patterns(native: Pattern) -> list[Pattern]:
    """All F, the paper's uniform 1/2 and 1/4, and five random ones; locked layers stay S."""
    rng, layers = random.Random(len(native)), len(native)
    drawn = ["F" + "".join(rng.choice("FS") for _ in range(layers - 1)) for _ in range(5)]
    wanted = [Pattern.full(layers), Pattern.uniform(layers, 2), Pattern.uniform(layers, 4), *map(Pattern, drawn)]
    return [Pattern.full(layers, {*pattern.shared_layers, *native.shared_layers}) for pattern in wanted]


@pytest.mark.parametrize(
    "index", [2, 3, *(pytest.param(other, marks=pytest.mark.slow) for other in (0, 1, 4, 5, 6, 7))]
)
def test_served_logprobs_match_transformers(served_model: tuple[Path, Any], index: int, tmp_path: Path) -> None:
    folder, model = served_model
    pattern = patterns(Checkpoint.read(str(folder)).model.native)[index]
    file = write_pattern(pattern, folder, tmp_path / "pattern.yaml")
    record = tmp_path / "record"
    record.mkdir()
    answers = numbered(generate(folder, file, prompts(folder), STEPS, record))
    runs = recorder.read(record)

    indexers, layers = recorder.indexers(runs), Checkpoint.read(str(folder)).model.layers
    for mode in ("EXTEND", "DECODE"):
        ran = {run.layer for run in indexers if run.mode == mode}
        assert ran == {layers[letter] for letter in pattern.full_layers}, mode
    extends = [run for run in indexers if run.mode == "EXTEND"]
    assert len(extends) == len(pattern.full_layers), "one run of each F layer in the one prefill"
    assert {len(run.positions) for run in extends} == {sum(map(len, prompts(folder)))}
    check_parity(model, pattern, answers, runs)


def test_another_index_topk_is_served_by_an_override(tmp_path: Path) -> None:
    """A pattern that was searched on a folder whose config.json differs in that alone runs on the original."""
    folder = random_models.build("glm-dense", tmp_path / "glm")
    config = json.loads((folder / "config.json").read_text())
    topk, edited = 2 * config["index_topk"], tmp_path / "edited"
    shutil.copytree(folder, edited)
    (edited / "config.json").write_text(json.dumps({**config, "index_topk": topk}))
    pattern, record = Pattern("FSFSFF"), tmp_path / "record"
    file = write_pattern(pattern, edited, tmp_path / "pattern.yaml")
    record.mkdir()
    override = {"json_model_override_args": json.dumps({"index_topk": topk})}
    answers = numbered(generate(folder, file, prompts(folder), STEPS, record, **override))
    runs = recorder.read(record)
    assert {run.selected.shape[1] for run in recorder.indexers(runs)} == {topk}
    check_parity(load_reference(edited), pattern, answers, runs)


def check_parity(
    model: Any,
    pattern: Pattern,
    answers: Sequence[tuple[Served, Sequence[str]]],
    runs: Sequence[recorder.Run],
    exact: bool = True,
) -> None:
    """Compare every logprob, and count and judge the selections that differ.

    Args:
        answers: each sequence with the ids of the requests that computed it.
        exact: compare DeepSeek-V4 with float64, too, which takes the most time.

    The trained demo amplifies rounding more than random weights do: transformers in float32 is up to 4e-5 from itself
    in float64. There, and on DeepSeek-V4, SGLang must be as near to float64 as transformers is.
    """
    trained = model.config.num_hidden_layers == 16
    streams = model.config.model_type == "deepseek_v4"
    tolerance = TRAINED_TOLERANCE if trained else STREAMS_TOLERANCE if streams else TOLERANCE
    rows, worst, disputed, errors, noise = 0, 0.0, [], [], []
    for served, requests in answers:
        chosen = selections(runs, requests)
        expected = replay(model, pattern, served.ids, chosen)
        found = torch.tensor(served.logprobs)
        reference = expected.logprobs[-len(found) :]
        difference = (found - reference).abs().max().item()
        assert difference <= tolerance, f"request {requests[-1]}: {difference:.2e}"
        worst = max(worst, difference)
        if trained or (streams and exact):
            float64 = replay(in_float64(model), pattern, served.ids, chosen).logprobs[-len(found) :]
            errors.append(found - float64)
            noise.append(reference - float64)
        rows += expected.rows
        disputed += expected.disputed
    print(f"{pattern}: largest difference {worst:.1e}; {len(disputed)} of {rows} selections differ")
    if errors:
        error, expected_error = (torch.cat(items).square().mean().sqrt().item() for items in (errors, noise))
        print(f"{error:.1e} from float64, transformers {expected_error:.1e}")
        assert error <= max(NOISE_RATIO * expected_error, NEGLIGIBLE), (
            f"{error:.1e} from float64, transformers {expected_error:.1e}"
        )
    assert len(disputed) <= max(1, MAX_DISPUTED * rows), f"{len(disputed)} of {rows} selections differ"
    assert all(gap <= TOLERANCE for gap in disputed), f"a token {max(disputed):.2e} from the k-th score differs"


def numbered(answers: Sequence[Served]) -> list[tuple[Served, Sequence[str]]]:
    """In one process, request ids are the numbers of the prompts."""
    return [(served, [str(index)]) for index, served in enumerate(answers)]


@cache
def in_float64(model: Any) -> Any:
    doubled = copy.deepcopy(model).double()
    doubled.set_experts_implementation("eager")  # the others have no float64
    return doubled


def test_the_comparison_can_fail(tmp_path: Path) -> None:
    """Other roles, or one logprob off, are seen."""
    folder = random_models.build("glm-dense", tmp_path / "glm")
    model, pattern = load_reference(folder), Pattern("FSFSFF")
    record = tmp_path / "record"
    record.mkdir()
    file = write_pattern(pattern, folder, tmp_path / "pattern.yaml")
    answers = numbered(generate(folder, file, prompts(folder), 2, record))
    runs = recorder.read(record)
    check_parity(model, pattern, answers, runs)
    wrong = [
        (Served(one.ids, one.prompt, (one.logprobs[0] + 2e-5, *one.logprobs[1:])), names) for one, names in answers
    ]
    with pytest.raises(AssertionError, match="request 0: 2"):
        check_parity(model, pattern, wrong, runs)
    with pytest.raises(KeyError):  # a layer that should have run its indexer did not
        check_parity(model, Pattern("FFFSFF"), answers, runs)
    with pytest.raises(AssertionError, match="request 0"):
        check_parity(model, Pattern("FSFSFS"), answers, runs)
