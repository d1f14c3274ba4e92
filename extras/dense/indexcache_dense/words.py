"""How tables, pages and cards speak of patterns of dense models, which decode over pages."""

from __future__ import annotations

from indexcache_report.words import Words

PAGES = Words(
    sharing="Page sharing",
    question="Which layers of {} need all keys",
    what="In each layer every token that is decoded attends to all tokens before it, which takes time. A layer can"
    " attend to a few pages of the cache instead, which a layer before it selected. Then decoding gets faster, and the"
    " wrong layers cost quality; prompts are read as ever.",
    rest="the layers that a few pages are enough for",
    full="layers that attend to everything",
    short="D layers",
    letters="while decoding, D attends to everything, F to pages that it selects by a digest of the keys, S to those"
    " that the D or F before it selected",
    paper=("DELTA", "https://arxiv.org/abs/2510.09883"),
    card="Which layers of {} attend to everything while decoding (D),\n"
    "and which attend to a few pages of the cache that the nearest layer before them selected (S), or select by a"
    " digest of the keys (F)",
)
