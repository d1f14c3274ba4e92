"""Token sets on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from indexcache_train.training.stored import load_set, save_set
from sglang_indexcache.process import exit_line
from tests.conftest import random_tokens
from tests.search.test_fuzz import raising


def test_prompts_are_kept(tmp_path: Path) -> None:
    data = random_tokens().ending_in_replies(8)
    assert data.prompt is not None
    save_set(data, tmp_path / "stored")
    stored = load_set(tmp_path / "stored")
    assert stored is not None and stored.sha256 == data.sha256 and np.array_equal(stored.prompt, data.prompt)  # type: ignore[arg-type]


def test_a_full_disk_is_told_with_the_name_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operating system names no file that it can't write to."""
    monkeypatch.setattr(np, "save", raising(OSError("30 requested and 0 written")))
    with pytest.raises(OSError) as caught:
        save_set(random_tokens(), tmp_path / "set")
    assert exit_line(caught.value) == (f"{tmp_path / 'set' / 'tokens.npy'}: 30 requested and 0 written", 2)
