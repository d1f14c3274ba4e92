"""The same prompts alone and in a batch, in one process: what a query selects must not depend on who shares its batch.

Rounding does: sums are added up in another order where matrices have other shapes, and what is all but equal changes
places. Such a call changes all that comes after it. So the batch is made to follow what each prompt chose alone (its
selections, experts and tokens) once its own choice was noted, and each choice that differs is judged where it happened.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sglang_indexcache.families.dsa.blocks.selection import plan_for

Key = tuple[str, int, int]  # request, layer, position


@dataclass(frozen=True)
class Selected:
    """What a query of a prompt or of what is written selects.

    Attributes:
        chosen: the row as it was given, -1 for none.
        scores: of the tokens that it chose from.
        block: where its block begins, whose tokens are not chosen; `None` if it selects for itself.
    """

    chosen: Tensor
    scores: Tensor
    block: int | None

    def tokens(self) -> frozenset[int]:
        return frozenset(self.chosen[self.chosen >= 0].tolist())

    def gap(self, other: Selected) -> float:
        """How far the scores of the tokens in dispute are from the last chosen one's, of the highest; inf: no call."""
        if other.block != self.block:
            return float("inf")
        mine = [token for token in self.tokens() if self.block is None or token < self.block]
        disputed = sorted(self.tokens() ^ other.tokens())
        if not mine or disputed[-1] >= len(self.scores):
            return float("inf")
        return (self.scores[disputed] - self.scores[mine].min()).abs().max().item() / self.scale()

    def scale(self) -> float:
        return self.scores.abs().max().item()


@dataclass(frozen=True)
class Difference:
    """A selection that is not the one of the same prompt alone."""

    request: str
    layer: int
    position: int
    block: int | None
    gap: float


@dataclass
class Watch:
    """Sees what indexers and routers choose; with `alone`, compares it with that, and with `follow` puts that there.

    Attributes:
        compared: selections that had something to choose.
        drift: how far any score is from the one alone, of the row's highest.
        experts: how far from each other the logits of a router were that chose other experts.
    """

    alone: Watch | None = None
    follow: bool = False
    selected: dict[Key, Selected] = field(default_factory=dict)
    routed: dict[Key, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)
    differing: list[Difference] = field(default_factory=list)
    compared: int = 0
    drift: float = 0.0
    experts: list[float] = field(default_factory=list)
    _scores: list[Tensor] = field(default_factory=list)
    _rows: list[tuple[str, int]] = field(default_factory=list)

    def score(self, given: Tensor) -> Tensor:
        self._scores.append(given.clone())
        return given

    def record(self, layer: int, forward_batch: Any, positions: Tensor, selected: Tensor | None) -> None:
        """In the place of the recorder; each pass of an indexer ends here."""
        extend = forward_batch.forward_mode.is_extend()
        lengths = forward_batch.extend_seq_lens_cpu if extend else [1] * forward_batch.batch_size
        requests = [number for number, length in enumerate(lengths) for _ in range(length)]
        self._rows = [
            (forward_batch.rids[at], int(position)) for at, position in zip(requests, positions, strict=False)
        ]
        scores, self._scores = self._scores, []
        if selected is None:
            return
        ends = forward_batch.seq_lens_cpu.cumsum(0)
        starts = (ends - forward_batch.seq_lens_cpu).tolist() if extend else [0] * len(lengths)
        places = _places(forward_batch, layer, scores, len(requests))
        for row, (request, (rid, position)) in enumerate(zip(requests, self._rows, strict=True)):
            number, place, block = places[row]
            begin, seen = starts[request], position + 1 if block is None else block
            own = Selected(selected[row].clone(), scores[number][place, begin : begin + seen], block)
            key = (rid, layer, position)
            self.selected[key] = own
            if self.alone is not None:
                self._compare(key, own, self.alone.selected[key])
                if self.follow:
                    selected[row] = self.alone.selected[key].chosen

    def _compare(self, key: Key, own: Selected, known: Selected) -> None:
        if own.tokens() != known.tokens():
            self.differing.append(Difference(*key, known.block, known.gap(own)))
        if key[2] < len(own.chosen):
            return
        self.compared += 1
        if own.block == known.block:
            self.drift = max(self.drift, (own.scores - known.scores).abs().max().item() / known.scale())

    def route(self, layer: int, logits: Tensor, chosen: Any) -> None:
        """Of a layer with experts; its indexer came before, or that of a layer below."""
        for row, (rid, position) in enumerate(self._rows):
            key = (rid, layer, position)
            self.routed[key] = logits[row].clone(), chosen.topk_ids[row].clone(), chosen.topk_weights[row].clone()
            if self.alone is None:
                continue
            theirs, ids, weights = self.alone.routed[key]
            if set(ids.tolist()) != set(chosen.topk_ids[row].tolist()):
                self.experts.append((theirs - logits[row]).abs().max().item())
            if self.follow:
                chosen.topk_ids[row], chosen.topk_weights[row] = ids, weights


def _places(forward_batch: Any, layer: int, scores: Sequence[Tensor], rows: int) -> list[tuple[int, int, int | None]]:
    """For each row of a pass which scores are its own, the row there, and where its block begins."""
    if not forward_batch.forward_mode.is_extend():
        return [(row, 0, None) for row in range(rows)]
    plan = plan_for(forward_batch, layer)
    if plan is None:
        return [(0, row, None) for row in range(rows)]
    places: list[Any] = [None] * rows
    columns = (plan.first.tolist(), plan.sizes.tolist(), plan.begins.tolist())
    for at, (first, size, begin) in enumerate(zip(*columns, strict=True)):
        places[first : first + size] = [(0, at, begin if size > 1 else None)] * size
    return places


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """All that indexers and routers choose goes through `watch`."""
    from sglang.srt.layers.moe import topk

    from dsa_cpu_platform import indexer

    scores, route, record = indexer._scores, topk.select_experts, indexer.recorder.record

    def routed(**given: Any) -> Any:
        chosen = route(**given)
        watch.route(given["layer_id"], given["router_logits"], chosen)
        return chosen

    indexer._scores = lambda *given: watch.score(scores(*given))
    topk.select_experts, indexer.recorder.record = routed, watch.record
    try:
        yield
    finally:
        indexer._scores, topk.select_experts, indexer.recorder.record = scores, route, record


@dataclass(frozen=True)
class Written:
    """What was written, and the logits that it was chosen by, `[requests, steps, vocabulary]`."""

    ids: list[list[int]]
    logits: Tensor


def run(
    runner: Any,
    watch: Watch,
    prompts: Mapping[str, Sequence[int]],
    splits: Mapping[str, int],
    steps: int,
    follow: Mapping[str, Sequence[int]] | None = None,
) -> Written:
    """Prefill all prompts in one pass, those with a split in two, and write `steps` tokens.

    Args:
        splits: where a prompt's first chunk ends.
        follow: what to write; else what is likeliest.
    """
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.sampling.sampling_params import SamplingParams

    from scripts.tools.inprocess import new_batch

    runner.req_to_token_pool.clear()
    runner.token_to_kv_pool_allocator.clear()
    requests = {}
    for name, ids in prompts.items():
        sampling = SamplingParams(temperature=0, max_new_tokens=steps)
        request = Req(rid=name, origin_input_text="", origin_input_ids=array("q", ids), sampling_params=sampling)
        request.full_untruncated_fill_ids = request.origin_input_ids
        request.logprob_start_len = -1
        requests[name] = request

    def forward(batch: Any) -> Tensor:
        forward_batch = ForwardBatch.init_new(batch, runner, return_hidden_states_before_norm=False)
        return runner.forward(forward_batch).logits_output.next_token_logits.float()

    with torch.no_grad(), watching(watch):
        first = [name for name in prompts if name in splits]
        if first:
            for name in first:
                requests[name].extend_end = splits[name]
            forward(new_batch(runner, [requests[name] for name in first]))
            for name in first:
                requests[name].prefix_len = splits[name]
        for name, ids in prompts.items():
            requests[name].extend_end = len(ids)
        batch = new_batch(runner, list(requests.values()))
        logits = [forward(batch)]
        written: list[list[int]] = [[] for _ in prompts]
        for step in range(steps):
            likeliest = logits[-1].argmax(-1).tolist()
            chosen = likeliest if follow is None else [follow[name][step] for name in prompts]
            for row, token in enumerate(chosen):
                written[row].append(token)
            if step + 1 < steps:
                batch.input_ids = torch.tensor(chosen)
                batch.prepare_for_decode()
                logits.append(forward(batch))
    return Written(written, torch.stack(logits, dim=1))


@dataclass(frozen=True)
class Comparison:
    """What differs between prompts alone and in a batch that follows them.

    Attributes:
        selections: compared, of those that had something to choose; `in_blocks` of them shared a leader.
        differing: of all.
        drift: how far any score is from the one alone, of the row's highest.
        experts: how far apart the logits of routers are, where other experts were chosen.
        flipped: of each token that would not have been written, how much likelier (in logits) alone's own was, alone.
    """

    selections: int
    in_blocks: int
    differing: list[Difference]
    drift: float
    experts: list[float]
    flipped: list[float]


def compare(runner: Any, prompts: Mapping[str, Sequence[int]], splits: Mapping[str, int], steps: int) -> Comparison:
    """Each prompt alone, then all in one batch that follows."""
    alone = Watch()
    apart = {
        name: run(runner, alone, {name: ids}, {at: split for at, split in splits.items() if at == name}, steps)
        for name, ids in prompts.items()
    }
    together = Watch(alone, follow=True)
    written = {name: own.ids[0] for name, own in apart.items()}
    logits = run(runner, together, prompts, splits, steps, written).logits
    flipped = [
        (own.max() - own[token]).item()
        for row, name in enumerate(prompts)
        for own, token in zip(apart[name].logits[0], logits[row].argmax(-1).tolist(), strict=True)
        if own.argmax().item() != token
    ]
    in_blocks = sum(own.block is not None for own in together.selected.values())
    return Comparison(together.compared, in_blocks, together.differing, together.drift, together.experts, flipped)
