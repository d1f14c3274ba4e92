"""Find the files of a tokenizer, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from indexcache_train.distill.tokenizer_files import tokenizer_files
from sglang_indexcache.io.errors import ModelConfigError
from sglang_indexcache.model.files import ModelFiles, weight_files
from tests.core.test_model_files import cache, folder

__all__ = ["cache", "folder"]  # fixtures


def test_what_belongs_to_the_tokenizer(folder: Path) -> None:
    tokenizer = ModelFiles.read(folder, tokenizer_files)
    assert tokenizer.sha256 != ModelFiles.read(folder, weight_files).sha256
    assert list(tokenizer.digests) == ["tokenizer.json"]
    (folder / "consolidated.safetensors").write_text("of no index, so no engine loads it")
    (folder / "optimizer.pt").write_text("neither")
    (folder / "README.md").write_text("nor this")
    tokenizer.check()
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("")
    with pytest.raises(ModelConfigError, match=r"tools\.jinja: changed"):
        tokenizer.check()
