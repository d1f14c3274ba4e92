"""Prefill and decode servers of different patterns: KV of one is never taken for the other's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_indexcache import Pattern, serving
from sglang_indexcache.serving import engines, identity
from tests.conftest import PAGES


def test_a_decode_server_outlives_a_prefill_server_of_another_pattern(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang would end it; a difference that is none of patterns still does."""
    own, other = Pattern("FSSF"), Pattern("FSFS")
    monkeypatch.setattr(engines, "_loaded", [SimpleNamespace(serves=True, pattern=own)])

    def meet(theirs: str) -> Any:
        def original(manager: Any, bootstrap_addr: str) -> Any:
            raise RuntimeError(
                f"KV cache dtype mismatch: prefill server has kv_cache_dtype={theirs}, but decode server has"
                f" kv_cache_dtype=bfloat16+{identity.tag(own)}. Both servers must use the same value."
            )

        return serving._meet(original, None, "10.0.0.1:8998")

    assert meet(f"bfloat16+{identity.tag(other)}") is False
    assert f"at 10.0.0.1:8998 runs another pattern ({identity.tag(other)}), this one FSSF" in caplog.text
    assert meet("bfloat16") is False and "runs another pattern (none of ours)" in caplog.text
    with pytest.raises(RuntimeError, match="dtype mismatch"):
        meet(f"fp8_e4m3+{identity.tag(own)}")
    for loaded in (None, SimpleNamespace(serves=True, pattern=Pattern("DDSS", PAGES))):
        monkeypatch.setattr(engines, "_loaded", [loaded])
        with pytest.raises(RuntimeError, match="dtype mismatch"):
            meet(f"bfloat16+{identity.tag(other)}")
    assert serving._meet(lambda manager, bootstrap_addr: True, None, "")
