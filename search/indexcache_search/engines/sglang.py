"""The live engine: SGLang servers in calibration mode, each of whose data-parallel ranks evaluates one pattern."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from indexcache_search.data.tokens import TokenSet, sampled_queries
from indexcache_search.engines.answers import Rank
from indexcache_search.engines.base import Result
from indexcache_search.engines.calibration_client import CalibrationServer
from indexcache_search.engines.control_requests import ServerLostError
from indexcache_search.errors import SearchError
from indexcache_search.evaluation.identity import Place
from indexcache_search.evaluation.losses import Evaluation
from indexcache_search.evaluation.objectives import Objective
from sglang_indexcache import ModelLayers, Pattern
from sglang_indexcache.calibration.protocol import KEEP, KL, OVERLAP, Measured, Range

LONGEST_PAUSE = 30.0


@dataclass
class _Loss:
    """State of a lost server, until it has evaluated something again."""

    deadline: float
    pause: float = 0.5
    was_back: bool = False


class SglangEngine:
    """Engine that evaluates patterns on SGLang servers.

    `nll` is the sum of the server's input logprobs, in float64; the server itself sums `kl`. Requests of `batch_size`
    sequences follow each other, so that batches never depend on timing. If sequences are whole chunks of the server's
    chunked prefill, one request is sent ahead, so that the server never waits. A lane is a server, or one of its
    data-parallel ranks.

    The engine holds the lease of its servers until `close`: nobody else switches them. An evaluation during which
    somebody did, by whatever means, is thrown away.

    Args:
        servers: servers in calibration mode, with the same model.
        description: the model's layers, read from config.json.
        batch_size: sequences per request.
        patience: seconds to wait for a lost server; the others go on meanwhile.
        notice: called with one line when a server is lost or back.

    Attributes:
        answers: names of what the servers measure beside logprobs.

    Raises:
        SearchError: if a server does not answer, is not in calibration mode, is another search's, or has another model
            or other versions than the first.
    """

    def __init__(
        self,
        servers: Sequence[CalibrationServer],
        description: ModelLayers,
        batch_size: int = 1,
        patience: float = 600.0,
        notice: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.model, self.batch_size = description, batch_size
        self._patience, self._notice = patience, notice
        self._servers, self._lost = tuple(servers), dict[CalibrationServer, _Loss]()
        try:
            self._lanes = [lane for server in servers for lane in server.lanes()]
            first = self._lanes[0].status()
            self.name, self.settings = self._kind(first)
            self.weights_sha256, self.answers = first.weights_sha256, frozenset(first.measures)
            self.measures = self.answers & {OVERLAP}
            for lane in self._lanes:
                self._check_same(lane, lane.status())
            for server in self._servers:
                server.hold(notice)
        except ServerLostError as error:
            self.close()
            raise SearchError(str(error)) from None
        except SearchError:
            self.close()
            raise
        chunk = self.settings.get("chunk", "")
        self._chunk = int(chunk) if chunk.isdecimal() else 0  # `None` or -1 without chunked prefill

    def close(self) -> None:
        """Give the leases of all servers back, so that others can switch them at once."""
        for server in self._servers:
            server.release()

    @property
    def place(self) -> Place:
        """Device and SGLang version of its servers."""
        return Place(self.settings.get("device"), self.name.removeprefix("sglang ").partition("+")[0])

    @property
    def lanes(self) -> int:
        """Return how many patterns are evaluated at once."""
        return len(self._lanes)

    def evaluate(
        self,
        patterns: Sequence[Pattern],
        data: TokenSet,
        objective: Objective,
        rows: Sequence[int] | None = None,
        fresh: bool = False,
    ) -> Iterator[Evaluation]:
        """See `Engine.evaluate`; each free lane takes the next pattern. Every evaluation is fresh.

        The pattern of a lost server goes to another one, or to itself when it is back.

        Raises:
            SearchError: if a server refuses, or all stay away for longer than `patience`.
            PatternError: if a layer selects in blocks.
        """
        work: queue.Queue[Pattern] = queue.Queue()
        done: queue.Queue[Evaluation | Exception] = queue.Queue()
        stop = threading.Event()
        for pattern in patterns:
            pattern.check_plain("runs on transformers alone")
            work.put(pattern)
        asked = tuple(range(data.num_sequences) if rows is None else rows)
        run = partial(self._evaluate, data=data, objective=objective, rows=asked)
        threads = [
            threading.Thread(target=self._serve, args=(lane, run, work, done, stop), daemon=True)
            for lane in self._lanes
        ]
        for thread in threads:
            thread.start()
        lost, left = 0, len(patterns)
        try:
            while left:
                result = done.get()
                if isinstance(result, Evaluation):
                    left -= 1
                    yield result
                elif isinstance(result, ServerLostError):
                    lost += 1
                    if lost == len(threads):
                        raise SearchError(f"no server came back within {self._patience:.0f} s: {result}")
                else:
                    raise result
        finally:
            stop.set()
            for thread in threads:
                thread.join(1)  # a thread inside a request ends after it

    def check_unchanged(self) -> None:
        """See `Engine.check_unchanged`; a lost server was checked after each of its evaluations."""
        for lane in self._lanes:
            with suppress(ServerLostError):
                self._check_same(lane, lane.status())

    def matrix(self, name: str, data: TokenSet, rows: int) -> NDArray[np.float64] | None:
        """See `Engine.matrix`.

        Raises:
            SearchError: if no server came back within `patience`.
        """
        if name not in self.measures:
            return None
        return self.anywhere(lambda lane: self._overlap(lane, data, rows))

    def anywhere(self, work: Callable[[CalibrationServer], Result]) -> Result:
        """Run `work` on the first reachable lane.

        Raises:
            SearchError: if a server refuses, or none came back within `patience`.
        """
        reason = ""
        for lane in self._lanes:
            came_back = True
            while came_back:
                try:
                    result = work(lane)
                    self._lost.pop(lane, None)
                    return result
                except ServerLostError as error:
                    reason, came_back = str(error), self._came_back(lane, error, threading.Event())
        raise SearchError(f"no server came back within {self._patience:.0f} s: {reason}")

    def _kind(self, status: Rank) -> tuple[str, Mapping[str, str]]:
        """Return name and settings of an engine with this status."""
        versions = dict(status.versions)
        return f"sglang {versions.pop('sglang', 'unknown')}", {**versions, "batch_size": str(self.batch_size)}

    def _check_same(self, lane: CalibrationServer, status: Rank) -> None:
        """Refuse a server whose model or version differs from the first one's, now or after a restart."""
        if status.config_sha256 != self.model.config_sha256:
            raise SearchError(f"{lane.url}: serves another model than --model {self.model.name}")
        if len(status.pattern) != self.model.num_layers:
            raise SearchError(
                f"{lane.url}: runs {len(status.pattern)} layers that choose, expected {self.model.num_layers}"
            )
        if status.weights_sha256 != self.weights_sha256:
            raise SearchError(f"{lane.url}: has other weights than {self._lanes[0].url} had; expected the same")
        kind = self._kind(status)
        if kind != (self.name, self.settings):
            raise SearchError(
                f"{lane.url}: is {kind}, {self._lanes[0].url} is {(self.name, self.settings)}; expected the same"
            )

    def _serve(
        self,
        lane: CalibrationServer,
        run: Callable[[CalibrationServer, Pattern], Evaluation],
        work: queue.Queue[Pattern],
        done: queue.Queue[Evaluation | Exception],
        stop: threading.Event,
    ) -> None:
        """Run patterns until none are left; on a loss put the pattern back and wait for the server."""
        try:
            while not stop.is_set():
                try:
                    pattern = work.get(timeout=0.1)
                except queue.Empty:
                    continue  # another lane may still return a pattern
                try:
                    done.put(run(lane, pattern))
                    self._lost.pop(lane, None)
                except ServerLostError as error:
                    work.put(pattern)
                    if not self._came_back(lane, error, stop):
                        raise
        except Exception as error:
            done.put(error)

    def _came_back(self, lane: CalibrationServer, error: ServerLostError, stop: threading.Event) -> bool:
        """Wait for a lost server, in pauses that grow until it has evaluated something again.

        A server that answers status requests but fails to evaluate is still lost.
        """
        if lane not in self._lost:  # otherwise an earlier call has reported it
            self._notice(f"lost {error}; waiting for it up to {self._patience:.0f} s")
        loss = self._lost.setdefault(lane, _Loss(time.monotonic() + self._patience))
        while time.monotonic() < loss.deadline and not stop.wait(loss.pause):
            loss.pause = min(2 * loss.pause, LONGEST_PAUSE)
            try:
                status = lane.status()
            except (ServerLostError, SearchError):  # a starting server has no route yet
                continue
            self._check_same(lane, status)
            if not loss.was_back:
                loss.was_back = True
                self._notice(f"{lane.url} is back")
            return True
        return False

    def _evaluate(
        self, lane: CalibrationServer, pattern: Pattern, data: TokenSet, objective: Objective, rows: tuple[int, ...]
    ) -> Evaluation:
        began, ids = time.monotonic(), None
        if objective == "kl":
            ranges = [_ranges(scored) for scored in data.scored]
            self._run_baselines(lane, data, ranges)
            ids = {row: Measured.new(KL, row, data.sha256).rid for row in rows}
        lane.switch(pattern)
        losses, correct = zip(*self._likelihoods(lane, data, rows, ids), strict=True)
        if ids is not None:
            sums = lane.divergences({ids[row]: ranges[row] for row in rows})
            losses = tuple(sums[ids[row]][0] for row in rows)
        self._check_same(lane, lane.undisturbed())  # somebody may have switched it or updated its weights meanwhile
        return Evaluation(
            pattern=pattern,
            rows=rows,
            losses=losses,
            correct=correct,
            tokens=tuple(data.scored[list(rows)].sum(axis=1).tolist()),
            layer_tokens=(self.model.num_layers * data.seq_len,) * len(rows),
            seconds=time.monotonic() - began,
        )

    def _likelihoods(
        self, lane: CalibrationServer, data: TokenSet, rows: Sequence[int], ids: Mapping[int, str] | None
    ) -> list[tuple[float, int]]:
        """Return `nll` and the number of correct tokens of each sequence."""

        def send(first: int) -> list[tuple[float, int]]:
            batch = rows[first : first + self.batch_size]
            start = int(data.scored[list(batch)].any(axis=0).argmax())  # the first that counts
            sequences = [data.tokens[row].tolist() for row in batch]
            answers = lane.logprobs(sequences, start, None if ids is None else [ids[row] for row in batch])
            return [_score(answer, data.scored[row, start:]) for row, answer in zip(batch, answers, strict=True)]

        ahead = 2 if self._chunk and data.seq_len % self._chunk == 0 else 1
        with ThreadPoolExecutor(ahead) as pool:
            return [score for scores in pool.map(send, range(0, len(rows), self.batch_size)) for score in scores]

    def _run_baselines(self, lane: CalibrationServer, data: TokenSet, ranges: list[list[Range]]) -> None:
        """Make the lane store the native pattern's hidden states of sequences without a baseline."""
        whole = [(each[0][0], each[-1][1]) for each in ranges]
        missing = lane.missing_baselines(data.sha256, whole)
        if not missing:
            return
        lane.switch(self.model.native)
        for row in missing:
            first = ranges[row][0][0] + 1
            lane.logprobs([data.tokens[row].tolist()], first, [Measured.new(KEEP, row, data.sha256).rid])
        lane.undisturbed()
        missing = lane.missing_baselines(data.sha256, whole)
        if missing:
            raise SearchError(f"{lane.url}: kept no baseline of sequence {missing[0]}")

    def _overlap(self, lane: CalibrationServer, data: TokenSet, rows: int) -> NDArray[np.float64]:
        positions = sampled_queries(data.seq_len, self.model.first_sparse_position, rows)
        lane.switch(self.model.native)
        lane.sample_indices(positions.tolist())
        for row in range(data.num_sequences):
            lane.logprobs([data.tokens[row].tolist()], data.seq_len - 1, [Measured.new(OVERLAP, row, data.sha256).rid])
        overlap, queries = lane.index_overlap(self.model.num_layers)
        if queries != len(positions) * data.num_sequences:
            raise SearchError(f"{lane.url}: sampled {queries} queries, expected {len(positions) * data.num_sequences}")
        return np.asarray(overlap)


def _score(answer: list[tuple[float, bool]], scored: NDArray[np.bool_]) -> tuple[float, int]:
    """Return `nll` and the number of correct tokens of one sequence."""
    logprobs, hits = np.asarray(answer)[scored].T
    return -float(logprobs.sum()), int(hits.sum())


def _ranges(scored: NDArray[np.bool_]) -> list[Range]:
    """Return runs of positions whose next token is scored, as `(first, last)` with `last` excluded."""
    edges = np.flatnonzero(np.diff(np.concatenate([scored[1:], [False]]).astype(int), prepend=0))
    return [(int(first), int(last)) for first, last in edges.reshape(-1, 2)]
