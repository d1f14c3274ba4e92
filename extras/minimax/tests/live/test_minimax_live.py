"""MiniMax-M3 in real SGLang, with plain torch for its four kernels: served, proven, switched and refused."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from extras.minimax.tests.live import serving
from extras.minimax.tests.live.serving import STEPS, prompts
from extras.minimax.tests.models import SITES, build, released
from indexcache_search.hf.roles import apply_roles
from scripts.tools.inprocess import Served
from scripts.tools.pattern_files import write_pattern
from sglang_indexcache import Pattern
from sglang_indexcache.io.messages import NOT_LOADED, RAN_INDEXER
from sglang_indexcache.sglang.probes import SglangSource
from tests.live.ending import changed_source, launch
from tests.live.server import command, running

pytestmark = pytest.mark.sglang
TOLERANCE = 1e-5  # of logprobs
PATTERN = "FSFSS"


@pytest.fixture(scope="module", autouse=True)
def _read_version() -> None:
    source = SglangSource.installed()
    if source is None or not source.version.startswith("0.5.23"):
        pytest.skip("MiniMax-M3 is served on SGLang 0.5.23")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("saved"))


@pytest.fixture(scope="module")
def model(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return released(saved, tmp_path_factory.mktemp("released") / "m3")


@pytest.fixture(scope="module")
def reference(saved: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32, attn_implementation="eager").eval()


def distance(reference: Any, pattern: str, ids: tuple[int, ...], logprobs: Any, skipped: int = 0) -> float:
    """The largest difference of a logprob from transformers with the same roles."""
    with torch.inference_mode(), apply_roles(reference, Pattern(pattern)):
        logits = reference(torch.tensor([ids[:-1]]), use_cache=False).logits[0]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return float((torch.tensor(logprobs) - expected[: len(logprobs)])[skipped:].abs().max())


@pytest.fixture(scope="module")
def stock(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Served]:
    return serving.generate(model, None, tmp_path_factory.mktemp("stock") / "calls")


@pytest.mark.parametrize("pattern", ["FFFFF", "FSFSS", "FFSSF", "FSSSS"])
def test_served_logprobs_match_transformers(
    pattern: str, model: Path, reference: Any, stock: list[Served], tmp_path: Path
) -> None:
    """A batch of two prompts and four steps; each F layer chooses once in a pass, S layers never."""
    file, record = write_pattern(Pattern(pattern), model, tmp_path / "pattern.yaml"), tmp_path / "calls"
    answers = serving.generate(model, file, record)
    worst = max(distance(reference, pattern, item.ids, item.logprobs) for item in answers)
    print(f"{pattern}: largest difference {worst:.1e}")
    assert worst <= TOLERANCE
    calls = Counter((item["what"], item["mode"]) for item in map(json.loads, record.read_text().splitlines()))
    chooses = pattern.count("F")
    assert calls == {
        ("chose", "prompt"): chooses,
        ("attended", "prompt"): len(SITES),
        ("chose", "step"): chooses * (STEPS - 1),
        ("attended", "step"): len(SITES) * (STEPS - 1),
    }
    if pattern == "FFFFF":  # to the bit
        assert answers == stock
    else:
        assert all(item.logprobs != own.logprobs for item, own in zip(answers, stock, strict=True))


def test_patterns_are_switched_as_for_a_search(model: Path, reference: Any) -> None:
    patterns = ["FFFFF", "FSSFS", "FSSSS", "FFFFF", "FFSFS"]
    found = serving.switched(model, patterns)
    [ids] = prompts(lengths=(60,))
    assert [roles for roles, _ in found] == patterns
    assert max(distance(reference, roles, tuple(ids), logprobs) for roles, logprobs in found) <= TOLERANCE
    assert found[0] == found[3] and found[0][1] != found[1][1]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (serving.rewritten_before_graphs, "SGLang's tables of who chooses say FFFFF when graphs were captured"),
        (serving.filled_by_a_frequency, f"letter 4 {RAN_INDEXER} 1 times in a pass (extend), expected 0"),
        (serving.deaf_in_prompts, f"letter 1 {RAN_INDEXER} 1 times in a pass (extend), expected 0"),
        (serving.another_backend, "expected MiniMaxHybridAttnBackend with MiniMaxSparseAttnBackend"),
        (serving.an_index_is_not_loaded, f"letter 2 is F, but {NOT_LOADED}"),
    ],
    ids=lambda item: getattr(item, "__name__", ""),
)
def test_an_sglang_that_does_not_run_the_pattern_is_no_server(
    change: Callable[[], None], line: str, model: Path
) -> None:
    code, lines = serving.ended(model, PATTERN, change)
    assert code != 0 and len(lines) == 1 and line in lines[0], lines


def test_a_source_that_nobody_read_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    module = "srt.layers.attention.minimax_sparse_backend"
    changed = changed_source(
        module, lambda text: text.replace("want_topk = False\n", "want_topk = bool(0)\n"), tmp_path
    )
    code, lines = launch(command(model, "--indexcache-pattern", PATTERN)[3:], **changed)
    assert code != 0 and len(lines) == 1
    assert "nobody here has read sglang.srt.layers.attention.minimax_sparse_backend" in lines[0], lines


def test_a_server_says_what_it_runs(model: Path, reference: Any, tmp_path: Path) -> None:
    """Over HTTP: ready with a proof, indexes counted in its first passes, answers that name the fingerprint."""
    script = tmp_path / "script.py"
    script.write_text("from extras.minimax.tests.live import kernels\nkernels.install()\n")
    file = write_pattern(Pattern(PATTERN), model, tmp_path / "pattern.yaml")
    flags = ("--indexcache-pattern", file, "--skip-tokenizer-init", "--page-size", "4")
    own = {"TEST_SABOTAGE": str(script), "SGLANG_OPT_USE_BF16_ROUTER_GEMM": "0"}
    with running(model, tmp_path / "log", *flags, **own) as server:
        for name in ("first", "again"):
            [(served, cached)] = server.generate(prompts()[:1], [name], steps=STEPS, inputs=name == "first")
            assert cached == (0 if name == "first" else 56)  # whole pages of the prompt, but for its last token
            logprobs = (
                served.logprobs if name == "first" else (*[0.0] * (len(served.ids) - STEPS - 1), *served.logprobs)
            )
            skipped = 0 if name == "first" else len(logprobs) - STEPS
            found = distance(reference, PATTERN, served.ids, logprobs, skipped)
            assert found <= TOLERANCE
        [state] = json.loads(server.get("/server_info"))["internal_states"]
        answer = server.post("/generate", input_ids=prompts()[1], sampling_params={"max_new_tokens": 1})
    said, fingerprint = state["indexcache"], Pattern(PATTERN).fingerprint
    assert (said["pattern"], said["fingerprint"], said["proven"], said["proven_ranks"]) == (
        PATTERN,
        fingerprint,
        True,
        1,
    )
    assert said["counted"]["passes"].keys() >= {"extend", "decode"} and "to_come" not in said["counted"]
    assert answer["meta_info"]["indexcache"] == [fingerprint]
