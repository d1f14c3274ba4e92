"""Make SGLang run a pattern on DSA models, through its own configuration, and read its attention modules back.

`DeepseekV2AttentionMLA` decides while it is built: `skip_topk` says whether its indexer stays quiet, `next_skip_topk`
whether its indices are handed to the layer above. Read: sglang/srt/models/deepseek_v2.py of 0.5.17 and 0.5.23.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from pkgutil import resolve_name
from typing import Any, ClassVar

from sglang_indexcache.families.base import SglangAdapter
from sglang_indexcache.families.dsa import needs
from sglang_indexcache.families.dsa.heads import HeadTrouble, selection_troubles, troubles
from sglang_indexcache.families.dsa.override import (
    FREQ_KEY,
    PATTERN_KEY,
    SHARING_KEYS,
    TYPES_KEY,
    meanings,
    to_sglang,
)
from sglang_indexcache.io.errors import ProofError, SpellingError
from sglang_indexcache.model.layers import ModelLayers
from sglang_indexcache.model.name import ModelName
from sglang_indexcache.pattern import FULL, SHARED, Pattern
from sglang_indexcache.sglang.attention import CountedAttention, exactly
from sglang_indexcache.sglang.override_flag import FLAG
from sglang_indexcache.sglang.probes import Feature, Need, SglangError, SglangSource


class DsaSglang(SglangAdapter):
    """An adapter that hands SGLang the pattern in its configuration, which SGLang reads while it builds the model.

    It is of all models whose attention is `DeepseekV2AttentionMLA`.

    Attributes:
        rule: what SGLang must have to say itself which layers would run.
    """

    rule: ClassVar[Feature] = needs.RULE

    def head_troubles(self, model: ModelLayers, arguments: Any) -> Iterator[HeadTrouble]:
        """See `SglangAdapter.head_troubles`."""
        keys = self.checkpoint.keys[model.architecture]
        yield from troubles({**keys.defaults, **model.config}["num_attention_heads"], arguments)
        yield from selection_troubles(model.index_topk, arguments)

    def to_overrides(self, overrides: Mapping[str, Any], pattern: Pattern) -> dict[str, Any]:
        """See `SglangAdapter.to_overrides`; in every spelling that SGLang 0.5.11 to 0.5.23 reads.

        Each sharing key that the user gives is read on its own, since versions differ in which one wins.
        """
        self.checkpoint.check_overrides(overrides)
        self.needed(pattern)
        pattern = pattern.plain()
        if overrides.get("num_hidden_layers", len(pattern)) != len(pattern):
            raise SpellingError(
                f"{FLAG}: num_hidden_layers is {overrides['num_hidden_layers']}, the pattern has {len(pattern)}"
                " letters; expected a file made for that model"
            )
        if (overrides.get("cli_factor") or 1) != 1:
            raise SpellingError(
                f"{FLAG}: cli_factor is {overrides['cli_factor']}, which wins over any pattern; expected none"
            )
        try:
            meant = meanings(overrides, len(pattern))
        except SpellingError as error:
            raise SpellingError(f"{FLAG}: {error}") from None
        for key, other in meant.items():
            if other != pattern and (key != FREQ_KEY or overrides[key] != 1):
                raise SpellingError(f"{FLAG}: {key} means {other}, the pattern file {pattern}; expected one of them")
        return {**{key: value for key, value in overrides.items() if key not in SHARING_KEYS}, **to_sglang(pattern)}

    def would_run(self, source: SglangSource, model: str, overrides: Mapping[str, Any], letters: int) -> str:
        """Ask the installed SGLang's own code which roles it would run.

        Build the configuration object as a server would, and call the one function that model construction and KV
        pools call (0.5.14 and newer).

        `source` is the SGLang that `import sglang` takes; `overrides` are merged into the model's configuration.

        Raises:
            SglangError: if that code can't be called, or refuses the model.
        """
        source.require(needs.RULE)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SGLang's imports warn of every device that is not there
            get_config, skips_topk = _imported(needs.CONFIG_READER), _imported(needs.SKIPS)
        named = ModelName.parse(model)
        revision = {"revision": named.revision} if named.revision else {}
        try:
            config = get_config(
                named.repository, trust_remote_code=False, model_override_args=dict(overrides), **revision
            )
            return "".join(SHARED if skips_topk(config, layer) else FULL for layer in range(letters))
        except Exception as error:  # whatever SGLang or transformers raise on a model they don't take
            reason = " ".join(str(error).split())[:160] or type(error).__name__
            raise SglangError(f"SGLang {source.version} refuses {model}: {reason}") from None

    def saved(self, runner: Any) -> Mapping[str, int]:
        """See `SglangAdapter.saved`: index keys and indexers that S layers have not, which depends on SGLang."""
        pool = getattr(runner, "token_to_kv_pool", None)
        keys = [buffer for buffer in getattr(pool, "index_k_with_scale_buffer", None) or () if buffer is not None]
        full = [buffer for buffer in keys if len(buffer)]
        indexers = [self.indexer(module) for _, module in self.modules(runner.model)]
        weights = max((_bytes_of(indexer) for indexer in indexers if indexer is not None), default=0)
        each = full[0][0].nbytes // pool.page_size if full and pool is not None else 0
        return {
            "saved_kv_bytes_per_token": each * (len(keys) - len(full)),
            "saved_weight_bytes": weights * sum(indexer is None for indexer in indexers),
        }

    def attentions(self, model: Any, pattern: Pattern, draft: bool) -> Iterator[CountedAttention]:
        """See `SglangAdapter.attentions`; a NextN layer selects unless indices are handed to it."""
        if draft:
            modules = [module for module in model.modules() if _shares(module) and getattr(module, "is_nextn", False)]
            for number, module in enumerate(modules):
                drafts = partial(_of_a_draft, module)
                yield CountedAttention(number, module, self.indexer(module), drafts, direct=needs.DIRECT)
            return
        for site, module in self.modules(model):
            allowed = exactly(int(pattern[site] == FULL))
            yield CountedAttention(site, module, self.indexer(module), allowed, needs.PREFILL, needs.DIRECT)

    def modules(self, model: Any) -> Iterator[tuple[int, Any]]:
        """See `SglangAdapter.modules`."""
        for module in model.modules():
            if _shares(module) and not getattr(module, "is_nextn", False):  # NextN modules always run their own indexer
                yield module.layer_id, module

    def role(self, site: int, module: Any) -> str:
        """See `SglangAdapter.role`; SGLang's own decision where it has one (0.5.15 and newer), else what it reads."""
        decide = getattr(module, "should_run_indexer", None)
        runs = not module.skip_topk if decide is None else bool(decide(object()))  # with indices carried to it
        if runs != (not module.skip_topk):
            raise ProofError(f"layer {site} decides by something else than skip_topk whether its indexer runs")
        return FULL if runs else SHARED

    def indexer(self, module: Any) -> Any:
        """See `SglangAdapter.indexer`."""
        return getattr(module, "indexer", None)

    def switch(self, runner: Any, pattern: Pattern) -> None:
        """See `SglangAdapter.switch`; also write the configuration that pipeline stages read."""
        for layer, module in self.modules(runner.model):
            module.skip_topk = pattern[layer] == SHARED
            module.next_skip_topk = layer + 1 < len(pattern) and pattern[layer + 1] == SHARED
        config = runner.model_config.hf_config
        for key, value in to_sglang(pattern).items():
            if key != TYPES_KEY or getattr(config, TYPES_KEY, None) is not None:
                setattr(config, key, value)

    def configured(self, runner: Any) -> str:
        """See `SglangAdapter.configured`; empty where a freq says something else."""
        config = runner.model_config.hf_config
        return str(getattr(config, PATTERN_KEY)) if getattr(config, FREQ_KEY) == 1 else ""


def by_configuration(adapter: SglangAdapter) -> DsaSglang | None:
    """Return an adapter if SGLang reads the roles of its models from their configuration, else `None`."""
    return adapter if isinstance(adapter, DsaSglang) else None


def _bytes_of(module: Any) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def _shares(module: Any) -> bool:
    return getattr(module, "skip_topk", None) is not None and hasattr(module, "next_skip_topk")


def _of_a_draft(module: Any, given: Mapping[str, Any]) -> tuple[int, ...]:
    handed_over = module.skip_topk and given.get("prev_topk_indices") is not None
    return (0, 1) if handed_over else (1,)  # dense prefill fills its index keys either way


def _imported(need: Need) -> Any:
    try:
        return resolve_name(f"sglang.{need.module}:{need.name}")
    except ImportError as error:
        raise SglangError(f"sglang.{need.module} can't be imported here: {error}") from None
