"""Summary that a search prints at its end."""

from __future__ import annotations

from rich.console import Console

from indexcache_search.console import command, serving
from indexcache_search.eval.tasks import Tasks
from indexcache_search.results import speed_table, tables
from indexcache_search.results.pages import pages
from indexcache_search.results.schema import SearchResult
from indexcache_search.results.words import counted
from indexcache_search.searching.job import Files
from indexcache_search.strategies import DEFAULT_RETAIN
from sglang_indexcache.io.extensions import extensions
from sglang_indexcache.pattern_file.result_folder import CARD, FILES, PATTERN, REPORT

JUDGED = "multi_key,variable_tracking,mrcr"  # tasks that a pattern is judged on, of the extension that makes some


def show(result: SearchResult, model: str | None, files: Files, out: Console) -> None:
    """Print the comparison, the patterns found, where the files are, and what to do next.

    Args:
        result: what was found.
        model: folder or hub id; `None` for the demo.
        files: where it is.
        out: for results.
    """
    held_out, search, cost = result.held_out, result.pattern_file.search, result.cost
    assert search is not None
    for table in tables.terminal_tables(held_out, out.width):
        out.print(table)
    for row in result.found:
        out.print(f"{row.retention or row.name.rpartition(' ')[2]:>4}  {row.pattern}", soft_wrap=True)
    if line := tables.speed_line(held_out):
        out.print(line, soft_wrap=True)
    for table in speed_table.terminal_tables(result.speed, held_out, out.width):
        out.print(table)
    out.print(
        f"Cost: {counted(search.evaluations, 'pattern')} beside the baseline, {cost.sequences} runs of a sequence,"
        f" {cost.share_of_algorithm_1:.1%} of the layer-tokens of Algorithm 1",
        soft_wrap=True,
    )
    made, path = pages(), files.folder / PATTERN
    written = [files.folder / name for name in FILES if made is not None or name not in (REPORT, CARD)]
    out.print(f"Wrote {', '.join(map(str, written))}", soft_wrap=True)
    steps = [] if made is None else [f"read {files.folder / REPORT} in a browser"]
    if model is None:
        shares = ",".join(dict.fromkeys(row.retention for row in result.found if row.retention))
        asked = () if shares in ("", DEFAULT_RETAIN) else ("--retain", shares)
        steps.append(command("indexcache-eval", "--pattern", path, *asked))
    else:
        advised = f"{path}{'' if made is None else made.suffix(result)}"
        if extensions("tasks", Tasks):
            judged = command("--pattern", advised, "--tasks", JUDGED)
            steps.append(f"indexcache-eval {judged} with the same --model: what a search has not seen it may break")
        steps.append(command("indexcache-check", advised, "--model", model))
        steps.append(serving(advised, model, result.pattern_file.selection))
    for number, step in enumerate(steps):
        out.print(f"{'      ' if number else 'Next: '}{step}", soft_wrap=True)
