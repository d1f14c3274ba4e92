"""Meanings of server arguments, under one name whatever SGLang: flags were renamed, and some say the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

_OFF = (None, False, "", "null", "none")
INTERLEAVE, ZIGZAG = "interleave", "zigzag"
BREAKABLE, TC_PIECEWISE, DISABLED = "breakable", "tc_piecewise", "disabled"  # graphs of prompts
_OLD_STRATEGIES = {"round-robin-split": INTERLEAVE, "in-seq-split": ZIGZAG}


class Meaning:
    """Server arguments, or a launch line, whose attributes are those of the newest SGLang; `None` where not given.

    Args:
        arguments: SGLang's server arguments, or a `LaunchLine`.
    """

    def __init__(self, arguments: Any) -> None:
        self._arguments: Any = arguments._arguments if isinstance(arguments, Meaning) else arguments

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        rule = _RULES.get(name)
        return getattr(self._arguments, name, None) if rule is None else rule(self._arguments)


def is_off(value: Any) -> bool:
    """Return whether the value of a flag asks for nothing."""
    return value in _OFF


def data_parallel_ranks(arguments: Any) -> int:
    """Return the number of data-parallel ranks, whether they are replicas or share out attention.

    `dp_size` counts both up to SGLang 0.5.22; 0.5.23 has `attn_dp_size` for those of attention, and refuses more than 1
    of each. Its server arguments have 1 for the one that is not given.
    """
    return max(getattr(arguments, name, None) or 1 for name in ("dp_size", "attn_dp_size"))


def context_ranks(arguments: Any) -> int:
    """Return over how many ranks of attention SGLang shares out the tokens of prompts in turn; 1 without that."""
    meant = Meaning(arguments)
    interleaved = meant.enable_prefill_cp and meant.cp_strategy == INTERLEAVE
    return int(meant.attn_cp_size or 1) if interleaved else 1


SOURCES = {
    "enable_dp_attention": ("enable_dp_attention", "attn_dp_size"),
    "enable_prefill_cp": (
        "enable_prefill_cp",
        "enable_prefill_context_parallel",
        "enable_dsa_prefill_context_parallel",
        "enable_nsa_prefill_context_parallel",
    ),
    "cp_strategy": ("cp_strategy", "dsa_prefill_cp_mode", "nsa_prefill_cp_mode", "prefill_cp_mode"),
    "dsa_prefill_backend": ("dsa_prefill_backend", "nsa_prefill_backend"),
    "dsa_decode_backend": ("dsa_decode_backend", "nsa_decode_backend"),
    "cuda_graph_backend_prefill": (
        "cuda_graph_config",
        "cuda_graph_backend_prefill",
        "enforce_piecewise_cuda_graph",
        "enable_breakable_cuda_graph",
        "disable_piecewise_cuda_graph",
        "disable_prefill_cuda_graph",
        "disable_cuda_graph",
    ),
    "cuda_graph_backend_decode": ("cuda_graph_config", "cuda_graph_backend_decode"),
}


def _first(name: str) -> Callable[[Any], Any]:
    def read(arguments: Any) -> Any:
        values = (getattr(arguments, source, None) for source in SOURCES[name])
        return next((value for value in values if not is_off(value)), None)

    return read


def _dp_attention(arguments: Any) -> bool | None:
    given = getattr(arguments, "enable_dp_attention", None)
    return True if given or (getattr(arguments, "attn_dp_size", None) or 1) > 1 else given


def _prefill_cp(arguments: Any) -> bool | None:
    return True if any(getattr(arguments, name, None) for name in SOURCES["enable_prefill_cp"]) else None


def _strategy(arguments: Any) -> str | None:
    """Return how tokens are split; the first parsers of sparse models split them in turn by default."""
    given: str | None = _first("cp_strategy")(arguments)
    older = ("enable_dsa_prefill_context_parallel", "enable_nsa_prefill_context_parallel")
    if given is None and any(getattr(arguments, name, None) for name in older):
        return INTERLEAVE
    return given if given is None else _OLD_STRATEGIES.get(given, given)


def _graphs(phase: str) -> Callable[[Any], Any]:
    def read(arguments: Any) -> Any:
        config = getattr(arguments, "cuda_graph_config", None)
        of_phase = _part(config, phase)
        if of_phase is not None:
            return of_phase
        given = getattr(arguments, f"cuda_graph_backend_{phase}", None)
        if given is not None or phase != "prefill":
            return given
        for flag, backend in (
            ("enforce_piecewise_cuda_graph", TC_PIECEWISE),
            ("enable_breakable_cuda_graph", BREAKABLE),
            ("disable_piecewise_cuda_graph", DISABLED),
            ("disable_prefill_cuda_graph", DISABLED),
            ("disable_cuda_graph", DISABLED),
        ):
            if getattr(arguments, flag, None):
                return backend
        return None

    return read


def _part(config: Any, phase: str) -> Any:
    """Return the backend of a phase in `--cuda-graph-config`: its JSON, or the object that SGLang makes of it."""
    if isinstance(config, str):
        try:
            config = json.loads(config)
        except ValueError:
            return config  # SGLang says what is wrong with it
    if isinstance(config, dict):
        of_phase = config.get(phase)
        return of_phase.get("backend") if isinstance(of_phase, dict) else None
    return getattr(getattr(config, phase, None), "backend", None)


_RULES: dict[str, Callable[[Any], Any]] = {
    "enable_dp_attention": _dp_attention,
    "enable_prefill_cp": _prefill_cp,
    "cp_strategy": _strategy,
    "dsa_prefill_backend": _first("dsa_prefill_backend"),
    "dsa_decode_backend": _first("dsa_decode_backend"),
    "cuda_graph_backend_prefill": _graphs("prefill"),
    "cuda_graph_backend_decode": _graphs("decode"),
}
