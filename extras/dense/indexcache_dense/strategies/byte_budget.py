"""The bytes that a decode step of a dense model may read: `--bytes` of indexcache-search."""

from __future__ import annotations

from dataclasses import dataclass

from indexcache_dense.selection import OWN_SCORES, Selection
from indexcache_dense.strategies.page_bytes import PageBytes, PageGoal
from indexcache_dense.strategies.page_search import PageSearch
from indexcache_search.cli.bounded import ShareAt
from indexcache_search.errors import SearchError
from indexcache_search.strategies.base import BudgetRequest
from sglang_indexcache import ModelLayers


@dataclass(frozen=True)
class ByteShare(ShareAt):
    """A share of the bytes that a decode step reads of keys and values, and the tokens in the cache it is meant for."""

    context: int = 16_384


@dataclass(frozen=True, kw_only=True)
class ByteBudget(BudgetRequest):
    """Bytes that a decode step may read of keys and values, relative to layers that are all D."""

    option = "--bytes"
    strategy = PageSearch

    share: ByteShare

    def goal(self, model: ModelLayers) -> PageGoal:
        """See `BudgetRequest.goal`: a pattern with F layers beside D."""
        selection, share = model.native.selection, self.share
        if not isinstance(selection, Selection):
            raise SearchError("--bytes is about pages of dense models, the model has indexers")
        if selection.score not in OWN_SCORES:
            raise SearchError(f"--bytes needs --selection score={' or '.join(OWN_SCORES)}, which F layers select by")
        if share.context <= selection.tokens:
            raise SearchError(
                f"--bytes is of {share.context} tokens, expected more than the {selection.tokens} of a selection"
            )
        return PageGoal(share=share.share, bytes=PageBytes(selection=selection, context=share.context))
