"""A SGLang server in calibration mode, over HTTP; its answers are checked before anything is made of them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NoReturn, TypeVar

from pydantic import BaseModel, Field, TypeAdapter

from indexcache_search.errors import SearchError
from sglang_indexcache import Pattern, protocol
from sglang_indexcache.fields import Finite
from sglang_indexcache.http_client import KEY_VARIABLE, NoAnswerError, ServerError, StatusError, ask, shown
from sglang_indexcache.protocol import Range

CONTROL_SECONDS = 300.0  # a switch is quick; a baseline is announced in megabytes
REQUEST_SECONDS = 3600.0  # one sequence of hundreds of thousands of tokens on a busy machine
BUSY_SECONDS = 120
ROUNDING = 1e-3  # nats by which a sum that can't be negative may be
_BYTES, _BYTES_A_TOKEN = 4 << 20, 1 << 10  # of an answer

_Number = Finite | None  # JSON has null where a number is not finite
_Answer = TypeVar("_Answer")


class Rank(BaseModel):
    """What one data-parallel rank answers to a control request: what it runs, and what it was asked for.

    Attributes:
        weights_sha256: digest of the checkpoint that it has loaded.
        missing: sequences whose baseline is still to be run.
        sums: sum, sum of squares and count of the divergence, by request.
        misses: tokens that buffers would miss, by layer that chooses and by their sizes.
    """

    dp_rank: Annotated[int, Field(ge=0)]
    pattern: str
    fingerprint: str
    config_sha256: str
    weights_sha256: str
    versions: dict[str, str]
    measures: list[str]
    process: int = 0
    missing: list[Annotated[int, Field(ge=0)]] = []
    sums: dict[str, tuple[_Number, _Number, Annotated[int, Field(gt=0)]]] = {}
    overlap: list[list[Finite]] = []
    queries: Annotated[int, Field(ge=0)] = 0
    misses: dict[Annotated[int, Field(ge=0)], list[Annotated[int, Field(ge=0)]]] = {}


class _Ranks(BaseModel):
    ranks: list[Rank]


class _Meta(BaseModel):
    input_token_logprobs: list[tuple[_Number, int, Any]]
    input_top_logprobs: list[list[tuple[_Number, int, Any]] | None]


class _Generated(BaseModel):
    meta_info: _Meta


_RANKS: TypeAdapter[_Ranks] = TypeAdapter(_Ranks)
_GENERATED: TypeAdapter[list[_Generated]] = TypeAdapter(list[_Generated])


class ServerLostError(Exception):
    """A server that went away or broke; it may come back."""


class ServerBusyError(Exception):
    """A server that has other requests running."""


class CalibrationServer:
    """Switches patterns and asks for losses.

    Args:
        url: such as `http://host:30000`.
        dp_rank: the data-parallel rank to work with; by default the server as a whole.
        key: the admin key; by default what `SGLANG_API_KEY` holds.
    """

    def __init__(self, url: str, dp_rank: int | None = None, key: str | None = None) -> None:
        self.address, self.url, self.dp_rank, self._key = url.rstrip("/"), shown(url), dp_rank, key

    def status(self) -> Rank:
        """What runs there: pattern, fingerprint, versions, what can be measured, digests of the model.

        Raises:
            ServerLostError: if it does not answer.
            SearchError: if it is no calibration server, or refuses the key.
        """
        return self._control(protocol.STATUS)[0]

    def lanes(self) -> list[CalibrationServer]:
        """The server's data-parallel ranks, each of which can run a pattern of its own.

        Raises:
            ServerLostError, SearchError: as `status`.
        """
        ranks = sorted(rank.dp_rank for rank in self._control(protocol.STATUS))
        return [self] if len(ranks) == 1 else [CalibrationServer(self.address, rank, self._key) for rank in ranks]

    def switch(self, pattern: Pattern) -> None:
        """Make all ranks run `pattern`; waits while requests are running.

        Raises:
            ServerLostError: if it does not answer, or stays busy.
            SearchError: if it refuses the pattern, or a rank runs another one afterwards.
        """
        deadline, pause = time.monotonic() + BUSY_SECONDS, 0.02
        while True:
            try:
                ranks = self._control(protocol.SWITCH, pattern=pattern.roles)
                break
            except ServerBusyError as error:
                if time.monotonic() > deadline:
                    raise ServerLostError(str(error)) from None
            time.sleep(pause)
            pause = min(2 * pause, 1.0)
        for rank in ranks:
            if rank.fingerprint != pattern.fingerprint:
                raise SearchError(f"{self.url}: rank {rank.dp_rank} runs {rank.pattern}, expected {pattern}")

    def logprobs(
        self, sequences: Sequence[Sequence[int]], start: int, ids: Sequence[str] | None = None
    ) -> list[list[tuple[float, bool]]]:
        """Logprob of each token from `start` on, and whether it is the likeliest.

        Args:
            sequences: token ids of each.
            start: at least 1.
            ids: request ids, where something is measured on them.

        Raises:
            ServerLostError: if the server goes away.
            SearchError: if it refuses the sequences.
        """
        body: dict[str, Any] = {
            "input_ids": [list(tokens) for tokens in sequences],
            "sampling_params": {"temperature": 0, "max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": start - 1,  # the first one comes without a logprob
            "top_logprobs_num": 1,
        }
        if ids is not None:
            body["rid"] = list(ids)
        if self.dp_rank is not None:
            body["routed_dp_rank"] = self.dp_rank
        tokens = sum(map(len, sequences))
        answers = self._ask("/generate", body, _GENERATED, REQUEST_SECONDS, _BYTES + tokens * _BYTES_A_TOKEN)
        if len(answers) != len(sequences):
            raise SearchError(f"{self.url}: /generate gave {len(answers)} answers to {len(sequences)} sequences")
        return [self._pairs(item.meta_info, prompt[start:]) for item, prompt in zip(answers, sequences, strict=True)]

    def _pairs(self, meta: _Meta, prompt: Sequence[int]) -> list[tuple[float, bool]]:
        """Logprob, NaN for null, and whether it is the likeliest, of each token of `prompt`; the first has none."""
        own, best = meta.input_token_logprobs[1:], meta.input_top_logprobs[1:]
        if not _same_tokens([token for _, token, _ in own], prompt) or len(best) != len(own) or not all(best):
            raise SearchError(f"{self.url}: /generate answers without input logprobs of the tokens that were sent")
        if any(value is not None and value > ROUNDING for value, _, _ in own):
            raise SearchError(f"{self.url}: /generate answers with a logprob above 0")
        return [(_number(value), token == top[0][1]) for (value, token, _), top in zip(own, best, strict=True) if top]

    def missing_baselines(self, data: str, ranges: Sequence[Range]) -> list[int]:
        """Announce a data set whose divergence will be measured.

        Args:
            data: its digest.
            ranges: for each sequence, the positions whose next token is scored, the last one excluded.

        Returns:
            Numbers of the sequences whose baseline is still to be run.

        Raises:
            ServerLostError: if the server goes away.
            SearchError: if it has too little memory for them, or can't measure this.
        """
        ranks = self._control(protocol.BASELINE, data=data, ranges=ranges)
        missing = sorted({number for rank in ranks for number in rank.missing})
        if missing and missing[-1] >= len(ranges):
            raise SearchError(f"{self.url}: lacks sequence {missing[-1]} of {len(ranges)}")
        return missing

    def divergences(self, requests: Mapping[str, Sequence[Range]]) -> dict[str, tuple[float, float, int]]:
        """Sum, sum of squares and count of the divergence over ranges of positions, for requests by id.

        Raises:
            ServerLostError: if the server goes away.
            SearchError: if it was not measured there.
        """
        sums = self._control(protocol.KL, requests=requests)[0].sums
        for rid, ranges in requests.items():
            expected = sum(last - first for first, last in ranges)
            total, _, count = sums.get(rid, (None, None, 0))
            if count != expected or (total is not None and total < -ROUNDING):
                raise SearchError(f"{self.url}: gave a divergence of {total} over {count} tokens, expected {expected}")
        return {rid: (_number(total), _number(squares), count) for rid, (total, squares, count) in sums.items()}

    def sample_indices(self, positions: Sequence[int]) -> None:
        """Begin to sample the queries at `positions` of requests that ask for it.

        Raises:
            ServerLostError: if the server goes away.
            SearchError: if it can't.
        """
        self._control(protocol.SAMPLE, positions=[int(position) for position in positions])

    def index_overlap(self) -> tuple[list[list[float]], int]:
        """End sampling; the mean overlap of layers i and j, and how many queries were sampled.

        Raises:
            ServerLostError: if the server goes away.
            SearchError: if nothing was sampled there.
        """
        answer = self._control(protocol.OVERLAP)[0]
        if not answer.overlap or {len(row) for row in answer.overlap} != {len(answer.overlap)}:
            raise SearchError(f"{self.url}: gave no overlap of all layers")
        return answer.overlap, answer.queries

    def record_selections(self, first: int, tokens: int) -> None:
        """Begin to record what queries select from position `first` on, of a request of `tokens` that asks for it.

        Raises:
            ServerLostError: if the server goes away.
            SearchError: if it can't.
        """
        self._control(protocol.RECORD, first=first, tokens=tokens)

    def misses(self, layers: Sequence[int], sizes: Sequence[int]) -> dict[int, list[int]]:
        """End recording: the tokens that SGLang's HiSparse would bring, by layer, with buffers of `sizes` tokens.

        Args:
            layers: those that choose.
            sizes: in tokens.

        Raises:
            ServerLostError: if the server goes away.
            SearchError: if it recorded something else.
        """
        found = self._control(protocol.MISSES, sizes=list(sizes))[0].misses
        if sorted(found) != sorted(layers) or any(len(counts) != len(sizes) for counts in found.values()):
            raise SearchError(f"{self.url}: counted layers {sorted(found)}, expected {sorted(layers)}")
        return found

    def _control(self, action: str, **body: Any) -> list[Rank]:
        """The answers of all ranks that `action` was meant for."""
        path, content = protocol.path(action), {**body, "dp_rank": self.dp_rank}
        ranks = [
            rank
            for rank in self._ask(path, content, _RANKS, CONTROL_SECONDS, 16 * _BYTES).ranks
            if self.dp_rank in (None, rank.dp_rank)
        ]
        if not ranks:
            raise SearchError(f"{self.url}: has no data-parallel rank {self.dp_rank}")
        return ranks

    def _ask(
        self, path: str, body: dict[str, Any], form: TypeAdapter[_Answer], seconds: float, max_bytes: int
    ) -> _Answer:
        try:
            return ask(self.address, path, form, body, seconds=seconds, max_bytes=max_bytes, key=self._key)
        except NoAnswerError as error:
            raise ServerLostError(str(error)) from None
        except StatusError as error:
            self._refuse(error, path)
        except ServerError as error:
            raise SearchError(f"{error}; expected a server with this version of sglang-indexcache") from None

    def _refuse(self, error: StatusError, path: str) -> NoReturn:
        if error.code == protocol.CONFLICT and path.startswith(protocol.path("")):
            raise ServerBusyError(f"{self.url}: {error.detail}") from None
        if error.code in (401, 403):
            raise SearchError(f"{self.url}: refuses the key; expected the admin key in {KEY_VARIABLE}") from None
        if error.code == 404 and path.startswith(protocol.path("")):
            raise SearchError(f"{self.url}: is not in calibration mode; expected --indexcache-calibrate") from None
        if error.code >= 500:
            raise ServerLostError(f"{self.url}: answers {error.code}") from None
        raise SearchError(f"{error}: {error.detail}") from None


def _number(value: float | None) -> float:
    """JSON has null where a number is not finite."""
    return math.nan if value is None else value


def _same_tokens(answered: Sequence[int], sent: Sequence[int]) -> bool:
    """Whether the answer is about the tokens that were sent: SGLang 0.5.23 calls the vocabulary's last one 0."""
    last = max(sent, default=0)
    return len(answered) == len(sent) and all(
        one == other or (one == 0 and other == last) for one, other in zip(answered, sent, strict=True)
    )
