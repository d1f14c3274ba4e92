"""Options that several experiments share."""

from __future__ import annotations

from typing import Annotated

from indexcache_search.cli.bounded import TOKENS, Bounds
from indexcache_search.cli.command import number, option

GIGABYTES = Bounds(0, 1e6)

DenseModel = Annotated[str, option("Folder or hub id of a dense model.")]
Length = Annotated[int, number("Tokens of a sequence.", TOKENS)]
