"""`--speed` of indexcache-eval."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from indexcache_search.cli.bounded import Bounds
from indexcache_search.cli.extra import ExtraOption
from indexcache_search.errors import SearchError

CONTEXTS = Bounds(64, 1 << 24, "no model was made for more")


@dataclass(frozen=True, kw_only=True)
class SpeedChoice:
    """Prompts whose speed is compared; see `SpeedOptions`. `None` leaves a setting to it."""

    contexts: tuple[Annotated[int, CONTEXTS], ...]
    output_tokens: Annotated[int, Bounds(2, 65_536)] | None = None
    turns: Annotated[int, Bounds(5, 1000, "the spread hardly changes")] | None = None
    prices: str | None = None

    def __post_init__(self) -> None:
        if len(set(self.contexts)) < len(self.contexts):
            raise SearchError(f"contexts are {', '.join(map(str, self.contexts))}, expected each once")

    def given(self) -> dict[str, Any]:
        """Return the settings that are given."""
        return {name: value for name, value in vars(self).items() if value is not None}


SPEED = ExtraOption(
    kind=SpeedChoice,
    help="Compare the speed of prompts of so many tokens beside the loss: with --endpoint timed on SGLang's servers,"
    " in turns, without it estimated. Keys: output_tokens (generated behind each; 64), turns (5); of estimates:"
    " prices (a latency table: glm-5-tp8, glm-5-dp, deepseek-v3.2-tp8 or a file; the model's).",
    first="TOKENS,...",
)
