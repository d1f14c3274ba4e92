"""Features of DSA alone: F layers that select in blocks, ranks that share out rows, blocks that attend together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from sglang_indexcache.families.base import SglangAdapter
from sglang_indexcache.families.dsa import needs
from sglang_indexcache.families.dsa.sglang import DsaSglang
from sglang_indexcache.io.errors import ProofError
from sglang_indexcache.io.refusal import SHARD_FLAG
from sglang_indexcache.pattern import FULL, Pattern
from sglang_indexcache.pattern.indexer_setting import IndexerSetting
from sglang_indexcache.sglang.meaning import INTERLEAVE, Meaning, context_ranks
from sglang_indexcache.sglang.probes import Feature

if TYPE_CHECKING:
    from sglang_indexcache.families.dsa.blocks.grouped import GroupedAttention

_LEAVES_OUT = (  # --dsa-prefill-backend: kernels that leave out -1, with which the rows of a block end
    *("flashmla_sparse", "flashmla_sparse_q8", "flashmla_kv", "flashmla_auto"),
    *("triton_sparse_mla", "triton", "tilelang"),
)


class BlocksAdapter(DsaSglang):
    """An adapter of models whose F layers may select for blocks of prompt queries.

    Attributes:
        blocks: what SGLang must have for such layers.
        context: what it must have for such layers where context parallelism shares out prompts.
        refused_with_blocks: like `refused_flags`, for patterns with such layers.
        refused_with_unions: likewise, where prompts attend over unions of selections.
        sharding: what SGLang must have so that tensor-parallel ranks share out the rows of prompts.
        grouping: what SGLang must have so that the queries of a block attend together; `None` where they never do, and
            prompts don't attend over unions of selections either.
    """

    blocks: ClassVar[Feature] = needs.BLOCKS
    context: ClassVar[Feature] = needs.CONTEXT
    sharding: ClassVar[Feature] = needs.SHARDING
    grouping: ClassVar[Feature | None] = needs.GROUPING
    refused_with_blocks: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("dcp_size", "enable_hisparse", "enable_dsa_cache_layer_split"),
        "layers that select for blocks of queries were never tried with it",
    )

    refused_with_unions: ClassVar[Mapping[str, str]] = dict.fromkeys(
        (
            *("enable_prefill_cp", "attn_cp_size", "dcp_size", "enable_hisparse", "enable_two_batch_overlap"),
            "enable_deterministic_inference",
        ),
        "they were never tried together, and a token's rounding depends on its neighbours",
    )

    def refused_beside(self, pattern: Pattern, shard: bool, arguments: Any) -> dict[str, str]:
        """Return attributes of SGLang's arguments that can't be given beside blocks, or rows that are shared out.

        Each has what it can't be combined with, and why. `arguments` are SGLang's, or a launch line.
        """
        refused, context = {}, ("enable_prefill_cp", "attn_cp_size")
        if pattern.indexers:
            refused = {name: f"{pattern.indexers[0]}: {reason}" for name, reason in self.refused_with_blocks.items()}
            if context_ranks(arguments) == 1:
                line = (
                    f"{pattern.indexers[0]}: expected --enable-prefill-cp --cp-strategy {INTERLEAVE} --attn-cp-size N"
                )
                refused |= dict.fromkeys(context, line)
        elif shard:
            refused = dict.fromkeys(self.refused_with_blocks, f"{SHARD_FLAG}: they were never tried together")
        if shard:
            refused |= dict.fromkeys(context, f"{SHARD_FLAG}: it shares out the rows of prompts already")
        return refused

    def needed(self, pattern: Pattern) -> tuple[Feature, ...]:
        """See `SglangAdapter.needed`; one more if layers select in blocks."""
        return (self.blocks,) if pattern.indexers else ()

    def loaded(self, runner: Any, pattern: Pattern) -> None:
        """See `SglangAdapter.loaded`."""
        if pattern.indexers:
            from sglang_indexcache.families.dsa.blocks import patch_indexers
            from sglang_indexcache.families.dsa.blocks.context import ONE_RANK, context_of_this_rank

            here = context_of_this_rank() if context_ranks(runner.server_args) > 1 else ONE_RANK
            patch_indexers.install(self.modules(runner.model), pattern, here)

    def share_rows(self, runner: Any, pattern: Pattern) -> None:
        """Make the F layers of a `ModelRunner` select for this rank's part of the rows of prompts, after `loaded`.

        It is called only where SGLang has `sharding`.

        Raises:
            ProofError: if that can't be done, or there is one rank.
        """
        from sglang_indexcache.families.dsa.blocks import patch_indexers
        from sglang_indexcache.families.dsa.blocks.shards import shards_of_this_rank

        patch_indexers.share_rows(self.modules(runner.model), pattern, shards_of_this_rank())

    def captured(self, runner: Any, pattern: Pattern) -> None:
        """See `SglangAdapter.captured`; prompts must attend through a kernel that leaves out -1."""
        if pattern.indexers:
            kernel = getattr(_prefill_backend(runner), "dsa_prefill_impl", None)
            if kernel not in _LEAVES_OUT:
                raise ProofError(
                    f"--dsa-prefill-backend {kernel} can't be combined with {pattern.indexers[0]}: it may read as many"
                    f" keys for every query; expected one of {', '.join(_LEAVES_OUT)}"
                )

    def saved(self, runner: Any) -> Mapping[str, int]:
        """See `SglangAdapter.saved`; also what scores of the longest prompt take that fits."""
        from sglang_indexcache.families.dsa.blocks.selection import scored_rows

        meant, (indexers, shared, _) = Meaning(runner.server_args), self.read_back(runner.model)
        queries = {item.layer: item.queries for item in indexers}
        context = int(meant.attn_cp_size or 1) if meant.enable_prefill_cp else 1
        length = min(runner.model_config.context_len, runner.max_total_num_tokens)
        chunk = runner.server_args.chunked_prefill_size or 0  # less than 1: prompts are read at once
        last = min(chunk, length) if chunk > 0 else length
        rows = (
            scored_rows(length - last, last, module.indexer.index_topk, queries.get(layer, 1), shared.get(layer, 1))
            for layer, module in self.modules(runner.model)
            if self.role(layer, module) == FULL
        )
        return {**super().saved(runner), "prompt_score_bytes": 4 * length * -(-max(rows, default=0) // context)}

    def group(
        self, runner: Any, pattern: Pattern, *, together: bool = True, unions: bool = False
    ) -> GroupedAttention | None:
        """Change how prompts attend in a `ModelRunner`, after `captured`, and return what attends, if anything does.

        With `together` from the queries of blocks together, where that can be done; with `unions` over unions of the
        selections of queries that are in no blocks.

        Raises:
            ProofError: if what it would call is not what was read, something else has replaced a part of it, or it
                can't attend over unions here.
        """
        if self.grouping is None or not ((pattern.indexers and together) or unions):
            return None
        from sglang_indexcache.families.dsa.blocks import grouped
        from sglang_indexcache.families.dsa.exact import exact_attention

        backend, modules = _prefill_backend(runner), dict(self.modules(runner.model))
        found = grouped.placed(backend)
        if found is None:  # else graphs are captured again after an update
            exact = exact_attention().on(backend, pattern, modules, runner.kv_cache_dtype) if unions else None
            heads = {layer: module.num_local_heads for layer, module in modules.items() if together}
            found = grouped.place(backend, pattern, heads, context_ranks(runner.server_args), exact)
        return found

    def read_back(self, model: Any) -> tuple[tuple[IndexerSetting, ...], Mapping[int, int], Mapping[int, int]]:
        """Read from the indexers of the loaded model which layers of this rank would select in blocks.

        Returns:
            Those layers, for each layer that shares out rows over how many ranks, and for each layer that selects in
            blocks over how many ranks of context parallelism.

        Raises:
            ProofError: if an indexer does not show it.
        """
        from sglang_indexcache.families.dsa.blocks import patch_indexers

        return patch_indexers.read_back(self.modules(model))


def with_blocks(adapter: SglangAdapter) -> BlocksAdapter | None:
    """Return an adapter if its models may have blocks, else `None`."""
    return adapter if isinstance(adapter, BlocksAdapter) else None


def _prefill_backend(runner: Any) -> Any:
    return getattr(runner.attn_backend, "prefill_backend", runner.attn_backend)
