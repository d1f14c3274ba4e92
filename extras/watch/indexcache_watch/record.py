"""The record of a watch: the losses of every scored request, on disk as soon as they are known."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from indexcache_search.errors import JournalError
from indexcache_search.evaluation.records import Sealer, append, check_identity, complete, damaged, opened
from sglang_indexcache.io.fields import Finite

FILE = "watch.jsonl"
SCHEMA = "indexcache-watch/v2"


class Scored(BaseModel):
    """Losses of one request.

    Attributes:
        request: its digest.
        length: its tokens.
        tokens: how many of them count.
        served: summed loss of these on the served server, nats.
        reference: the same on the reference server.
        fingerprint: fingerprint of the pattern that the served server had before and after, or `none`.
        reference_fingerprint: the same of the reference server.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    request: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    length: Annotated[int, Field(ge=2)]
    tokens: Annotated[int, Field(ge=1)]
    served: Finite
    reference: Finite
    fingerprint: str
    reference_fingerprint: str

    @property
    def change(self) -> float:
        """Loss on the served server above the reference's, nats a token."""
        return (self.served - self.reference) / self.tokens


class Record:
    """Append-only file of one watch, for use in a `with` block; its first line says what was watched.

    Args:
        path: the file, whose folder exists; created if missing.
        identity: conditions under which losses belong together; with `fingerprint` and `reference_fingerprint`.
        restart: discard what it holds.

    Attributes:
        scored: requests in the order in which they were scored.

    Raises:
        JournalError: if the file belongs to another watch, or is damaged.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any], restart: bool = False) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.fdopen(os.open(path, flags, 0o666), "a+b")
        self._sealer, self.scored = Sealer(), list[Scored]()
        try:
            self._file.seek(0)
            content = b"" if restart else self._file.read()
            whole = complete(content)
            self._file.truncate(len(whole))
            for number, line in opened(whole, str(path), self._sealer):
                if number == 1:
                    if "schema" not in line:
                        raise JournalError(
                            f"{path}: an earlier version wrote it, whose losses do not say of which patterns they are;"
                            " choose another --output, or --restart to discard it"
                        )
                    check_identity(path, "watch", "--output", line, {"schema": SCHEMA, **identity})
                    continue
                try:
                    self.scored.append(Scored.model_validate(line))
                except ValidationError:
                    raise damaged(path, number) from None
                if any(line[key] != identity[key] for key in ("fingerprint", "reference_fingerprint")):
                    raise damaged(path, number)
            if not whole:
                append(self._file, self._sealer, {"schema": SCHEMA, **identity})
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, scored: Scored) -> None:
        """Record a request; it is on disk when this returns."""
        append(self._file, self._sealer, scored.model_dump())
        self.scored.append(scored)
