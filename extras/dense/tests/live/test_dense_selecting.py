"""F layers of dense models in real SGLang: what they keep of pages stays right over all that a scheduler does."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

pytest.importorskip("sglang")

import torch
from torch import Tensor

from extras.dense.tests.live.test_dense import by_rank
from indexcache_dense.hf.pages import apply_page_roles
from indexcache_dense.reuse import ReusePolicy
from indexcache_dense.selection import COMPRESSED_KEYS, ROUNDED_KEYS, Score, Selection
from scripts.tools import random_models
from scripts.tools.dense_reference import logprobs, reference
from scripts.tools.inprocess import Served, call
from scripts.tools.pattern_files import write_pattern
from scripts.tools.random_models import VOCAB
from sglang_indexcache import Pattern
from sglang_indexcache.check import main as check_main
from tests.live.reference import TOLERANCE
from tests.live.server import REQUEST_TIMEOUT, Server, running
from tests.live.test_server import metric, states

pytestmark = pytest.mark.sglang
SELECTION = Selection(page_tokens=16, pages=4, recent_pages=1, sink_pages=0, score="compressed_keys")
FLAGS = ("--page-size", "16", "--skip-tokenizer-init")
STEPS = 24


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_models.build("llama", tmp_path_factory.mktemp("one-llama"))


def prompts(*lengths: int) -> list[list[int]]:
    rng = random.Random(sum(lengths))
    return [[rng.randrange(2, VOCAB) for _ in range(length)] for length in lengths]


def apart(model: Any, pattern: Pattern, served: Served, ranks: int, read: Tensor | None = None) -> Tensor:
    """Distances of the served log-probabilities, of the last tokens or all, to those of the reference."""
    found = torch.tensor(served.logprobs)
    return (by_rank(model, pattern, served, ranks, read)[-len(found) :] - found).abs()


def _selections(model: Path, asked: list[list[int]], steps: int) -> tuple[list[Served], list[list[list[int]]]]:
    """What was served, and the pages of each selection of each request, one selecting layer after the other."""
    from indexcache_dense.family.layer_pages import LayerPages
    from indexcache_dense.kernels import CachedPages
    from scripts.tools import inprocess

    select, found = LayerPages.select, list[list[list[int]]]()

    def recording(kept: LayerPages, q: Any, keys: Any, pages: CachedPages, *more: Any, **named: Any) -> Any:
        slots, counts = select(kept, q, keys, pages, *more, **named)
        chosen = []
        for row, length in enumerate(pages.lengths.tolist()):
            position = {slot: at for at, slot in enumerate(pages.table[row, :length].tolist())}
            taken = [position[slot] // kept.selection.page_tokens for slot in slots[row, : counts[row]].tolist()]
            chosen.append(sorted(set(taken)))
        found.append(chosen)
        return slots, counts

    LayerPages.select = recording  # type: ignore[method-assign]
    return inprocess._generate(model, asked, steps), found


def reference_pages(own: Any, pattern: Pattern, served: Served) -> dict[int, Tensor]:
    """What the reference engine's layers select, `[queries, pages]`, bool."""
    found: dict[int, Tensor] = {}
    read = torch.arange(len(served.ids) - 1)[None] < served.prompt
    with apply_page_roles(own, pattern, prompt=read, observe=lambda layer, kept: found.update({layer: kept[0]})):
        logprobs(own, served.ids)
    return found


@pytest.mark.parametrize(
    ("score", "policy"),
    [
        *(("compressed_keys", policy) for policy in ("none", "ema:0.7", "refresh:3")),
        ("rounded_keys", "none"),
        ("rounded_keys", "refresh:3"),
    ],
)
def test_every_selection_is_the_reference_engines(llama: Path, tmp_path: Path, score: Any, policy: str) -> None:
    pattern = Pattern("DDSFFS", replace(SELECTION, score=score, steps=ReusePolicy.parse(policy)))
    asked, own, layers = prompts(300, 117, 64, 63, 5), reference(llama), (1, 3, 4)  # those that select
    file = write_pattern(pattern, llama, tmp_path / "pattern.yaml")
    variables = {"SGLANG_INDEXCACHE_PATTERN": file, "DSA_CPU_RECORD": str(tmp_path)}
    served, found = call(_selections, llama, asked, STEPS, TEST_ARGUMENTS='{"page_size": 16}', **variables)
    assert len(found) == len(layers) * (STEPS - 1)
    for row, sequence in enumerate(served):
        expected = reference_pages(own, pattern, sequence)
        for number, selection in enumerate(found):
            step, layer = divmod(number, len(layers))
            query = sequence.prompt + step
            kept = expected[layers[layer]][query, : query // 16 + 1].nonzero()[:, 0].tolist()
            assert selection[row] == kept, f"request {row}, step {step}, layer {layers[layer]}"


MIXED = Pattern("DFSSFS", replace(SELECTION, steps=ReusePolicy.parse("ema:0.7")))


@pytest.fixture(scope="module", params=["compressed_keys", "rounded_keys"])
def mixed(request: pytest.FixtureRequest) -> Pattern:
    assert MIXED.selection is not None
    return replace(MIXED, selection=replace(MIXED.selection, score=request.param))


@pytest.fixture(scope="module")
def server(llama: Path, mixed: Pattern, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two tensor-parallel ranks, chunks of prompts, a prefix cache, metrics."""
    folder = tmp_path_factory.mktemp("server")
    file = write_pattern(mixed, llama, folder / "pattern.yaml")
    flags = ("--indexcache-pattern", file, "--chunked-prefill-size", "64", "--tp-size", "2", "--enable-metrics")
    with running(llama, folder / "log", *flags, *FLAGS, SGLANG_CPU_OMP_THREADS_BIND="0|1") as started:
        yield started


def test_chunks_prefix_hits_and_aborts(server: Server, llama: Path, mixed: Pattern) -> None:
    """Each rank selects by its own heads; among requests that end early, whose slots and rows others take."""
    own, asked = reference(llama), prompts(300, 117, 90, 5, 64)

    def abort(number: int) -> None:
        body, kind = json.dumps({"rid": f"aborted-{number}"}).encode(), {"content-type": "application/json"}
        urlopen(Request(server.url + "/abort_request", body, kind), timeout=REQUEST_TIMEOUT).close()

    with ThreadPoolExecutor(4) as pool:
        lost = [pool.submit(server.generate, prompts(200 + number), [f"aborted-{number}"], 500) for number in (1, 2)]
        batch = server.generate(asked, [f"batch-{number}" for number in range(5)], steps=STEPS)
        list(pool.map(abort, (1, 2)))
        for request in lost:
            assert len(request.result()[0][0].ids) < 600
    for served, _ in batch:
        assert apart(own, mixed, served, 2).max() <= TOLERANCE
    longest = batch[0][0]
    assert apart(own, mixed, longest, 1).max() > 10 * TOLERANCE, "the ranks chose together"

    [(again, cached)] = server.generate(asked[:1], ["again"], steps=STEPS, inputs=False)
    assert cached >= 256 and again.ids == longest.ids
    assert apart(own, mixed, again, 2).max() <= TOLERANCE

    [(on, cached)] = server.generate([[*longest.ids, 7, 8]], ["on"], steps=STEPS, inputs=False)
    assert cached == (300 + STEPS - 1) // 16 * 16, "what was decoded was read again"
    position = torch.arange(len(on.ids) - 1)
    read = (position < 300) | ((position >= cached) & (position < on.prompt))
    assert apart(own, mixed, on, 2, read).max() <= TOLERANCE
    assert apart(own, mixed, on, 2).max() > 10 * TOLERANCE, "keys of decoded tokens are of what they attended to"

    branch = [*asked[0][:160], *prompts(99)[0]]
    [(other, cached)] = server.generate([branch], ["branch"], steps=STEPS, inputs=False)
    assert cached == 160 and apart(own, mixed, other, 2).max() <= TOLERANCE


def test_status_metrics_and_check(server: Server, llama: Path, mixed: Pattern, tmp_path: Path) -> None:
    [state] = states(server)
    assert state["pattern"] == mixed.roles and state["fingerprint"] == mixed.fingerprint
    assert mixed.selection is not None and state["selection"] == mixed.selection.as_dict()
    counts = {name: state[f"{name}_layers"] for name in ("full", "own", "shared")}
    assert counts == {"full": 1, "own": 2, "shared": 3} and state["proven_ranks"] == 2
    slots, dim = 4096 + 16, 16  # of a rank, which has one key head
    digest = slots // 16 * dim * 4 if mixed.selection.score == "compressed_keys" else slots * (dim // 2 + 4)
    assert state["kept_page_bytes"] > 2 * digest
    file = write_pattern(mixed, llama, tmp_path / "same.yaml")
    assert check_main([file, "--server", server.url, "--model", str(llama)]) == 0
    for number, other in enumerate((Pattern("DDSSFS", mixed.selection), replace(mixed, selection=SELECTION))):
        assert check_main([write_pattern(other, llama, tmp_path / f"{number}.yaml"), "--server", server.url]) == 1
    layers = metric(server.get("/metrics"), "sglang:indexcache_layers")
    found = {letter: value for labels, value in layers.items() for letter in "DFS" if f'role="{letter}"' in labels}
    assert found == {"D": 1, "F": 2, "S": 3}


def retractions(own: Any, pattern: Pattern, served: Served) -> list[int]:
    """At which lengths a sequence was read again: from there on it is that of a prompt of that length."""

    def explained(length: int) -> int:
        """The first token behind a prompt of this length that was not served as such."""
        wrong = apart(own, pattern, replace(served, prompt=length), 1)[length - len(served.ids) :] > TOLERANCE
        return length + int(wrong.nonzero()[0]) if wrong.any() else len(served.ids)

    found, begin = list[int](), served.prompt
    while (first := explained(begin)) < len(served.ids):
        ends = {length: explained(length) for length in range(begin + 1, first + 1)}
        begin = max(ends, key=lambda length: (ends[length], length))
        assert ends[begin] > first, f"token {first} is not explained"
        found.append(begin)
    return found


def generated(server: Server, asked: list[list[int]], steps: int) -> list[Served]:
    """Replies whose lengths the scheduler does not know beforehand, so that it lets more begin than can end."""
    answers = server.post(
        "/generate",
        input_ids=asked,
        sampling_params={"temperature": 0, "max_new_tokens": steps},
        return_logprob=True,
        logprob_start_len=-1,
    )
    logprobs = [tuple(entry[0] for entry in answer["meta_info"]["output_token_logprobs"]) for answer in answers]
    return [
        Served((*ids, *answer["output_ids"]), len(ids), found)
        for ids, answer, found in zip(asked, answers, logprobs, strict=True)
    ]


@pytest.mark.parametrize(("score", "steps"), [(ROUNDED_KEYS, "none"), (COMPRESSED_KEYS, "refresh:5")])
def test_retraction_reads_all_again(llama: Path, tmp_path: Path, score: Score, steps: str) -> None:
    """What was decoded before is read densely, memory begins anew, and slots come from other requests."""
    pattern = Pattern("DSFFDS", replace(SELECTION, score=score, steps=ReusePolicy.parse(steps)))
    file, own = write_pattern(pattern, llama, tmp_path / "pattern.yaml"), reference(llama)
    room = ("--max-total-tokens", "480", "--schedule-conservativeness", "0.01")  # all begin, and not all can end
    with running(llama, tmp_path / "log", "--indexcache-pattern", file, *FLAGS, *room) as server:
        batch = generated(server, prompts(150, 117, 90), 60)
    found = [retractions(own, pattern, served) for served in batch]
    assert sum(map(len, found)) >= 1 and min(map(len, found)) == 0, found
    assert [len(served.logprobs) for served in batch] == [60] * 3
