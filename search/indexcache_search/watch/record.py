"""The record of a watch: the losses of every scored request, on disk as soon as they are known."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from indexcache_search.evaluation.records import Sealer, append, check_identity, complete, damaged, opened
from sglang_indexcache.files.fields import Finite

FILE = "watch.jsonl"


class Scored(BaseModel):
    """Losses of one request.

    Attributes:
        request: its digest.
        length: its tokens.
        tokens: how many of them count.
        served: summed loss of these on the served server, nats.
        reference: the same on the reference server.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    request: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    length: Annotated[int, Field(ge=2)]
    tokens: Annotated[int, Field(ge=1)]
    served: Finite
    reference: Finite

    @property
    def change(self) -> float:
        """Loss on the served server above the reference's, nats a token."""
        return (self.served - self.reference) / self.tokens


class Record:
    """Append-only file of one watch, for use in a `with` block; its first line says what was watched.

    Args:
        path: the file, whose folder exists; created if missing.
        identity: conditions under which losses belong together.
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
                    check_identity(path, "watch", "--output", line, identity)
                    continue
                try:
                    self.scored.append(Scored.model_validate(line))
                except ValidationError:
                    raise damaged(path, number) from None
            if not whole:
                append(self._file, self._sealer, identity)
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
