"""Client of an SGLang server in calibration mode, over HTTP, which checks every answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from indexcache_search.engines.answers import GENERATED, OneRank, Rank, check_divergence, ranks_of, token_logprobs
from indexcache_search.engines.control_requests import Control, LeaseEndedError, ServerBusyError, ServerLostError
from indexcache_search.engines.lease import HeldLease
from indexcache_search.errors import SearchError
from sglang_indexcache import Pattern
from sglang_indexcache.calibration import protocol
from sglang_indexcache.calibration.protocol import Range
from sglang_indexcache.http.address import Address

__all__ = ["CalibrationServer", "ServerBusyError", "ServerLostError"]
STATUS_SECONDS = 30.0
CONTROL_SECONDS = 300.0  # a switch is quick; announcing a baseline takes megabytes
REQUEST_SECONDS = 3600.0  # one sequence of hundreds of thousands of tokens on a busy machine
BUSY_SECONDS = 120
_ROUNDING = 1e-6  # tolerance for means of counts
_BYTES, _BYTES_A_TOKEN = 4 << 20, 1 << 10  # limits of an answer


class CalibrationServer:
    """Client that switches patterns and requests losses.

    It takes the server's lease before it switches or measures anything, and holds it until `release`. All methods raise
    a `ServerLostError` if the server does not answer, and a `SearchError` if it is not a calibration server, another
    client holds its lease, it refuses the key or the request, or it answers something that can't be.

    Args:
        url: such as `http://host:30000`.
        dp_rank: the data-parallel rank to work with; by default the server as a whole.
        key: the admin key; by default the value of `SGLANG_API_KEY`.
        lease: of this server; by default one of its own.

    Attributes:
        url: the address without secrets, for messages.
    """

    def __init__(
        self, url: str | Address, dp_rank: int | None = None, key: str | None = None, lease: HeldLease | None = None
    ) -> None:
        self.address, self.dp_rank, self.key = Address.of(url), dp_rank, key
        self.url, self._server = self.address.label, Control(self.address, key)
        self._lease = lease or HeldLease(self._server)
        self._switched: dict[int, Rank] = {}  # what this client's last switch left, by data-parallel rank

    def hold(self, notice: Callable[[str], None] = lambda line: None) -> None:
        """Take the server's lease, unless it is held; see `HeldLease.hold`."""
        if not self._lease.held:
            self.status()  # refuses another version of the protocol
            self._lease.hold(notice)

    def release(self) -> None:
        """Give the lease back; afterwards this client, and its `lanes`, can only ask for the status."""
        self._lease.release()

    def status(self) -> Rank:
        """Return the server's pattern, fingerprint, versions, supported measurements and model digests."""
        return self.control(protocol.STATUS, Rank)[0]

    def lanes(self) -> list[CalibrationServer]:
        """Return a client for each data-parallel rank, each of which can run its own pattern."""
        ranks = sorted(rank.dp_rank for rank in self.control(protocol.STATUS, Rank))
        if len(ranks) == 1:
            return [self]
        return [CalibrationServer(self.address, rank, self.key, self._lease) for rank in ranks]

    def undisturbed(self) -> Rank:
        """Return the status, if all that was answered since the last `switch` is of its pattern.

        Raises:
            ServerLostError, SearchError: as `check_undisturbed`.
        """
        ranks = self.control(protocol.STATUS, Rank)
        self.check_undisturbed(ranks)
        return ranks[0]

    def switch(self, pattern: Pattern) -> None:
        """Switch all ranks to `pattern`; wait while requests are running, but not for long."""
        deadline, pause = time.monotonic() + BUSY_SECONDS, 0.02
        while True:
            try:
                ranks = self.control(protocol.SWITCH, Rank, pattern=pattern.roles)
                break
            except ServerBusyError as error:
                if time.monotonic() > deadline:
                    raise ServerLostError(str(error)) from None
            time.sleep(pause)
            pause = min(2 * pause, 1.0)
        for rank in ranks:
            if rank.fingerprint != pattern.fingerprint:
                raise SearchError(f"{self.url}: rank {rank.dp_rank} runs {rank.pattern}, expected {pattern}")
        self._switched = {rank.dp_rank: rank for rank in ranks}

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
        limit = _BYTES + tokens * _BYTES_A_TOKEN
        answers = self._server.ask("/generate", body, GENERATED, REQUEST_SECONDS, limit)
        if len(answers) != len(sequences):
            raise SearchError(f"{self.url}: /generate gave {len(answers)} answers to {len(sequences)} sequences")
        try:
            return [token_logprobs(item, prompt[start:]) for item, prompt in zip(answers, sequences, strict=True)]
        except ValueError as error:
            raise SearchError(f"{self.url}: /generate answers {error}") from None

    def missing_baselines(self, data: str, ranges: Sequence[Range]) -> list[int]:
        """Announce a data set, by its digest, for measuring divergences; return the sequences without a baseline.

        `ranges` are for each sequence the positions whose next token is scored, the last one excluded.
        """
        ranks = self.control(protocol.BASELINE, Rank, data=data, ranges=ranges)
        missing = sorted({number for rank in ranks for number in rank.missing})
        if missing and missing[-1] >= len(ranges):
            raise SearchError(f"{self.url}: lacks sequence {missing[-1]} of {len(ranges)}")
        return missing

    def divergences(self, requests: Mapping[str, Sequence[Range]]) -> dict[str, tuple[float, float, int]]:
        """Return sum, sum of squares and count of each request's divergence over ranges of positions."""
        sums = self.control(protocol.KL, Rank, requests=requests)[0].sums
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
        self.control(protocol.SAMPLE, Rank, positions=[int(position) for position in positions])

    def index_overlap(self, layers: int) -> tuple[list[list[float]], int]:
        """Stop sampling; return the mean overlap of each two of `layers` layers, and the number of sampled queries."""
        ranks = self.control(protocol.OVERLAP, Rank)
        self.check_undisturbed(ranks)
        answer = ranks[0]
        if len(answer.overlap) != layers or {len(row) for row in answer.overlap} != {layers}:
            raise SearchError(f"{self.url}: gave no overlap of all {layers} layers")
        found = np.asarray(answer.overlap)
        beyond = max(-found.min(), found.max() - 1.0, np.abs(found - found.T).max(), np.abs(found.diagonal() - 1).max())
        if beyond > _ROUNDING:
            raise SearchError(
                f"{self.url}: gave an overlap that is none: expected 0 to 1, symmetric, 1 of a layer's own"
            )
        return answer.overlap, answer.queries

    def control(self, action: str, kind: type[OneRank], **body: Any) -> list[OneRank]:
        """Send a control request, such as one of a `calibration.measure.Measure`; return what all ranks answer."""
        content: dict[str, Any] = {**body, "dp_rank": self.dp_rank}
        if action != protocol.STATUS:
            self.hold()
            content |= {"protocol": protocol.VERSION, "token": self._lease.token}
        seconds = STATUS_SECONDS if action == protocol.STATUS else CONTROL_SECONDS
        try:
            ranks = self._server.ask(protocol.path(action), content, ranks_of(kind), seconds, 16 * _BYTES).ranks
        except LeaseEndedError:
            self._lease.lost()
            raise
        for rank in ranks:
            if rank.protocol != protocol.VERSION:
                raise SearchError(f"{self.url}: {protocol.differing(rank.protocol, protocol.VERSION)}")
        meant = [rank for rank in ranks if self.dp_rank in (None, rank.dp_rank)]
        if not meant:
            raise SearchError(f"{self.url}: has no data-parallel rank {self.dp_rank}")
        return meant

    def check_undisturbed(self, ranks: Sequence[Rank]) -> None:
        """Compare answers with what this client's last switch left.

        Raises:
            ServerLostError: if the server was restarted since.
            SearchError: if somebody else switched it since.
        """
        for rank in ranks:
            left = self._switched.get(rank.dp_rank)
            if left is None:
                raise SearchError(f"{self.url}: has no pattern of this client")
            if rank.boot != left.boot:
                raise ServerLostError(f"{self.url}: was restarted, and what it answered meanwhile is not kept")
            if (rank.switches, rank.pattern) != (left.switches, left.pattern):
                raise SearchError(
                    f"{self.url}: somebody else switched it to {rank.pattern}, and what it answered meanwhile is not"
                    " kept; expected one search a server"
                )
