"""The command line: indexcache-lab edge."""

from __future__ import annotations

from typing import Annotated

from indexcache_lab.options import DenseModel
from indexcache_search.cli.bounded import TOKENS, Bounds
from indexcache_search.cli.command import Config, Version, application, number, option
from indexcache_search.console import errors_in_one_line, messages, results
from indexcache_search.errors import SearchError
from sglang_indexcache import process


def edge(
    *,
    model: DenseModel,
    contexts: Annotated[str, option("Tokens in the cache.")] = "8192,16384",
    share: Annotated[
        str,
        option("Shares of the blocks of 64 tokens that are attended to."),
    ] = "0.25,0.125",
    every: Annotated[int, number("One layer in so many chooses; the next ones reuse that.", Bounds(1, 1000))] = 1,
    threads: Annotated[int, number("Threads of PyTorch.", Bounds(1, 4096))] = 2,
    config: Config = None,
    version: Version = False,
) -> None:
    """Time decode steps over chosen blocks of the cache on this CPU, beside attention to everything.

    Keys are random, so this says nothing of what is lost: compare that with indexcache-lab key-delta eval --pattern.
    """
    console = messages()
    with errors_in_one_line(console, "indexcache-lab edge"):
        try:
            lengths, shares = [int(word) for word in contexts.split(",")], [float(word) for word in share.split(",")]
        except ValueError:
            raise SearchError("--contexts and --share are numbers with commas between them") from None
        if not all(0 < length <= TOKENS.most for length in lengths):
            raise SearchError(f"--contexts is {contexts[:60]}, expected 1 to {TOKENS.most}")
        import torch

        from indexcache_lab.edge import steps
        from indexcache_lab.edge.decoding import Blocks
        from indexcache_search.results.tables import fitted

        process.let_work_end()
        torch.set_num_threads(threads)
        loaded = steps.load(model)
        layers = loaded.config.num_hidden_layers
        roles = ("F" + "S" * (every - 1)) * layers
        plans: dict[str, Blocks | None] = {"everything": None}
        plans |= {f"{item:g} of the blocks": Blocks(roles=roles[:layers], share=item) for item in shares}
        lines = [["tokens", *plans]]
        for length, found in zip(lengths, steps.measured(loaded, plans, lengths), strict=True):
            lines.append([str(length), *(f"{milliseconds:.1f}" for milliseconds in found.values())])
        out = results()
        for table in fitted(f"Milliseconds of a decode step, {threads} threads", lines, 1, out.width):
            out.print(table)


app = application({"edge": edge})
