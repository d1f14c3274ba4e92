"""Options of commands about patterns of dense models."""

from __future__ import annotations

from indexcache_dense.reuse import GRAMMAR
from indexcache_dense.selection_choice import MOST, SelectionChoice
from indexcache_dense.strategies.byte_budget import ByteBudget
from indexcache_search.cli.extra import ExtraOption


def _selection(more: str, example: str = "") -> ExtraOption:
    """Make `--selection`; `more` is text about its use and about repeating it."""
    return ExtraOption(
        kind=SelectionChoice,
        help=f"Dense models: what layers attend to{more}. Keys: pages (64), page_tokens (16; with compressed_keys 64),"
        " recent_pages (the newest; one in 8, or 4), sink_pages (the first; 0, or 1), score (token_max,"
        " compressed_keys or rounded_keys), heads (joint, or key: each key head chooses for itself), steps, what a"
        f" choice remembers ({GRAMMAR}).",
        example=example,
    )


SELECTION = _selection(
    "",
    """\b
  indexcache-search --model Qwen/Qwen3-8B --calibration traces.jsonl --retain 1/6 --selection pages=64 --seq-len 8192
      A dense model: which layers attend to everything, and which to 64 pages that those chose (docs/dense-models.md).
""",
)
SELECTIONS = _selection(f", in the place of the file's; with pages=16/64 or steps=none/ema:0.9 each, up to {MOST}")
BYTES = ExtraOption(
    kind=ByteBudget,
    help="Of a dense model, also find the pattern of D, F and S of least loss whose decode steps read at most this"
    " share of the keys and values that layers that are all D read: 0.15, or 0.15@32768 for 32,768 tokens in the cache"
    " (16384). Needs --selection score=compressed_keys or rounded_keys.",
    first="SHARE",
    example="""\b
  indexcache-search --model Qwen/Qwen3-8B --calibration traces.jsonl --seq-len 8192 --bytes 0.1 \\
        --selection score=compressed_keys,page_tokens=16,pages=64
      Steps that read at most a tenth of the cache of 16,384 tokens: F layers select for themselves, beside D and S.
""",
)
