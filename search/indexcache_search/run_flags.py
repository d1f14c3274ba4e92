"""How models run, as flags of several commands say it."""

from __future__ import annotations

from typing import Annotated

import typer

from indexcache_search import bounded

FIRST_CHOICE = "index_topk (DeepSeek-V4: 4 times that; dense models: pages x page tokens)"  # below, all is seen

SeqLen = Annotated[
    int | None,
    typer.Option(
        help=f"Tokens a sequence; more than {FIRST_CHOICE}. Default: 4 times that.", callback=bounded.tokens()
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
BatchSize = Annotated[int, typer.Option(help="Sequences a forward.", callback=bounded.batch())]
Restart = Annotated[bool, typer.Option("--restart", help="Discard the journal and start afresh.")]
Seed = Annotated[int, typer.Option(help="Order of the calibration documents.", callback=bounded.seed())]
