"""The files of a tokenizer, on which the tokens of a run depend."""

from __future__ import annotations

from pathlib import Path

from sglang_indexcache.model.files import files_named

_BEGINNINGS = (
    "tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "chat_template", "spiece", "sentencepiece"
)  # fmt: skip
_ENDINGS = (".model", ".tiktoken", ".jinja")
_TEMPLATES = "additional_chat_templates"


def tokenizer_files(folder: Path) -> list[str]:
    """List the files of a tokenizer, chat templates included.

    Raises:
        ModelConfigError: if the folder can't be read.
    """
    templates = folder / _TEMPLATES
    return sorted(
        [
            *files_named(folder, lambda name: name.startswith(_BEGINNINGS) or name.endswith(_ENDINGS)),
            *(f"{_TEMPLATES}/{name}" for name in (files_named(templates, bool) if templates.is_dir() else [])),
        ]
    )
