"""Settings of a run of lm-eval, as `--harness` takes them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from indexcache_search.cli.bounded import SEED, TOKENS, Bounds
from indexcache_search.errors import SearchError

CONTEXTS = Bounds(64, TOKENS.most, TOKENS.reason)


@dataclass(frozen=True, kw_only=True)
class Harness:
    """Settings of a run of lm-eval.

    Attributes:
        tasks: names of its tasks or groups.
        include: folder with further tasks in YAML.
        sampling: see `lm_eval.SAMPLING`.
        limit: most documents of each task.
        fewshot: examples before each; `None` for what the task says.
        chat: put the tokenizer's chat template around prompts.
        lengths: for tasks of any length, such as RULER's: tokens of a prompt.
        output_tokens: most tokens of a reply; `None` for what the task says.
        concurrency: requests at once.
        seed: of examples and sampled documents.
        max_fall: largest fall of a score that is allowed; `None` for any.
    """

    tasks: tuple[str, ...]
    include: Path | None = None
    sampling: Literal["greedy", "paper"] = "greedy"
    limit: Annotated[int, Bounds(1, 10_000_000)] | None = None
    fewshot: Annotated[int, Bounds(0, 1000)] | None = None
    chat: bool = False
    lengths: tuple[Annotated[int, CONTEXTS], ...] = ()
    output_tokens: Annotated[int, CONTEXTS] | None = None
    concurrency: Annotated[int, Bounds(1, 1024, "a connection each")] = 1
    seed: Annotated[int, SEED] = 1234
    max_fall: Annotated[float, Bounds(0, 1e6)] | None = None

    def __post_init__(self) -> None:
        for name in self.tasks:
            if not name or self.tasks.count(name) > 1:
                raise SearchError(f"tasks are {', '.join(self.tasks)}, expected names, each once")
