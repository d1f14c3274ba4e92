"""Dense models in real SGLang: bit for bit its own with room for all, else what transformers computes with pages."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sglang")

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from indexcache_dense.family import DENSE_GQA
from indexcache_dense.hf.page_selector import PageSelector, compressed_scores, rounded_scores, token_max_scores
from indexcache_dense.reuse import ReusePolicy
from indexcache_dense.selection import Selection
from scripts.tools import random_models
from scripts.tools.dense_reference import decoded, distance, logprobs, reference
from scripts.tools.inprocess import Served, call, generate
from scripts.tools.pattern_files import write_pattern
from scripts.tools.random_models import VOCAB
from sglang_indexcache import Pattern
from sglang_indexcache.check import main as check_main
from sglang_indexcache.families.deepseek_v4 import DEEPSEEK_V4
from sglang_indexcache.io.messages import NOT_COMBINED, WOULD_RUN
from tests.live.ending import launch, load
from tests.live.reference import TOLERANCE
from tests.live.server import Server, command, ended, running
from tests.live.test_server import PLAIN, metric, states

pytestmark = pytest.mark.sglang
FEW = Selection(page_tokens=4, pages=8, recent_pages=2, sink_pages=0, score="token_max")
ALL = replace(FEW, page_tokens=16, pages=64)
PATTERN = Pattern("DDSSDS", FEW)
AROUND = (FEW.tokens - 1, FEW.tokens, FEW.tokens + 1)  # lengths at which the first choices are made
# layers that select by compressed keys, for themselves and others; pages and groups end among the lengths
COMPRESSED = Selection(page_tokens=16, pages=4, recent_pages=1, sink_pages=0, score="compressed_keys")
MIXED = ("DFSSFS", "DSFFDS")
SELECTING = [  # by each kind of digest, and with each memory, on one of the backends; slow tests: on the other one
    ("torch_native", "compressed_keys", "none"),
    ("torch_native", "rounded_keys", "none"),
    ("fa3", "compressed_keys", "ema:0.7"),
    ("fa3", "compressed_keys", "refresh:3"),
]
OTHERS = [
    pytest.param("fa3" if backend == "torch_native" else "torch_native", score, steps, marks=pytest.mark.slow)
    for backend, score, steps in SELECTING
]
SIXTEEN = {"page_size": 16}
STEPS = 12
# FlashAttention is a stand-in of its interface, all above it SGLang's own.
FA3 = {"attention_backend": "fa3"}
BACKENDS = ({}, pytest.param(FA3, marks=pytest.mark.slow), {**FA3, "page_size": 4})


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_models.build("llama", tmp_path_factory.mktemp("one-llama"))


def prompts() -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(2, VOCAB) for _ in range(length)] for length in (300, 117, 90, 5, 1, *AROUND)]


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_with_room_for_all_it_is_sglangs_own(llama: Path, tmp_path: Path, backend: dict[str, Any]) -> None:
    """A batch of eight lengths, read and decoded; and what pages change."""
    room = write_pattern(Pattern("DSSSSS", ALL), llama, tmp_path / "all")
    few = write_pattern(PATTERN, llama, tmp_path / "few")
    stock, wide, found = (
        generate(llama, pattern, prompts(), STEPS, tmp_path, **backend) for pattern in (None, room, few)
    )
    assert wide == stock
    own, apart = reference(llama), []
    for served, plain in zip(found, stock, strict=True):
        assert served.logprobs[: served.prompt] == plain.logprobs[: served.prompt], "a prompt was read otherwise"
        assert distance(plain, logprobs(own, plain.ids)) <= TOLERANCE
        apart.append(distance(served, logprobs(own, served.ids)))
        assert distance(served, decoded(own, PATTERN, served)) <= TOLERANCE
    assert min(apart[:3]) > 10 * TOLERANCE, "pages make no difference"
    assert max(apart[3:5]) <= TOLERANCE, "without a choice they do"


@pytest.mark.parametrize("backend", [SIXTEEN, {"attention_backend": "fa3", **SIXTEEN}], ids=str)
def test_f_layers_with_room_for_all_are_sglangs_own(llama: Path, tmp_path: Path, backend: dict[str, Any]) -> None:
    room = write_pattern(Pattern("DFSSFS", replace(COMPRESSED, pages=32)), llama, tmp_path / "all")
    stock, wide = (generate(llama, pattern, prompts(), STEPS, tmp_path, **backend) for pattern in (None, room))
    assert wide == stock


@pytest.mark.parametrize(("backend", "score", "steps"), [*SELECTING, *OTHERS])
def test_layers_that_select_for_themselves(llama: Path, tmp_path: Path, backend: str, steps: str, score: Any) -> None:
    """By digests of keys, with and without memory; D, F and S mixed, over ends of pages."""
    selection = replace(COMPRESSED, score=score, steps=ReusePolicy.parse(steps))
    roles = MIXED[backend == "fa3"] if score == "compressed_keys" else "FSSFFS"  # without a D, too
    pattern, own = Pattern(roles, selection), reference(llama)
    asked = [*prompts(), prompts()[0][:63], prompts()[0][:79]][2:]
    file = write_pattern(pattern, llama, tmp_path / "pattern.yaml")
    found = generate(llama, file, asked, 20, tmp_path, attention_backend=backend, **SIXTEEN)
    for served in found:
        assert distance(served, decoded(own, pattern, served)) <= TOLERANCE
    without = replace(pattern, selection=replace(COMPRESSED, pages=32))
    assert distance(found[0], decoded(own, without, found[0])) > 10 * TOLERANCE, "pages make no difference"
    if steps != "none":
        forgetful = replace(pattern, selection=COMPRESSED)
        assert max(distance(served, decoded(own, forgetful, served)) for served in found) > 10 * TOLERANCE


@pytest.mark.parametrize("kind", random_models.DENSE_KINDS)
def test_pages_are_served_as_the_reference_engine_has_them(kind: str, tmp_path: Path) -> None:
    model = random_models.build(kind, tmp_path / "model")
    found = generate(model, write_pattern(PATTERN, model, tmp_path / "few"), prompts(), STEPS, tmp_path)
    own = reference(model)
    for served in found:
        assert distance(served, decoded(own, PATTERN, served)) <= TOLERANCE


class ByRank:
    """Attention in one pass, with a choice for each tensor-parallel rank's heads.

    Args:
        pattern: roles with a selection.
        read: `[1, tokens]`, bool: tokens that were read; they attend to everything.
        ranks: tensor-parallel ranks.
    """

    def __init__(self, pattern: Pattern, read: Tensor, ranks: int) -> None:
        self._pattern, self._read, self._ranks = pattern, read, ranks
        self._kept: list[Tensor] = []

    def _scores(self, query: Tensor, key: Tensor, weights: Tensor, scaling: float) -> list[Tensor]:
        selection = self._pattern.selection
        assert selection is not None
        if selection.score == "token_max":
            return [token_max_scores(own, selection, 1) for own in weights.chunk(self._ranks, 1)]
        parts = zip(query.chunk(self._ranks, 1), key.chunk(self._ranks, 1), strict=True)
        rule = compressed_scores if selection.score == "compressed_keys" else rounded_scores
        return [rule(q, k, scaling, selection) for q, k in parts]

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        selection, layer = self._pattern.selection, module.layer_idx
        assert selection is not None
        length, groups = key.shape[2], query.shape[1] // key.shape[1]
        page = (torch.arange(length) // selection.page_tokens)[None]
        k, v = (item.repeat_interleave(groups, 1) for item in (key, value))
        products = query @ k.mT * scaling + mask
        letter = self._pattern[layer]
        if letter != "S":
            scores = self._scores(query, key, products.softmax(-1), scaling)
            self._kept = [PageSelector(selection).choose(own, 0, self._read) for own in scores]
        if letter != "D":
            keys = [kept.gather(2, page[:, None].expand(-1, length, -1)) for kept in self._kept]
            seen = torch.stack(keys, 1).repeat_interleave(query.shape[1] // self._ranks, 1)
            products = products.masked_fill(~seen, -torch.inf)
        return (products.softmax(-1) @ v).transpose(1, 2), None


def by_rank(model: Any, pattern: Pattern, served: Served, ranks: int, read: Tensor | None = None) -> Tensor:
    if read is None:
        read = torch.arange(len(served.ids) - 1) < served.prompt
    AttentionInterface.register("test_by_rank", ByRank(pattern, read[None], ranks))
    AttentionMaskInterface.register("test_by_rank", eager_mask)
    model.set_attn_implementation("test_by_rank")
    return logprobs(model, served.ids)


@pytest.fixture(scope="module")
def server(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two tensor-parallel ranks, chunks of prompts, a prefix cache, metrics."""
    folder = tmp_path_factory.mktemp("server")
    file = write_pattern(PATTERN, llama, folder / "pattern.yaml")
    flags = ("--indexcache-pattern", file, "--chunked-prefill-size", "64", "--tp-size", "2", "--enable-metrics")
    with running(llama, folder / "log", *flags, "--skip-tokenizer-init", SGLANG_CPU_OMP_THREADS_BIND="0|1") as started:
        yield started


def test_two_ranks_choose_by_their_own_heads(server: Server, llama: Path) -> None:
    """Chunks, a batch, a prefix hit on what was read and on what was decoded."""
    own = reference(llama)
    batch = server.generate(prompts(), [f"batch-{index}" for index in range(8)], steps=STEPS)
    for served, _ in batch:
        assert distance(served, by_rank(own, PATTERN, served, 2)) <= TOLERANCE
    longest = batch[0][0]
    together = max(distance(longest, by_rank(own, PATTERN, longest, ranks)) for ranks in (1,))
    assert together > 10 * TOLERANCE, "the ranks chose together"
    [(again, cached)] = server.generate(prompts()[:1], ["again"], steps=STEPS, inputs=False)
    assert cached >= 64 and again.ids == longest.ids
    assert np.abs(np.subtract(again.logprobs, longest.logprobs[-STEPS:])).max() <= TOLERANCE
    [(on, cached)] = server.generate([longest.ids], ["on"], steps=STEPS, inputs=False)
    assert cached >= longest.prompt + STEPS - 1, "what was decoded was read again"
    assert on.ids[: len(longest.ids)] == longest.ids


def test_status_metrics_and_check(server: Server, llama: Path, tmp_path: Path) -> None:
    [state] = states(server)
    assert state["pattern"] == PATTERN.roles and state["fingerprint"] == PATTERN.fingerprint
    assert state["selection"] == {
        "page_tokens": 4,
        "pages": 8,
        "recent_pages": 2,
        "sink_pages": 0,
        "score": "token_max",
    }
    assert (state["full_layers"], state["shared_layers"], state["proven_ranks"]) == (3, 3, 2)
    file = write_pattern(PATTERN, llama, tmp_path / "same.yaml")
    assert check_main([file, "--server", server.url, "--model", str(llama)]) == 0
    other = write_pattern(replace(PATTERN, selection=replace(FEW, pages=9)), llama, tmp_path / "other.yaml")
    assert check_main([other, "--server", server.url]) == 1
    server.generate([[5] * 40], ["counted"], steps=5)
    text = server.get("/metrics")
    layers = metric(text, "sglang:indexcache_layers")
    assert {("D" if 'role="D"' in labels else "S"): value for labels, value in layers.items()} == {"D": 3, "S": 3}
    assert max(metric(text, "sglang:indexcache_decode_passes_total").values()) >= 4


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--speculative-algorithm", "NGRAM"), f"--speculative-algorithm {NOT_COMBINED}: pages are"),
        (("--enable-mixed-chunk",), f"--enable-mixed-chunk {NOT_COMBINED}: pages are chosen"),
        (("--enable-two-batch-overlap",), f"--enable-two-batch-overlap {NOT_COMBINED}"),
        (("--dcp-size", "2", "--tp-size", "2"), f"--dcp-size {NOT_COMBINED}: a rank would choose"),
        (("--enable-dp-attention", "--dp-size", "2", "--tp-size", "2"), "--enable-dp-attention can't be combined with"),
        (("--pp-size", "2"), f"--pp-size 2 {NOT_COMBINED} on dense_gqa"),
        (("--json-model-override-args", '{"num_hidden_layers": 4}'), "num_hidden_layers changes which layers"),
    ],
)
def test_what_it_can_not_be_served_with(llama: Path, tmp_path: Path, flags: tuple[str, ...], message: str) -> None:
    file = write_pattern(PATTERN, llama, tmp_path / "pattern.yaml")
    code, lines = launch(command(llama, "--indexcache-pattern", file, "--skip-tokenizer-init", *flags)[3:])
    assert code == 2 and len(lines) == 1 and message in lines[0], lines


def test_every_refused_flag_is_one_of_sglangs(llama: Path) -> None:
    """What is looked for by its name, and not found, would not be refused."""
    names = [*DENSE_GQA.sglang.refused_flags, *DEEPSEEK_V4.sglang.refused_flags]
    assert call(_unknown, str(llama), names) == []


def _unknown(model: str, names: list[str]) -> list[str]:
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(model_path=model, device="cpu")
    return [name for name in names if not hasattr(arguments, name)]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (Pattern("DFSSSS", FEW), "layer 1 is F, which is not served with score token_max; expected compressed_keys"),
        (
            Pattern("DFSSSS", replace(COMPRESSED, steps=ReusePolicy.parse("bounded:2"))),
            "steps bounded:2 are not served; expected none, ema, refresh",
        ),
        (
            Pattern("DFSSSS", replace(COMPRESSED, buffer_pages=8)),
            "buffer_pages is 8, which is not served; expected none",
        ),
        (
            Pattern("DSSSSS", replace(FEW, steps=ReusePolicy.parse("ema:0.5"))),
            "--page-size is 1, expected more for steps ema:0.5: with 1 SGLang's beam search lets requests trade places",
        ),
        (Pattern("DFSSSS", COMPRESSED), "--page-size is 1, expected a multiple of 16 for score compressed_keys"),
        (Pattern("DSSSSS", replace(FEW, page_tokens=64, pages=64)), "a context of 4096 tokens fits into the 4096"),
    ],
)
def test_patterns_that_are_not_served(llama: Path, tmp_path: Path, pattern: Pattern, message: str) -> None:
    code, lines = load(llama, SGLANG_INDEXCACHE_PATTERN=write_pattern(pattern, llama, tmp_path / "pattern.yaml"))
    assert code == 2 and len(lines) == 1 and message in lines[0], lines


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("backend", "the attention backend is OtherBackend, expected one that can decode over chosen pages"),
        ("page-size", "--page-size is 8, expected a divisor of the selection's page_tokens, 4"),
        ("window", "layer 2 has a sliding window, expected layers that attend to everything before them"),
        ("role", f"layer 3 {WOULD_RUN} D, the pattern says S"),
        ("selection", "the layers of this rank were told different selections"),
    ],
)
def test_a_model_that_does_not_run_the_pattern(llama: Path, tmp_path: Path, broken: str, message: str) -> None:
    file = write_pattern(PATTERN, llama, tmp_path / "pattern.yaml")
    code, lines = load(llama, SGLANG_INDEXCACHE_PATTERN=file, DSA_CPU_BREAK=f"dense-{broken}")
    assert code == 2 and len(lines) == 1 and message in lines[0], lines


def test_letters_and_calibration_are_refused(llama: Path) -> None:
    code, lines = launch(command(llama, "--indexcache-pattern", "DDSSDS", "--skip-tokenizer-init")[3:])
    assert code == 2 and lines == ["indexcache: DDSSDS has a D, which needs a selection; expected a pattern file"]
    code, lines = launch(command(llama, "--indexcache-calibrate", "--skip-tokenizer-init")[3:])
    assert code == 2 and len(lines) == 1 and "LlamaForCausalLM has no calibration server" in lines[0]


def test_a_scheduler_without_the_plugin(llama: Path, tmp_path: Path) -> None:
    """The plain launcher with the variable set, on a model whose files say a window: no server."""
    other = Path(shutil.copytree(llama, tmp_path / "window"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "sliding_window": 64}))
    file = write_pattern(PATTERN, llama, tmp_path / "pattern.yaml")
    arguments = command(other, "--skip-tokenizer-init", launcher=PLAIN)
    code, lines = ended(arguments, SGLANG_INDEXCACHE_PATTERN=file)
    assert code == 2 and len(lines) == 1 and "sliding_window is 64, expected layers that see all" in lines[0]
