"""Metrics of a watch for Prometheus, on a port of its own."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from indexcache_search.errors import SearchError
from indexcache_watch.drift import DriftTest


class Metrics:
    """Metrics `indexcache_watch_*`, which follow a test.

    Args:
        test: the test; its buckets are labels.
        allowed: see `DriftTest`.
        labels: the servers, and the fingerprint of the pattern.

    Attributes:
        registry: holds the metrics.
    """

    def __init__(self, test: DriftTest, allowed: float, **labels: str) -> None:
        self._test, self.registry = test, CollectorRegistry()
        registry = self.registry

        def gauge(name: str, words: str, *more: str) -> Gauge:
            return Gauge(f"indexcache_watch_{name}", words, more, registry=registry)

        gauge("info", "1; which servers are compared, and the pattern that is served.", *labels).labels(**labels).set(1)
        gauge("allowed_loss_change", "Largest mean difference allowed, nats a token.").set(allowed)
        self._requests = gauge("requests", "Requests scored on both servers.", "bucket")
        self._change = gauge("loss_change", "Mean loss above the reference's, nats a token, not cut off.", "bucket")
        self._cut = gauge("cut_loss_change", "The same of changes cut off on both sides, as tested.", "bucket")
        self._stderr = gauge("loss_change_stderr", "Standard error of loss_change.", "bucket")
        self._evidence = gauge(
            "evidence", "Evidence that cut_loss_change leaves what is allowed; 1 is a breach.", "bucket"
        )
        self._breached = gauge("breached", "1 since the evidence has reached 1, else 0.", "bucket")
        self._last = gauge("last_request_timestamp_seconds", "When the last request was scored; 0 before.")
        self._skipped = Counter(
            "indexcache_watch_skipped", "Requests that can't be scored, by reason.", ["reason"], registry=registry
        )
        self._outage = Counter(
            "indexcache_watch_outage_seconds", "Time in which a server gave no answer.", registry=registry
        )
        self.update()

    def serve(self, host: str, port: int) -> None:
        """Answer Prometheus on a port of one address, until the process ends.

        Raises:
            SearchError: if they can't be had.
        """
        try:
            start_http_server(port, addr=host, registry=self.registry)
        except OSError as error:
            place = f"--port is {port} and --host {host}"
            raise SearchError(f"{place}, which can't be had: {error.strerror}") from None

    def update(self, scored: bool = False) -> None:
        """Take over the state of the test; `scored` if a request was added just now."""
        for bucket in self._test.buckets:
            self._requests.labels(bucket.name).set(bucket.requests)
            self._evidence.labels(bucket.name).set(self._test.evidence(bucket))
            self._breached.labels(bucket.name).set(bucket.breached)
            if bucket.requests:
                self._change.labels(bucket.name).set(bucket.mean)
                self._cut.labels(bucket.name).set(bucket.cut_mean)
            if bucket.stderr is not None:
                self._stderr.labels(bucket.name).set(bucket.stderr)
        if scored:
            self._last.set(time.time())

    def skip(self, reason: str, count: int = 1) -> None:
        """Count requests that can't be scored."""
        self._skipped.labels(reason).inc(count)

    def outage(self, seconds: float) -> None:
        """Count time in which a server gave no answer."""
        self._outage.inc(seconds)
