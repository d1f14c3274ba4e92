"""Pattern files on the Hugging Face hub, named as `HfFileSystem` does: `org/name/pattern.yaml`, `org/name@REV/...`.

What is read is pinned: a branch or tag is resolved to its commit once, and the name with that commit is what goes on
to other processes, to `/server_info` and into results.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self
from urllib.parse import quote, unquote

from sglang_indexcache.io.errors import PatternFileError
from sglang_indexcache.io.strict_yaml import MAX_BYTES
from sglang_indexcache.pattern_file.remote import SUFFIXES, RemoteFile, quiet_hub, why

_NAME = r"[A-Za-z0-9_][\w.-]{0,95}"
_FORM = re.compile(
    rf"(?P<repository>{_NAME}/{_NAME}?)(?:@(?P<revision>refs/(?:pr|convert)/[\w.-]+|[^/@\s]+))?/(?P<path>\S+)"
)
_REVISION = re.compile(r"[\w./-]{1,200}")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class HubFile(RemoteFile):
    """A file of a model repository on the hub.

    Attributes:
        repository: `org/name`.
        path: the file in it.
        revision: branch, tag or commit; `None` for the main branch.
    """

    repository: str
    path: str
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Read `org/name/FILE.yaml` or `org/name@REVISION/FILE.yaml`; return `None` for anything that may be local.

        That is a file that exists, or any name below a folder that does. A `/` of a revision is written `%2F`, but for
        `refs/pr/1`.

        Raises:
            PatternFileError: for an `hf://` address, saying what to write instead.
        """
        if text.startswith("hf:/"):  # a Path has one slash there
            raise PatternFileError("pattern is an address (hf://); expected org/name/pattern.yaml, without hf://")
        return cls._read(text) if text.endswith(SUFFIXES) and not _may_be_local(text) else None

    @classmethod
    def in_repository(cls, text: str, path: str) -> Self | None:
        """Return the file `path` of `org/name` or `org/name@REVISION`; `None` for anything that may be local."""
        named = text.count("/") == 1 and not text.endswith(SUFFIXES) and not _may_be_local(text)
        return cls._read(f"{text}/{path}") if named else None

    @classmethod
    def _read(cls, text: str) -> Self | None:
        found = _FORM.fullmatch(text)
        if found is None:
            return None
        revision = None if found["revision"] is None else unquote(found["revision"])
        parts = [*found["path"].split("/"), *(revision or "main").split("/")]
        if {"", ".", ".."} & {*parts} or not _REVISION.fullmatch(revision or "main"):
            return None
        return cls(found["repository"], found["path"], revision)

    def __str__(self) -> str:
        revision = self.revision or ""
        special = revision.startswith(("refs/pr/", "refs/convert/"))
        at = f"@{revision if special else quote(revision, safe='')}" if revision else ""
        return f"{self.repository}{at}/{self.path}"

    def download(self, limit: int = MAX_BYTES) -> tuple[Self, Path]:
        """Return this file with its commit as the revision, and its copy in the client's cache.

        A commit that is in the cache is not asked for again; with `HF_HUB_OFFLINE` nothing is, and the cache says which
        commit a branch is.

        Args:
            limit: bytes that the file may have.

        Raises:
            PatternFileError: if it can't be had, or is too large.
        """
        try:
            from huggingface_hub import hf_hub_download
        except ImportError:
            raise PatternFileError(
                f"{self}: no such file here, and huggingface_hub is not installed; expected: pip install"
                " huggingface_hub, or a file"
            ) from None
        try:
            with quiet_hub():
                expected = self._commit(limit)
                path = Path(hf_hub_download(self.repository, self.path, revision=self.revision))
        except PatternFileError:
            raise
        except Exception as error:  # the client has many, and a proxy more
            raise self._refused(why(error)) from None
        commit = path.parents[self.path.count("/")].name  # .../snapshots/COMMIT/PATH
        if commit != (expected or commit) or not _COMMIT.fullmatch(commit):
            raise self._refused(f"it was at commit {expected}, then at {commit}; expected one that stays, run again")
        return replace(self, revision=commit), path

    def _commit(self, limit: int) -> str | None:
        """Ask the hub for the commit, and look at the size of the file; `None` where only the cache may be asked."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
        from huggingface_hub.errors import OfflineModeIsEnabled

        revision = self.revision
        if revision is not None and _COMMIT.fullmatch(revision):
            cached = try_to_load_from_cache(self.repository, self.path, revision=revision)
            if isinstance(cached, str):
                return revision
        try:
            facts = get_hf_file_metadata(hf_hub_url(self.repository, self.path, revision=revision))
        except OfflineModeIsEnabled:
            return None
        if facts.size is None or facts.size > limit:
            size = "no size" if facts.size is None else f"{facts.size} bytes"
            raise self._refused(f"it has {size}, expected at most {limit}")
        if facts.commit_hash is None or not _COMMIT.fullmatch(facts.commit_hash):
            raise self._refused("the answer does not name the commit")
        return facts.commit_hash

    def _refused(self, reason: str) -> PatternFileError:
        return PatternFileError(f"{self}: no such file here, and it can't be had from the hub: {reason}")


def _may_be_local(text: str) -> bool:
    return os.path.exists(text) or os.path.isdir(text.partition("/")[0])  # noqa: PTH110, PTH112 (they raise for some names)
