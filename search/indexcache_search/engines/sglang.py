"""The live engine: SGLang servers in calibration mode, one or several, each evaluating a pattern at a time."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from indexcache_search.engines.base import Evaluation, Objective
from indexcache_search.engines.calibration_server import CalibrationServer, ServerLostError
from indexcache_search.errors import SearchError
from indexcache_search.tokens import TokenSet
from sglang_indexcache import DsaModel, Pattern

LONGEST_PAUSE = 30.0


class SglangEngine:
    """Evaluates patterns on SGLang.

    Losses are sums of the engine's own input logprobs, in float64. Sequences are sent `batch_size` at a time, one
    request after the other, so that what runs together never depends on timing.

    Args:
        servers: in calibration mode, with the same model.
        description: what the model's config.json says.
        batch_size: sequences a request.
        patience: seconds to wait for lost servers, once none is left.

    Raises:
        SearchError: if a server is not in calibration mode, has another model or other versions than the first.
    """

    def __init__(
        self,
        servers: Sequence[CalibrationServer],
        description: DsaModel,
        batch_size: int = 1,
        patience: float = 600.0,
    ) -> None:
        self.model, self.batch_size = description, batch_size
        self._servers, self._patience = tuple(servers), patience
        self.name, self.settings = self._describe()

    def evaluate(self, patterns: Sequence[Pattern], data: TokenSet, objective: Objective) -> Iterator[Evaluation]:
        """See `Engine.evaluate`; each server takes the next pattern when it is free.

        What a lost server was working on goes to another one, or to itself when it is back.

        Raises:
            SearchError: if a server refuses, or all stay away for longer than `patience`.
        """
        if objective != "nll":
            raise SearchError("--objective kl is not there yet with --engine sglang; expected nll")
        work: queue.Queue[Pattern] = queue.Queue()
        done: queue.Queue[Evaluation | Exception] = queue.Queue()
        stop = threading.Event()
        for pattern in patterns:
            work.put(pattern)
        threads = [
            threading.Thread(target=self._serve, args=(server, work, done, data, stop), daemon=True)
            for server in self._servers
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
                thread.join(1)  # one that is inside a request ends with it

    def topk_overlap(self, data: TokenSet, rows: int) -> NDArray[np.float64] | None:
        """See `Engine.topk_overlap`; not measured here."""
        return None

    def output_similarity(self, data: TokenSet) -> NDArray[np.float64] | None:
        """See `Engine.output_similarity`; not measured here."""
        return None

    def _describe(self) -> tuple[str, Mapping[str, str]]:
        found: list[tuple[str, Mapping[str, str]]] = []
        for server in self._servers:
            try:
                status = server.status()
            except ServerLostError as error:
                raise SearchError(str(error)) from None
            if status["config_sha256"] != self.model.config_sha256:
                raise SearchError(f"{server.url}: serves another model than --model {self.model.name}")
            versions = dict(status["versions"])
            name = f"sglang {versions.pop('sglang')}"
            found.append((name, {**versions, "batch_size": str(self.batch_size)}))
            if found[-1] != found[0]:
                raise SearchError(
                    f"{server.url}: is {found[-1]}, {self._servers[0].url} is {found[0]}; expected the same"
                )
        return found[0]

    def _serve(
        self,
        server: CalibrationServer,
        work: queue.Queue[Pattern],
        done: queue.Queue[Evaluation | Exception],
        data: TokenSet,
        stop: threading.Event,
    ) -> None:
        """Take patterns until there are none; on a loss put the pattern back, and wait for the server."""
        while not stop.is_set():
            try:
                pattern = work.get(timeout=0.1)
            except queue.Empty:
                continue  # another server may yet give one back
            try:
                done.put(self._evaluate(server, pattern, data))
            except ServerLostError as error:
                work.put(pattern)
                if not self._came_back(server, stop):
                    done.put(error)
                    return
            except Exception as error:
                done.put(error)
                return

    def _came_back(self, server: CalibrationServer, stop: threading.Event) -> bool:
        deadline, pause = time.monotonic() + self._patience, 0.5
        while time.monotonic() < deadline and not stop.wait(pause):
            try:
                server.status()
            except (ServerLostError, SearchError):  # a server that is starting has no route yet
                pause = min(2 * pause, LONGEST_PAUSE)
            else:
                return True
        return False

    def _evaluate(self, server: CalibrationServer, pattern: Pattern, data: TokenSet) -> Evaluation:
        began = time.monotonic()
        server.switch(pattern)
        losses, correct = [], []
        for first in range(0, data.num_sequences, self.batch_size):
            rows = range(first, min(first + self.batch_size, data.num_sequences))
            start = min(int(np.flatnonzero(data.scored[row])[0]) for row in rows)
            answers = server.logprobs([data.tokens[row].tolist() for row in rows], start)
            for row, answer in zip(rows, answers, strict=True):
                values = np.asarray([logprob for logprob, _ in answer], dtype=np.float64)
                hits = np.asarray([hit for _, hit in answer])
                scored = data.scored[row][start:]
                if len(values) != len(scored):
                    raise SearchError(f"{server.url}: {len(values)} logprobs for {len(scored)} tokens")
                losses.append(-float(values[scored].sum()))
                correct.append(int(hits[scored].sum()))
        tokens = tuple(int(count) for count in data.scored.sum(axis=1))
        return Evaluation(pattern, tuple(losses), tuple(correct), tokens, time.monotonic() - began)
