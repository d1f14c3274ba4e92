"""How something is trained, as flags of several commands say it."""

from __future__ import annotations

from typing import Annotated

import typer

from indexcache_search import bounded
from indexcache_search.distill.settings import Schedule as ScheduleName

Training = Annotated[
    list[str] | None, typer.Option(help="Training source: file, folder, hub id; repeatable.", metavar="SOURCE")
]
Evaluation = Annotated[
    list[str] | None,
    typer.Option(help="Held-out source; repeatable. Default: the training sources.", metavar="SOURCE"),
]
NumEvalSequences = Annotated[
    int | None, typer.Option(help="Held-out sequences. Default: 32.", callback=bounded.sequences())
]
Schedule = Annotated[
    ScheduleName, typer.Option(help="cosine: to a tenth. wsd: stays, and falls to 0 over the last fifth.")
]
RampSteps = Annotated[
    int, typer.Option(help="Steps of the ramp that each stage begins with.", callback=bounded.steps(0))
]
MicroBatchSize = Annotated[int, typer.Option(help="Sequences a forward of one process.", callback=bounded.batch())]
WeightDecay = Annotated[float, typer.Option(help="Of the body's matrices.", callback=bounded.within(0, 1e6))]
MaxNorm = Annotated[float, typer.Option(help="To which gradients are clipped.", callback=bounded.within(0, 1e6))]
Seed = Annotated[int, typer.Option(help="Order of the training sequences.", callback=bounded.seed())]
Dtype = Annotated[
    str, typer.Option(help="Of the computations: float32, bfloat16 or auto. What trains is float32 in any case.")
]
Device = Annotated[str, typer.Option(help="auto or cpu.")]
GradientCheckpointing = Annotated[
    bool, typer.Option(help="Keep the input of each layer alone, and run it again for the gradients.")
]
EvaluateEvery = Annotated[int, typer.Option(help="Steps between held-out evaluations.", callback=bounded.steps())]
CheckpointEvery = Annotated[int, typer.Option(help="Steps between checkpoints.", callback=bounded.steps())]
ShowEvery = Annotated[
    int, typer.Option(help="Steps between lines on the terminal; the log has all.", callback=bounded.steps())
]
Restart = Annotated[bool, typer.Option("--restart", help="Discard an earlier run's work and start afresh.")]
Tensorboard = Annotated[bool, typer.Option("--tensorboard", help="Write event files to OUTPUT/tensorboard.")]
