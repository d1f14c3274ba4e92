"""`--tasks` of indexcache-eval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from indexcache_search.cli.bounded import Bounds
from indexcache_search.cli.extra import ExtraOption
from indexcache_search.eval.tasks import Sample, Tasks
from indexcache_tasks import tasks


@dataclass(frozen=True, kw_only=True)
class TasksChoice:
    """Generated tasks; see `tasks`."""

    names: tuple[str, ...]
    samples: Annotated[int, Bounds(2, 10_000)] = 16
    haystack: str = "demo:text"
    chat: bool = False

    def __post_init__(self) -> None:
        GENERATED.check(self.names)


class GeneratedTasks(Tasks):
    """Those of `tasks`."""

    names = tuple(tasks.TASKS)

    def sample(
        self, task: str, tokenizer: Any, haystack: Sequence[int], seq_len: int, seed: int, *, chat: bool
    ) -> Sample:
        """See `Tasks.sample`."""
        return tasks.sample(task, tokenizer, haystack, seq_len, seed, chat=chat)


TASKS = ExtraOption(
    kind=TasksChoice,
    help=f"Generated tasks: {', '.join(tasks.TASKS)}. Keys: samples (of each; 16), haystack (source of the text around"
    " needles; demo:text), chat (yes: ask through the chat template).",
    first="NAME,...",
)

GENERATED = GeneratedTasks()
