"""What published patterns gain, by latency tables: for `indexcache-check --known`."""

from __future__ import annotations

from indexcache_published.known import KnownPattern
from indexcache_search.results.tables import tokens
from indexcache_search.strategies.budget.pricing import BY_ARCHITECTURE, whole_tables
from indexcache_search.strategies.budget.table import LatencyTable
from sglang_indexcache import Pattern
from sglang_indexcache.families import describe, family_of


def estimates(known: KnownPattern) -> list[str]:
    """Return what a pattern gains, by tables of whole models, or by the architecture's table of layers without any."""
    return [line_of(table, known.pattern) for table in tables_for(known.file.model.architecture, known.pattern)]


def tables_for(architecture: str, pattern: Pattern) -> list[LatencyTable]:
    """Return the tables of the shape that an architecture has by default, with as many layers as the pattern."""
    usual = family_of(architecture).checkpoint.keys[architecture].defaults
    model = describe({**usual, "architectures": [architecture], "num_hidden_layers": len(pattern)}, architecture)
    table = LatencyTable.load(BY_ARCHITECTURE[architecture]) if architecture in BY_ARCHITECTURE else None
    return whole_tables(model) or ([] if table is None or table.unlike(model) else [table])


def line_of(table: LatencyTable, pattern: Pattern) -> str:
    """Say how much faster the shortest and the longest prompts of a table are with a pattern than with all `F`."""
    native, ends = Pattern.full(len(pattern)), sorted({table.contexts[0], table.contexts[-1]})
    prices = [table.at(context) for context in ends]
    prompts = ", ".join(f"{1 / each.prompt_share(pattern, native):.2f}x at {tokens(each.context)}" for each in prices)
    return f"prefill {prompts}; decode {1 / prices[-1].decode_share(pattern, native):.2f}x, by {table}"
