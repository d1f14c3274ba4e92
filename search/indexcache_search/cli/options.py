"""Options that several commands share, each defined once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from indexcache_search.cli.bounded import BATCH, SEED, TOKENS, TWO_TOKENS, Bounds
from indexcache_search.cli.command import number, option, settings
from indexcache_search.cli.engines import EngineChoice, engine_option
from indexcache_search.cli.extra import extra_option
from indexcache_search.data.templates import RowOptions, Turns, read_template
from indexcache_search.errors import SearchError
from sglang_indexcache.io.errors import IndexCacheError
from sglang_indexcache.pattern import parse_retention
from sglang_indexcache.pattern_file.pattern_name import GRAMMAR

DTYPES = ("float32", "bfloat16", "float16")
ENGINE_DEFAULTS = {"prefix_cache_gb": 1.0}
ATTENTION = "attention (naive: PyTorch's, dense; kernels: this project's, CUDA only; auto: kernels on a CUDA device)"


@dataclass(frozen=True, kw_only=True)
class RowsChoice:
    """Settings for reading the rows of sources; see `RowOptions`."""

    turns: Turns = "auto"
    chat_template: Path | None = None
    skip_bad: Annotated[int, Bounds(0, 1_000_000_000)] = 0


def retentions(text: str) -> tuple[Fraction, ...]:
    """Read shares of layers, separated by commas; duplicates are dropped.

    Raises:
        PatternError: if a word is not a share.
    """
    return tuple(dict.fromkeys(parse_retention(word.strip()) for word in text.split(",")))


def shares(help: str) -> Any:
    """Make an option for shares of layers."""

    def check(value: str | None) -> str | None:
        try:
            retentions(value or "1")
        except IndexCacheError as error:
            raise typer.BadParameter(str(error)) from None
        return value

    return option(help, metavar="SHARE,...", callback=check)


def sources(what: str, default: str = "") -> Any:
    """Make an option for sources of text."""
    return option(f"{what}: file, folder or hub id; repeatable.{default}", metavar="SOURCE")


def selections_of(choice: Any) -> tuple[Any, ...]:
    """List the selections of `--selection`; none if it is not given."""
    return () if choice is None else choice.selections()


def selection_of(choice: Any) -> Any:
    """Return the one selection of `--selection`, or None if it is not given.

    Raises:
        SearchError: if there are several.
    """
    found = selections_of(choice)
    if len(found) > 1:
        raise SearchError(f"--selection names {len(found)} selections, expected one")
    return found[0] if found else None


def row_options(rows: RowsChoice | None) -> RowOptions:
    """Convert the choices of `--rows`.

    Raises:
        IndexCacheError: if the template can't be read.
    """
    rows = rows or RowsChoice()
    text = None if rows.chat_template is None else read_template(rows.chat_template)
    return RowOptions(chat_template=text, turns=rows.turns, skip_bad_rows=rows.skip_bad)


def check_runs_here(device: str, dtype: str | None) -> None:
    """Refuse unknown devices and number formats before PyTorch takes seconds to load.

    Raises:
        SearchError: naming the value found and the values expected.
    """
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,4})?", device):
        raise SearchError(f"--device is {device}, expected auto, cpu, cuda or cuda:N")
    if dtype is not None and dtype not in DTYPES:
        raise SearchError(f"--dtype is {dtype}, expected one of {', '.join(DTYPES)}")


Model = Annotated[str | None, option("Folder or hub id of a model. Default: the demo model.")]
Patterns = Annotated[
    list[str] | None,
    option(f"{GRAMMAR}; repeatable. NAME= before it names it in tables.", "--pattern", metavar="PATTERN"),
]
if TYPE_CHECKING:
    ByteBudget: TypeAlias = Any
    Selection: TypeAlias = Any
    Selections: TypeAlias = Any
    Speed: TypeAlias = Any
    Tasks: TypeAlias = Any
else:
    ByteBudget, Selection, Selections, Speed, Tasks = map(
        extra_option, ("bytes", "selection", "selections", "speed", "tasks")
    )
Retain = Annotated[str, shares("Retentions of pattern files that are named without one.")]
Calibration = Annotated[list[str] | None, sources("Calibration text")]
HeldOut = Annotated[list[str] | None, sources("Held-out text")]
HeldOutOrSame = Annotated[list[str] | None, sources("Held-out text", " Default: set aside from the other sources.")]
ROW_KEYS = (
    "How rows are read. Keys: turns of a conversation (all: one text; each: a text for each reply; last: up to the"
    " last; auto: all, or each where the template writes earlier turns otherwise once others follow), chat_template"
    " (a file; the tokenizer's Jinja template), skip_bad (rows of a source that may be skipped; 0)"
)
Rows = Annotated[RowsChoice | None, settings(RowsChoice, f"{ROW_KEYS}.")]
DryRun = Annotated[bool, option("Show what is read of the data, and end before anything loads.", "--dry-run")]
SeqLen = Annotated[
    int | None,
    number(
        "Tokens of a sequence; more than a query selects: index_topk (DeepSeek-V4: 4 x index_topk; dense models: pages"
        " x page_tokens; the largest, of several). Default: 4 times as many, for the demo 512.",
        TOKENS,
    ),
]
Reply = Annotated[
    int | None,
    number(
        "Count the last tokens of each sequence alone, so many; before them is a prompt. Default: all tokens, or a"
        " quarter where layers select for blocks of prompt queries (indexcache-search --prefill, patterns such as"
        " FSSF+3q16). Fewer tokens take more sequences.",
        TWO_TOKENS,
    ),
]
Seed = Annotated[int, number("Order of the documents.", SEED)]
Engine = Annotated[
    EngineChoice | None,
    engine_option(
        f"What runs the model. Keys: {ATTENTION}, prefix_cache_gb (memory for layer outputs, the GPU's where four times"
        " as much is free, else the host's; 1; of dense models as much again for keys of prompts).",
    ),
]
Device = Annotated[str, option("auto, cpu, cuda or cuda:N.")]
Dtype = Annotated[str, option("float32, bfloat16 or float16.")]
BatchSize = Annotated[int, number("Sequences of a forward.", BATCH)]
WorkDir = Annotated[Path | None, option("Folder of the journal. Default: OUTPUT/work.")]
Restart = Annotated[bool, option("Discard what an earlier run kept, and start afresh.", "--restart")]
