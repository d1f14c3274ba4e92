"""A whole watch: from a log of requests to a breach, or to none."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from indexcache_search.console import results
from indexcache_search.errors import SearchError
from indexcache_search.workdir.folder import OwnFolder
from indexcache_search.workdir.overlap import check_apart
from indexcache_watch.drift import Bucket, DriftTest
from indexcache_watch.identity import NONE, Identity
from indexcache_watch.metrics import Metrics
from indexcache_watch.outage import Outages, UnansweredError
from indexcache_watch.record import FILE, Record, Scored
from indexcache_watch.requests import Request, RequestLog
from indexcache_watch.scores import RefusedError, loss
from sglang_indexcache.http.address import Address
from sglang_indexcache.http.servers import reads_in_blocks

COMMAND = "indexcache-watch"
POLL_SECONDS = 5.0  # between looks at a log that is followed
REASONS = 20  # for which requests are not scored, on the screen


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """What is watched, and how.

    Attributes:
        served: the server that is watched.
        reference: a server of the same model without a pattern.
        requests: file or folder of finished requests.
        allowed: mean difference that is allowed, nats a token.
        alpha: see `DriftTest`.
        edges: see `DriftTest`.
        rate: most requests a second on each server.
        sample: share of the requests that are scored, chosen by their content.
        num_requests: ends after so many scored requests, earlier runs' included; `None` for all.
        skip_bad: most rows of the log that are left out because they can't be understood.
        follow: wait for further requests instead of ending.
        host: address on which metrics are served.
        port: of the metrics; `None` for none.
        hold: seconds for which metrics stay after a breach.
    """

    served: Address
    reference: Address
    requests: Path
    allowed: float
    alpha: float
    edges: Sequence[int]
    rate: float
    sample: float
    num_requests: int | None
    skip_bad: int
    follow: bool
    host: str
    port: int | None
    hold: float


class Watch:
    """One watch over its record.

    Args:
        options: what is watched.
        record: losses of this run and of earlier ones.
        identity: what both servers serve; they are asked again with each request.
        console: for messages.

    Attributes:
        test: the test of what is lost.
        skipped: requests that can't be scored, by reason.
    """

    def __init__(self, options: WatchOptions, record: Record, identity: Identity, console: Console) -> None:
        self.test = DriftTest(options.edges, options.allowed, options.alpha)
        self.skipped: Counter[str] = Counter()
        self._counted: Counter[str] = Counter()  # of these, those that the log has counted
        self._options, self._record, self._identity, self._console = options, record, identity, console
        self._in_blocks = reads_in_blocks(options.served)  # and goes on to, for as long as its pattern stays
        self._seen, self._next = {scored.request for scored in record.scored}, 0.0
        self._origins: dict[str, bool] = {}  # whether the line that counts has one written token
        self._log, self._left_out = RequestLog(options.requests, options.skip_bad), list[Path]()
        for scored in record.scored:
            self._add(scored)
        servers = {"served": str(options.served), "reference": str(options.reference)}
        self._metrics = Metrics(self.test, options.allowed, **servers, fingerprint=identity.fingerprint)
        self._outages = Outages(options.follow, self._check, self._say, self._metrics.outage)
        if options.port is not None:
            self._metrics.serve(options.host, options.port)

    def run(self) -> Bucket | None:
        """Score requests until a bucket is breached, and return it; `None` if they end before.

        Raises:
            IndexCacheError: if a server does not answer, serves something else, or the log can't be read.
            NonFiniteLossError: if a loss is NaN or infinite.
        """
        if not self._ended():
            for request in self._requests():
                self._score(request)
                if self._ended():
                    break
        return self.test.breached

    def _requests(self) -> Iterator[Request]:
        """Yield the requests of the sample, each once."""
        while True:
            for request in self._log.new(last=not self._options.follow):
                digest = request.digest
                if digest in self._seen or int(digest, 16) >= self._options.sample * 16 ** len(digest):
                    continue
                self._seen.add(digest)
                if self._logged_twice(request):
                    self._skip("another server's log has it as well", 1)
                else:
                    yield request
            for reason, count in self._log.skipped.items():
                self._skip(reason, count - self._counted[reason])
                self._counted[reason] = count
            if self._log.left_out != self._left_out:
                self._left_out = self._log.left_out
                names = ", ".join(file.name for file in self._left_out[:3])
                self._say(f"not read: {len(self._left_out)} files whose ending is not known, such as {names}")
            if not self._options.follow:
                return
            time.sleep(POLL_SECONDS)

    def _logged_twice(self, request: Request) -> bool:
        """Whether a prefill server logged the first token of this reply, or the decode server all of it, and counts."""
        if request.origin is None:
            return False
        one = bool(request.counts.sum() == 1)
        return self._origins.setdefault(request.origin, one) != one

    def _ended(self) -> bool:
        most = self._options.num_requests
        return self.test.breached is not None or (most is not None and len(self._record.scored) >= most)

    def _score(self, request: Request) -> None:
        time.sleep(max(self._next - time.monotonic(), 0.0))
        self._next = time.monotonic() + 1 / self._options.rate
        try:
            served, reference = self._outages.run(lambda: self._losses(request))
        except RefusedError as error:
            self._skip(f"a server refuses it: {error}", 1)
            return
        except UnansweredError as error:
            self._skip(f"a server fails on it: {error}", 1)
            return
        scored = Scored(
            request=request.digest,
            length=len(request.tokens),
            tokens=int(request.counts.sum()),
            served=served,
            reference=reference,
            fingerprint=self._identity.fingerprint,
            reference_fingerprint=self._identity.reference_fingerprint,
        )
        self._record.add(scored)
        self._add(scored)
        self._metrics.update(scored=True)

    def _losses(self, request: Request) -> tuple[float, float]:
        """Return the losses on both servers, which serve after them what they served before."""
        served = loss(self._options.served, request, self._in_blocks)
        found = served, loss(self._options.reference, request)
        self._check()
        return found

    def _check(self) -> None:
        self._identity.check(self._options.served, self._options.reference)

    def _add(self, scored: Scored) -> None:
        self.test.add(scored.length, scored.change, scored.tokens)

    def _skip(self, reason: str, count: int) -> None:
        self.skipped[reason] += count
        if count:
            self._metrics.skip(reason.partition(":")[0], count)

    def _say(self, line: str) -> None:
        self._console.print(line, soft_wrap=True)


def run(options: WatchOptions, output: Path, restart: bool, console: Console) -> bool:
    """Watch, keep all losses in `output`, and print how it ended; return true if too much is lost.

    Args:
        options: what is watched.
        output: folder of the record; the same watch goes on from it.
        restart: discard the record first.
        console: for messages.

    Raises:
        SearchError: if both servers are one, or no request could be scored.
        IndexCacheError: as `Watch.run`.
        NonFiniteLossError: as `Watch.run`.
    """
    if options.served == options.reference:
        raise SearchError("--served and --reference are the same server, expected two")
    check_apart({"--output": output}, [output / FILE], {"--requests": [str(options.requests)]})
    identity = Identity.of(options.served, options.reference)
    if identity.fingerprint == NONE:
        console.print(f"{options.served} names no pattern: is it started with --indexcache-pattern?", soft_wrap=True)
    recorded = {
        "served": str(options.served),
        "reference": str(options.reference),
        **asdict(identity),
        "allowed": options.allowed,
        "alpha": options.alpha,
        "buckets": list(options.edges),
    }
    with (
        OwnFolder(output, COMMAND, [FILE], "--output").held() as folder,
        Record(folder.growing(FILE), recorded, restart) as record,
    ):
        watch = Watch(options, record, identity, console)
        breached = watch.run()
        for reason, count in watch.skipped.most_common(REASONS):
            console.print(f"not scored: {count} requests: {reason}", soft_wrap=True)
        if not record.scored:
            raise SearchError(f"--requests: {options.requests}: no request could be scored")
        results().print(table(watch.test))
        if breached is None:
            return False
        console.print(f"{COMMAND}: {breach(breached, options)}", style="red", soft_wrap=True)
        if options.port is not None:
            time.sleep(options.hold)
        return True


def breach(bucket: Bucket, options: WatchOptions) -> str:
    """Say in one line what is lost."""
    error = "" if bucket.stderr is None else f" ±{bucket.stderr:.3f}"
    cut = "" if f"{bucket.cut_mean:+.3f}" == f"{bucket.mean:+.3f}" else f" ({bucket.cut_mean:+.3f} cut off)"
    return (
        f"{options.served}: requests of {bucket.name} tokens: loss changes by {bucket.mean:+.3f}{error} nats a token"
        f"{cut} after {bucket.requests} requests, --allowed is {options.allowed:g}"
    )


def table(test: DriftTest) -> Table:
    """Make the table of a test: a row for each bucket with requests."""
    found = Table(title="Loss above the reference's, nats a token")
    for name in ("tokens", "requests", "scored tokens", "loss change", "cut off", "evidence"):
        found.add_column(name, justify="right")
    for bucket in test.buckets:
        if bucket.requests:
            error = "" if bucket.stderr is None else f" ±{bucket.stderr:.3f}"
            change = f"{bucket.mean:+.3f}{error}"
            counted, cut_off = (str(bucket.requests), str(bucket.tokens)), f"{bucket.cut_mean:+.3f}"
            found.add_row(bucket.name, *counted, change, cut_off, f"{test.evidence(bucket):.2g}")
    return found
