"""The flags of a launch line of SGLang, read without SGLang: it takes seconds to import, and may not be there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

_SHORT = {  # SGLang's other names of flags
    "tp": "tp_size",
    "tensor_parallel_size": "tp_size",
    "dp": "dp_size",
    "data_parallel_size": "dp_size",
    "pp": "pp_size",
    "pipeline_parallel_size": "pp_size",
    "ep": "ep_size",
    "expert_parallel_size": "ep_size",
    "attention_context_parallel_size": "attn_cp_size",
    "decode_context_parallel_size": "dcp_size",
    "model": "model_path",
}


@dataclass(frozen=True)
class LaunchLine:
    """Flags of a launch line under the names of SGLang's server arguments; any other attribute is `None`.

    Attributes:
        given: their values: `True` without one, numbers as `int`.
    """

    given: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, words: Sequence[str]) -> LaunchLine:
        """Read `--flag value`, `--flag=value` and `--flag`, the last one if a flag is there twice."""
        return cls(dict(_flags(words)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.given.get(name)


def _flags(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for place, word in enumerate(words):
        if not word.startswith("--"):
            continue
        name, mark, value = word[2:].partition("=")
        name = name.replace("-", "_")
        if not mark:
            after = words[place + 1] if place + 1 < len(words) else "--"
            value = "" if after.startswith("--") else after
        number = int(value) if value.isdecimal() else value
        yield _SHORT.get(name, name), True if value == "" and not mark else number
