"""List for each feature of SGLang whether a pattern ran with it, is refused with it, or never ran with it.

`launch_server` and `indexcache-check --server-args` say it of a launch line, docs/reference/compatibility.md of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sglang_indexcache.families import family_of
from sglang_indexcache.families.base import Family
from sglang_indexcache.families.dsa import DSA
from sglang_indexcache.files.spec import PatternSpec
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.counted import kinds_of
from sglang_indexcache.serving.preflight import refusals_of

RAN, REFUSED, NOT_RUN = "ran", "refused", "not run"
_CPU = "SGLang 0.5.23 on CPUs"
_GPU = "SGLang 0.5.17 on an H100"
_BOTH, _BOTH_ON_TWO = f"{_CPU}; {_GPU}", f"{_CPU}; SGLang 0.5.17 on two H100"


@dataclass(frozen=True)
class Combination:
    """A feature of SGLang.

    Attributes:
        name: as SGLang's documentation calls it.
        flags: the flags that ask for it.
        ran: where it ran; empty if nowhere.
        asked: whether server arguments ask for it.
        without: what was not run, of one that ran in part.
    """

    name: str
    flags: tuple[str, ...]
    ran: str
    asked: Callable[[Any], bool]
    without: str = ""

    @property
    def verdict(self) -> Verdict:
        """Return whether a pattern ran with it, and where."""
        if not self.ran:
            return Verdict(NOT_RUN, self.name, self.without)
        return Verdict(RAN, self.name, self.ran + (f"; not run: {self.without}" if self.without else ""))


@dataclass(frozen=True)
class Verdict:
    """The answer for one feature that a launch line asks for.

    Attributes:
        state: `RAN`, `REFUSED` or `NOT_RUN`.
        name: the feature; of a refused one the flag.
        why: where it ran, why it is refused, or what is known all the same.
    """

    state: str
    name: str
    why: str

    @property
    def line(self) -> str:
        """One line for people."""
        return f"{self.state}: {self.name}" + (f" ({self.why})" if self.why else "")


def _more_than_one(name: str) -> Callable[[Any], bool]:
    return lambda arguments: (getattr(arguments, name, None) or 1) > 1


def _given(*names: str) -> Callable[[Any], bool]:
    return lambda arguments: any(getattr(arguments, name, None) for name in names)


def _drafts(arguments: Any) -> str:
    return str(getattr(arguments, "speculative_algorithm", None) or "").upper()


def _chains(arguments: Any) -> bool:
    return _drafts(arguments) in ("EAGLE", "NEXTN") and (getattr(arguments, "speculative_eagle_topk", None) or 1) == 1


def _context(arguments: Any) -> bool:
    """Return whether arguments ask for context parallelism, under the flags of any SGLang."""
    older = _given("enable_prefill_cp", "enable_prefill_context_parallel", "enable_dsa_prefill_context_parallel")
    return older(arguments) or any(_more_than_one(name)(arguments) for name in ("attn_cp_size", "dcp_size"))


def _interleaved(arguments: Any) -> bool:
    prefill = _given("enable_prefill_cp")(arguments) and not _more_than_one("dcp_size")(arguments)
    return bool(prefill) and getattr(arguments, "cp_strategy", None) == "interleave"


def _type_of_cache(arguments: Any) -> str:
    return str(getattr(arguments, "kv_cache_dtype", None) or "auto")


COMBINATIONS = (
    Combination("tensor parallelism", ("--tp-size",), _BOTH_ON_TWO, _more_than_one("tp_size")),
    Combination("pipeline parallelism", ("--pp-size",), _CPU, _more_than_one("pp_size")),
    Combination("data-parallel attention", ("--enable-dp-attention",), _BOTH_ON_TWO, _given("enable_dp_attention")),
    Combination("data-parallel LM head", ("--enable-dp-lm-head",), _BOTH_ON_TWO, _given("enable_dp_lm_head")),
    Combination(
        "expert parallelism",
        ("--ep-size",),
        _BOTH_ON_TWO,
        _more_than_one("ep_size"),
        "DeepEP and other --moe-a2a-backend",
    ),
    Combination("all-to-all of experts", ("--moe-a2a-backend",), "", lambda a: a.moe_a2a_backend not in (None, "none")),
    Combination("MTP/NextN, EAGLE", ("--speculative-algorithm EAGLE",), _BOTH, _chains),
    Combination(
        "other drafts",
        ("--speculative-algorithm", "--speculative-eagle-topk"),
        "",
        lambda arguments: bool(_drafts(arguments)) and not _chains(arguments),
    ),
    Combination(
        "context-parallel prefill",
        ("--enable-prefill-cp", "--cp-strategy interleave"),
        _BOTH_ON_TWO,
        _interleaved,
    ),
    Combination(
        "other context parallelism",
        ("--cp-strategy zigzag", "--attn-cp-size", "--dcp-size"),
        "",
        lambda arguments: _context(arguments) and not _interleaved(arguments),
    ),
    Combination(
        "prefill and decode apart",
        ("--disaggregation-mode",),
        _CPU + ", by Mooncake over TCP; servers with other patterns refuse each other's handshake",
        lambda arguments: getattr(arguments, "disaggregation_mode", None) in ("prefill", "decode"),
        "other transfers",
    ),
    Combination("mixed chunks", ("--enable-mixed-chunk",), _BOTH, _given("enable_mixed_chunk")),
    Combination(
        "HiCache",
        ("--enable-hierarchical-cache",),
        _GPU,
        _given("enable_hierarchical_cache"),
        "its storage, whose keys carry the pattern",
    ),
    Combination("HiSparse", ("--enable-hisparse",), _GPU, _given("enable_hisparse")),
    Combination(
        "LoRA",
        ("--enable-lora", "--lora-paths"),
        "",
        _given("enable_lora", "lora_paths"),
        "SGLang 0.5.17 fails to import it for DSA; 0.5.23 needs a GPU for it",
    ),
    Combination(
        "fp8 KV cache", ("--kv-cache-dtype fp8_e4m3",), _GPU, lambda arguments: "fp8" in _type_of_cache(arguments)
    ),
    Combination("fp4 KV cache", ("--kv-cache-dtype fp4_e2m1",), "", lambda a: "fp4" in _type_of_cache(a)),
    Combination(
        "torch.compile",
        ("--enable-torch-compile",),
        "",
        _given("enable_torch_compile"),
        "SGLang 0.5.17's indexer can't be compiled",
    ),
    Combination(
        "graphs of prompts",
        ("--cuda-graph-backend-prefill", "--enable-piecewise-cuda-graph"),
        _GPU,
        lambda arguments: (
            getattr(arguments, "cuda_graph_backend_prefill", None) not in (None, "disabled")
            or bool(getattr(arguments, "enable_piecewise_cuda_graph", None))
        ),
        "counting in what torch.compile traces (tc_piecewise)",
    ),
    Combination(
        "deterministic inference",
        ("--enable-deterministic-inference",),
        "",
        _given("enable_deterministic_inference"),
        "SGLang 0.5.17 and 0.5.23 refuse it with their DSA backend",
    ),
    Combination("several nodes", ("--nnodes",), "", _more_than_one("nnodes")),
    Combination(
        "replicas",
        ("--dp-size",),
        "SGLang 0.5.23 on CPUs",
        lambda a: (a.dp_size or 1) > 1 and not a.enable_dp_attention,
    ),
)


def verdicts(pattern: Pattern, family: Family, arguments: Any, shard: bool = False) -> Iterator[Verdict]:
    """Yield what is known of the features that server arguments ask for, the refused ones first.

    Args:
        pattern: the pattern to serve.
        family: the model's family.
        arguments: SGLang's server arguments, or a launch line.
        shard: whether indexers are shared out.
    """
    refused = list(refusals_of(pattern, family, arguments, shard))
    for given, why in refused:
        yield Verdict(REFUSED, given, why)
    for item in COMBINATIONS:
        if item.asked(arguments) and not {given for given, _ in refused} & {*item.flags}:
            found = item.verdict
            compared = family is DSA and not pattern.indexers and not shard
            if found.state == RAN and not compared:
                found = Verdict(NOT_RUN, item.name, f"compared with F and S on DSA models alone: {item.ran}")
            yield found


def family_in(spec: PatternSpec) -> Family:
    """Return the family that a pattern file was made for; DSA where a pattern names no model."""
    return DSA if spec.file is None else family_of(spec.file.model.architecture)


def proven_first(arguments: Any) -> str:
    """Return one line that says what is proven of these server arguments before a request of a user is served."""
    kinds = sorted(kinds_of(arguments) | (kinds_of(arguments, draft=True) if _drafts(arguments) else frozenset()))
    return f"proven before it serves: role and weights of every layer and rank; counted in {', '.join(kinds)} passes"
