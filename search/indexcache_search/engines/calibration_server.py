"""Client of an SGLang server in calibration mode, over HTTP, which checks every answer."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from pydantic import TypeAdapter

from indexcache_search.engines.answers import GENERATED, RANKS, Rank, check_divergence, token_logprobs
from indexcache_search.errors import SearchError
from indexcache_search.speed.request import Burst, send
from sglang_indexcache import Pattern
from sglang_indexcache.calibration import protocol
from sglang_indexcache.calibration.protocol import Range
from sglang_indexcache.http.address import Address
from sglang_indexcache.http.client import NoAnswerError, ServerError, StatusError, ask
from sglang_indexcache.http.redaction import KEY_VARIABLE

STATUS_SECONDS = 30.0
CONTROL_SECONDS = 300.0  # a switch is quick; announcing a baseline takes megabytes
REQUEST_SECONDS = 3600.0  # one sequence of hundreds of thousands of tokens on a busy machine
BUSY_SECONDS = 120
_ROUNDING = 1e-6  # tolerance for means of counts
_BYTES, _BYTES_A_TOKEN = 4 << 20, 1 << 10  # limits of an answer

_Answer = TypeVar("_Answer")


class ServerLostError(Exception):
    """Failure of a server that went away or broke, and may come back."""


class ServerBusyError(ServerLostError):
    """Refusal by a server that still runs other requests."""


class CalibrationServer:
    """Client that switches patterns and requests losses.

    All methods raise a `ServerLostError` if the server does not answer, and a `SearchError` if it is not a calibration
    server, refuses the key or the request, or answers something that can't be.

    Args:
        url: such as `http://host:30000`.
        dp_rank: the data-parallel rank to work with; by default the server as a whole.
        key: the admin key; by default the value of `SGLANG_API_KEY`.

    Attributes:
        url: the address without secrets, for messages.
    """

    def __init__(self, url: str | Address, dp_rank: int | None = None, key: str | None = None) -> None:
        self.address, self.dp_rank, self._key = Address.of(url), dp_rank, key
        self.url = self.address.label

    def status(self) -> Rank:
        """Return the server's pattern, fingerprint, versions, supported measurements and model digests."""
        return self._control(protocol.STATUS)[0]

    def lanes(self) -> list[CalibrationServer]:
        """Return a client for each data-parallel rank, each of which can run its own pattern."""
        ranks = sorted(rank.dp_rank for rank in self._control(protocol.STATUS))
        return [self] if len(ranks) == 1 else [CalibrationServer(self.address, rank, self._key) for rank in ranks]

    def switch(self, pattern: Pattern) -> None:
        """Switch all ranks to `pattern`; wait while requests are running, but not for long."""
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
        """Return the logprob of each token from `start` on, and true if it is the likeliest.

        Args:
            sequences: token ids of each.
            start: at least 1.
            ids: request ids, if the server is to measure something on them.
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
        answers = self._ask("/generate", body, GENERATED, REQUEST_SECONDS, _BYTES + tokens * _BYTES_A_TOKEN)
        if len(answers) != len(sequences):
            raise SearchError(f"{self.url}: /generate gave {len(answers)} answers to {len(sequences)} sequences")
        try:
            return [token_logprobs(item, prompt[start:]) for item, prompt in zip(answers, sequences, strict=True)]
        except ValueError as error:
            raise SearchError(f"{self.url}: /generate answers {error}") from None

    def time(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> Burst:
        """Time plain prompts, on which nothing is measured; see `speed.request.send`."""
        try:
            return send(self.address, prompts, output_tokens, key=self._key, dp_rank=self.dp_rank)
        except NoAnswerError as error:
            raise ServerLostError(str(error)) from None

    def missing_baselines(self, data: str, ranges: Sequence[Range]) -> list[int]:
        """Announce a data set for measuring divergences; return the sequences without a baseline.

        Args:
            data: digest of the data set.
            ranges: for each sequence, the positions whose next token is scored, the last one excluded.
        """
        ranks = self._control(protocol.BASELINE, data=data, ranges=ranges)
        missing = sorted({number for rank in ranks for number in rank.missing})
        if missing and missing[-1] >= len(ranges):
            raise SearchError(f"{self.url}: lacks sequence {missing[-1]} of {len(ranges)}")
        return missing

    def divergences(self, requests: Mapping[str, Sequence[Range]]) -> dict[str, tuple[float, float, int]]:
        """Return sum, sum of squares and count of each request's divergence over ranges of positions."""
        sums = self._control(protocol.KL, requests=requests)[0].sums
        if set(sums) != set(requests):
            raise SearchError(
                f"{self.url}: gave divergences of {len(sums)} requests, expected those of {len(requests)}"
            )
        try:
            for rid, ranges in requests.items():
                check_divergence(*sums[rid], expected=sum(last - first for first, last in ranges))
        except ValueError as error:
            raise SearchError(f"{self.url}: gave {error}") from None
        return sums

    def sample_indices(self, positions: Sequence[int]) -> None:
        """Start sampling the queries at `positions` of requests marked for it."""
        self._control(protocol.SAMPLE, positions=[int(position) for position in positions])

    def index_overlap(self, layers: int) -> tuple[list[list[float]], int]:
        """Stop sampling; return the mean overlap of each two of `layers` layers, and the number of sampled queries."""
        answer = self._control(protocol.OVERLAP)[0]
        if len(answer.overlap) != layers or {len(row) for row in answer.overlap} != {layers}:
            raise SearchError(f"{self.url}: gave no overlap of all {layers} layers")
        found = np.asarray(answer.overlap)
        beyond = max(-found.min(), found.max() - 1.0, np.abs(found - found.T).max(), np.abs(found.diagonal() - 1).max())
        if beyond > _ROUNDING:
            raise SearchError(
                f"{self.url}: gave an overlap that is none: expected 0 to 1, symmetric, 1 of a layer's own"
            )
        return answer.overlap, answer.queries

    def record_selections(self, first: int, tokens: int) -> None:
        """Start recording selections from position `first` on, in a marked request of `tokens` tokens."""
        self._control(protocol.RECORD, first=first, tokens=tokens)

    def misses(self, layers: Sequence[int], sizes: Sequence[int], most: int) -> dict[int, list[int]]:
        """Stop recording; return the tokens that SGLang's HiSparse would load, by layer and buffer size.

        Args:
            layers: the selecting layers.
            sizes: buffer sizes in tokens.
            most: tokens that a layer selects in all steps, an upper bound of misses.
        """
        found = self._control(protocol.MISSES, sizes=list(sizes))[0].misses
        if sorted(found) != sorted(layers) or any(len(counts) != len(sizes) for counts in found.values()):
            raise SearchError(f"{self.url}: counted layers {sorted(found)}, expected {sorted(layers)}")
        worst = max((count for counts in found.values() for count in counts), default=0)
        if worst > most:
            raise SearchError(f"{self.url}: counted {worst} misses of a layer, which selects {most} tokens in all")
        return found

    def _control(self, action: str, **body: Any) -> list[Rank]:
        """Send `action`; return the answers of all ranks it addresses."""
        path, content = protocol.path(action), {**body, "dp_rank": self.dp_rank}
        seconds = STATUS_SECONDS if action == protocol.STATUS else CONTROL_SECONDS
        ranks = self._ask(path, content, RANKS, seconds, 16 * _BYTES).ranks
        meant = [rank for rank in ranks if self.dp_rank in (None, rank.dp_rank)]
        if not meant:
            raise SearchError(f"{self.url}: has no data-parallel rank {self.dp_rank}")
        return meant

    def _ask(
        self, path: str, body: dict[str, Any], form: TypeAdapter[_Answer], seconds: float, max_bytes: int
    ) -> _Answer:
        try:
            return ask(self.address, path, form, body, seconds=seconds, max_bytes=max_bytes, key=self._key)
        except NoAnswerError as error:
            raise ServerLostError(str(error)) from None
        except StatusError as error:
            control = path.startswith(protocol.path(""))
            if error.code == protocol.CONFLICT and control:
                raise ServerBusyError(f"{self.url}: {error.detail}") from None
            if error.code in (401, 403):
                raise SearchError(f"{self.url}: refuses the key; expected the admin key in {KEY_VARIABLE}") from None
            if error.code == 404 and control:
                raise SearchError(f"{self.url}: is not in calibration mode; expected --indexcache-calibrate") from None
            if error.code >= 500:
                raise ServerLostError(f"{self.url}: answers {error.code}") from None
            raise SearchError(f"{error}: {error.detail}") from None
        except ServerError as error:
            raise SearchError(f"{error}; expected a server with this version of sglang-indexcache") from None
