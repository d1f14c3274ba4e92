"""The command line: indexcache-watch."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer

from indexcache_search.cli import options
from indexcache_search.cli.bounded import Bounds
from indexcache_search.cli.command import Config, OptionNeed, Version, application, number, option, running
from sglang_indexcache import process
from sglang_indexcache.command_line import exit_codes
from sglang_indexcache.http.address import Address

EPILOG = f"""
Examples:

\b
  indexcache-watch --served http://shared:30000 --reference http://baseline:30000 --requests /var/log/sglang
      Score what the log of SGLang has on both servers, one request a second, and end.

\b
  indexcache-watch --served http://shared:30000 --reference http://baseline:30000 --requests /var/log/sglang \\
        --follow --port 9400 --rate 0.2 --sample 0.01
      Go on with each new request, one of a hundred, with metrics for Prometheus, until too much is lost.

{exit_codes("the served pattern loses more than --allowed, or a loss was not finite")}
"""
LOSS = Bounds(1e-4, 10)
PROBABILITY = Bounds(1e-9, 0.5)
REQUESTS_A_SECOND = Bounds(1e-4, 1000)
SHARE = Bounds(1e-9, 1)
REQUESTS = Bounds(1, 10_000_000)
BAD = Bounds(0, 1_000_000_000)
PORT = Bounds(1, 65_535)
SECONDS = Bounds(0, 86_400)


def edges(text: str) -> list[int]:
    """Read ascending lengths, separated by commas.

    Raises:
        typer.BadParameter: if they are not.
    """
    words = [word.strip() for word in text.split(",")]
    found = [int(word) for word in words if re.fullmatch(r"[1-9]\d{0,7}", word, re.ASCII)]
    if len(found) < len(words) or len(found) > 16 or any(one >= other for one, other in pairwise(found)):
        raise typer.BadParameter(f"found {text[:80]!r}, expected up to 16 ascending lengths such as 2048,8192,32768")
    return found


def _checked(text: str) -> str:
    edges(text)
    return text


def _address(text: str) -> str:
    if not text.strip():
        raise typer.BadParameter("is empty, expected an address such as 127.0.0.1; 0.0.0.0 is all")
    return text


SERVES_METRICS = OptionNeed("--port", lambda given: given["port"] is not None)


def watch(
    context: typer.Context,
    *,
    served: Annotated[str, option("SGLang server that is watched.", metavar="URL")],
    reference: Annotated[str, option("SGLang server of the same model, without a pattern.", metavar="URL")],
    requests: Annotated[
        Path,
        option(
            "Finished requests in token ids, a file or a folder: SGLang's log (--log-requests --log-requests-level 3"
            " --log-requests-format json), or rows with input_ids and output_ids, loss_mask or labels.",
            metavar="FILE_OR_DIR",
        ),
    ],
    allowed: Annotated[
        float, number("Mean loss change, cut off, that is allowed in each bucket, nats a token.", LOSS)
    ] = 0.1,
    alpha: Annotated[float, number("Largest probability of a false alarm, however long it runs.", PROBABILITY)] = 0.005,
    buckets: Annotated[
        str, option("Lengths at which buckets of requests end, in tokens.", metavar="TOKENS,...", callback=_checked)
    ] = "2048,8192,32768,131072",
    rate: Annotated[float, number("Requests a second on each server at most.", REQUESTS_A_SECOND)] = 1.0,
    sample: Annotated[float, number("Share of the requests that are scored, chosen by their content.", SHARE)] = 1.0,
    num_requests: Annotated[
        int | None, number("End after so many scored requests, earlier runs included.", REQUESTS)
    ] = None,
    skip_bad: Annotated[int, number("Rows of the log that may be left out because they can't be understood.", BAD)] = 0,
    follow: Annotated[
        bool, option("Wait for further requests, and for servers, instead of ending.", "--follow")
    ] = False,
    port: Annotated[int | None, number("Serve metrics for Prometheus on this port.", PORT)] = None,
    host: Annotated[
        str, option("Address on which --port listens; 0.0.0.0 is all.", metavar="ADDRESS", callback=_address)
    ] = "127.0.0.1",
    hold: Annotated[float, number("Seconds for which the metrics stay after a breach.", SECONDS)] = 120.0,
    output: Annotated[Path, option("Folder of the record; the same command goes on from it.")] = Path(
        "indexcache-watch"
    ),
    restart: options.Restart = False,
    config: Config = None,
    version: Version = False,
) -> None:
    """Score finished requests on a served pattern and on a reference, and end where more is lost than allowed.

    The test is sequential: it may be looked at after every request, and its false alarms stay below --alpha. What one
    request may count is cut off, at 2 nats a token, or at the largest change so far, up to 10.
    """
    with running(context, {"hold": (SERVES_METRICS,), "host": (SERVES_METRICS,)}) as console:
        from indexcache_watch.run import WatchOptions, run

        watched = WatchOptions(
            served=Address.of(served).without("/v1"),
            reference=Address.of(reference).without("/v1"),
            requests=requests,
            allowed=allowed,
            alpha=alpha,
            edges=edges(buckets),
            rate=rate,
            sample=sample,
            num_requests=num_requests,
            skip_bad=skip_bad,
            follow=follow,
            host=host,
            port=port,
            hold=hold,
        )
        process.let_work_end()
        if run(watched, output, restart, console):
            raise typer.Exit(1)


app = application({"indexcache-watch": watch}, EPILOG)
