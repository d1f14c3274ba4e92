"""Names of models: a folder, or `owner/name` of the hub, with `@revision` for another than its main one."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Self

from sglang_indexcache.io.errors import ModelConfigError
from sglang_indexcache.io.quotes import unquoted

_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+?)(?:@([\w./-]+))?")
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_ON_HUB = re.compile(
    r"(?:huggingface\.co/|hf\.co/)?([\w.-]+/[\w.-]+?)(?:/(?:tree|blob|resolve)/([\w.-]+).*|@([\w./-]+?))?/?"
)
_GGUF = b"GGUF"


@dataclass(frozen=True)
class ModelName:
    """A model as somebody named it.

    Attributes:
        folder: the folder on this machine; `None` for a model of the hub.
        repository: its id on the hub, or the folder again.
        revision: branch, tag or commit there; `None` for the main one.
    """

    folder: Path | None
    repository: str
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `text`; a folder that exists wins over an id of the hub.

        Raises:
            ModelConfigError: if it is neither, saying what is meant.
        """
        if os.path.isdir(text):  # noqa: PTH112 (Path.is_dir raises for names that are too long)
            return cls(Path(text), text)
        if os.path.exists(text):  # noqa: PTH110
            raise ModelConfigError(f"{text}: {_kind(Path(text))}; expected the folder of a checkpoint")
        if unquoted(text) != text:
            raise ModelConfigError(f"model is {text!r}, quotes or white space and all; expected {unquoted(text)}")
        address = _ADDRESS.fullmatch(text)
        if address is not None:
            raise ModelConfigError(_no_address(address[1].lower(), address[2]))
        match = _HUB_ID.fullmatch(text)
        if match is None or os.path.isdir(text.partition("/")[0]):  # noqa: PTH112
            shown = text if len(text) <= 200 else text[:197] + "..."
            raise ModelConfigError(f"{shown}: no such folder{_near(text)}, and not a hub id like owner/name")
        return cls(None, match[1], match[2])

    @property
    def name(self) -> str:
        """Name for people."""
        return self.repository if self.folder is None else self.folder.resolve().name


def at_revision(model: str, revision: str | None) -> str:
    """Return a folder or hub id with SGLang's `--revision` behind it; folders have none."""
    return f"{model}@{revision}" if revision and not os.path.isdir(model) else model  # noqa: PTH112


def _kind(path: Path) -> str:
    """Say what a path is that is not a folder."""
    try:
        with path.open("rb") as file:
            gguf = path.is_file() and file.read(len(_GGUF)) == _GGUF
    except OSError:
        gguf = False
    if gguf or path.suffix == ".gguf":
        return "is a GGUF file, which patterns are not for"
    return "is no folder"


def _no_address(scheme: str, rest: str) -> str:
    """Say what to do about `scheme://rest`, without repeating it: it may hold a key."""
    match = _ON_HUB.fullmatch(rest.partition("?")[0])
    on_hub = scheme == "hf" or (scheme in ("http", "https") and rest.startswith(("huggingface.co/", "hf.co/")))
    if on_hub and match is not None:
        revision = match[2] or match[3]
        named = match[1] + (f"@{revision}" if revision and revision != "main" else "")
        return f"model is an address ({scheme}://); expected {named}"
    return f"model is an address ({scheme}://), which is not read here; expected a folder that it was copied to"


def _near(text: str) -> str:
    """Return a folder with nearly this name, as a question."""
    path = Path(text)
    try:
        names = [item.name for item in path.parent.iterdir() if item.is_dir()]
    except (OSError, ValueError):
        return ""
    found = get_close_matches(path.name, names, 1)
    return f" (is {path.parent / found[0]} meant?)" if found else ""
