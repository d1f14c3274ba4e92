"""A whole comparison by lm-eval: from names of tasks and servers to harness.json."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console
from rich.table import Table

from indexcache_harness import lm_eval
from indexcache_harness.comparison import FILES
from indexcache_harness.paired import ALPHA, Change, change, fewest_documents, p_of_falls, worse_by
from indexcache_harness.samples import Samples, Score, lower_is_better, paired, read_samples
from indexcache_harness.settings import Harness
from indexcache_search.console import warn
from indexcache_search.errors import SearchError
from indexcache_search.eval.endpoints import Endpoint, room
from indexcache_search.eval.result import ever
from indexcache_search.eval.unswitched import Unswitched
from indexcache_search.hf.loading import set_quiet
from indexcache_search.workdir.folder import OwnFolder
from indexcache_search.workdir.overlap import check_apart
from sglang_indexcache.http.address import Address
from sglang_indexcache.io.fields import Finite

FILE, LOG = FILES
SCHEMA = "indexcache-eval/harness/v1"


class Row(BaseModel):
    """A task's metric on one server, beside the baseline.

    Attributes:
        server: its address.
        task: of lm-eval.
        metric: of the task.
        filter: of answers before they are scored; `none` where there is none.
        higher_is_better: what lm-eval says of the metric.
        change: scores of both servers.
        scores: of each document, the baseline's and the server's.
        p_fall: with `max_fall`, how likely such scores are if this one does not fall by more, corrected for the number
            of rows (see `paired.p_of_falls`).
    """

    model_config = ConfigDict(frozen=True)

    server: str
    task: str
    metric: str
    filter: str
    higher_is_better: bool
    change: Change
    scores: list[tuple[float, float]]
    p_fall: Finite | None = None


class HarnessResult(BaseModel):
    """Contents of harness.json.

    Attributes:
        servers: addresses, the baseline first.
        harness: version of lm-eval, and what it was given to do.
        rows: see `Row`.
    """

    model_config = ConfigDict(frozen=True, populate_by_name=True)

    schema_: str = Field(default=SCHEMA, alias="schema")
    servers: list[str]
    harness: dict[str, Any]
    rows: list[Row]


def check(addresses: Sequence[Address]) -> None:
    """Check what can be known before anybody is asked.

    Raises:
        SearchError: if lm-eval is not installed, or can't compare these servers.
    """
    lm_eval.check_installed()
    if len(addresses) < 2:
        raise SearchError(f"--endpoint: found {len(addresses)}, expected a baseline server and one to compare it with")
    if len(set(addresses[1:])) < len(addresses) - 1:
        raise SearchError("--endpoint: a server that is compared stands there twice, expected each once")
    for address in addresses:
        if address.authorization is not None or address.target("") != address.label:
            raise SearchError(
                f"--harness: {address} has a user or a query, which lm-eval can't send; expected SGLANG_API_KEY"
            )


def run(
    model: str,
    addresses: Sequence[Address],
    harness: Harness,
    output: Path,
    console: Console,
    *,
    beside: bool = False,
) -> HarnessResult:
    """Let lm-eval ask each server, and write harness.json.

    Args:
        model: folder or hub id, read for its tokenizer.
        addresses: servers; the first is the baseline.
        harness: what lm-eval is given to do.
        output: folder of the result and of lm-eval's log.
        console: for messages.
        beside: keep the other results in `output`: the same command has just written them.

    Raises:
        SearchError: as `check`, if lm-eval fails, or if a search switches the pattern of a server.
        DataError: if the servers answered other documents than the baseline.
        IndexCacheError: if a server does not answer.
    """
    check(addresses)
    set_quiet()
    reads = {"--model": [model], "--harness include": [str(harness.include)] if harness.include else []}
    check_apart({"--output": output}, [output / FILE, output / LOG], reads)
    unswitched = Unswitched(addresses, partial(warn, console))
    space = min(room(address.without("/v1"), "--harness") for address in addresses)
    with (
        OwnFolder(output, "indexcache-eval", FILES, "--output", ever()).held() as folder,
        tempfile.TemporaryDirectory(prefix="indexcache-harness-") as scratch,
    ):
        log = folder.growing(LOG)
        answers, lower = list[Samples](), set[tuple[str, str]]()
        for number, address in enumerate(addresses):
            console.print(f"lm-eval asks {address}; its output: {log}", soft_wrap=True)
            place = Path(scratch) / str(number)
            place.mkdir()
            lm_eval.run(lm_eval.configuration(harness, model, Endpoint(address), space, place), place, log)
            unswitched.check()
            answers.append(read_samples(place))
            lower |= lower_is_better(place)
        result = HarnessResult(
            servers=list(map(str, addresses)),
            harness={"lm_eval": lm_eval.version(), **_described(harness)},
            rows=_judged(list(_rows(addresses, answers, lower)), harness.max_fall),
        )
        if not beside:
            folder.clear()
        folder.write(FILE, json.dumps(result.model_dump(mode="json", by_alias=True), indent=1) + "\n")
    return result


def _described(harness: Harness) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in vars(harness).items()}


def _rows(addresses: Sequence[Address], answers: Sequence[Samples], lower: set[tuple[str, str]]) -> Iterator[Row]:
    for address, other in zip(addresses[1:], answers[1:], strict=True):
        for score, before, after in paired(answers[0], other, str(address)):
            yield Row(
                server=str(address),
                task=score.task,
                metric=score.metric,
                filter=score.filter,
                higher_is_better=(score.task, score.metric) not in lower,
                change=change(before, after),
                scores=list(zip(before, after, strict=True)),
            )


def _judged(rows: Sequence[Row], most: float | None) -> list[Row]:
    """Return `rows` with `p_fall`."""
    if most is None:
        return list(rows)
    found = p_of_falls([worse_by(row.scores, row.higher_is_better) for row in rows], most)
    return [row.model_copy(update={"p_fall": value}) for row, value in zip(rows, found, strict=True)]


def falls(result: HarnessResult) -> list[str]:
    """Return a line for each score that falls by more than is allowed, or whose documents are too few to show that.

    Of servers that are equal, one comparison in 20 has such a fall at most, however many tasks it has.
    """
    rows = [row for row in result.rows if row.p_fall is not None]
    fewest, lines = fewest_documents(max(1, len(rows))), list[str]()
    for row in rows:
        where, number = f"{row.server}: {_task(row)}", row.change.documents
        if row.p_fall is not None and row.p_fall <= ALPHA:
            worse = abs(row.change.change)
            lines.append(f"{where}: worse by {worse:.3f} (p {row.p_fall:.2g}, corrected for {len(rows)} scores)")
        elif number < fewest:
            lines.append(
                f"{where}: not settled: of {number} documents no fall would show among {len(rows)} scores; expected at"
                f" least {fewest}"
            )
    return lines


def table(result: HarnessResult) -> Table:
    """Make the table of a result: a row for each server, task and metric."""
    judged = any(row.p_fall is not None for row in result.rows)
    found = Table(title="lm-eval, paired by document; intervals of 95 %")
    titles = ["server", "task", "documents", "baseline", "score", "change", "interval", "McNemar"]
    for number, name in enumerate([*titles, *(["p of a fall"] if judged else [])]):
        found.add_column(name, justify="left" if number < 2 else "right", overflow="fold")
    for row in result.rows:
        given = row.change
        mcnemar = "" if given.p_value is None else f"-{given.fell} +{given.rose}, p {given.p_value:.2g}"
        cells = (f"{given.baseline:.3f}", f"{given.score:.3f}", f"{given.change:+.3f}")
        interval = "unknown" if given.low is None else f"{given.low:+.3f} to {given.high:+.3f}"
        fall = [] if row.p_fall is None else [f"{row.p_fall:.2g}"]
        found.add_row(row.server, _task(row), str(given.documents), *cells, interval, mcnemar, *fall)
    return found


def _task(row: Row) -> str:
    return str(Score(task=row.task, metric=row.metric, filter=row.filter))
