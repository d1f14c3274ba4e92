"""The selection of a pattern for models without indexers, whose type an extension registers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Set
from typing import Any, Self

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from sglang_indexcache.io.errors import PatternError
from sglang_indexcache.io.extensions import ExtensionError, extensions


class PatternSelection(ABC):
    """Selection by the layers of a pattern, where the model does not say it itself; a frozen dataclass for pydantic.

    Attributes:
        tokens: largest number of tokens that are attended to.
    """

    @property
    @abstractmethod
    def tokens(self) -> int:
        """Largest number of tokens that are attended to."""

    @abstractmethod
    def __str__(self) -> str:
        """Return the selection in one word, as in `Pattern.key`."""

    @classmethod
    @abstractmethod
    def parse(cls, text: str) -> Self:
        """Read the text that `str` gives.

        Raises:
            PatternError: if `text` has another form.
        """

    @classmethod
    @abstractmethod
    def default(cls) -> Self:
        """Return the selection of patterns that name none."""

    @abstractmethod
    def as_dict(self) -> dict[str, Any]:
        """Return plain types, as in a pattern file; defaults are left out."""

    @abstractmethod
    def in_words(self) -> str:
        """Return the selection for people."""

    @abstractmethod
    def differing(self, among: Set[Any]) -> str:
        """Name the fields that differ in `among`, selections of this type, for people: `, 64 pages, steps ema:0.9`."""

    @abstractmethod
    def serving_flags(self) -> tuple[str, ...]:
        """Return the flags that SGLang needs beside a pattern with this selection."""


def selection_type() -> type[PatternSelection]:
    """Return the registered type.

    Raises:
        PatternError: if no extension registers one.
        ExtensionError: if one can't be loaded, or several do.
    """
    found: Mapping[str, type[PatternSelection]] = extensions("selections", PatternSelection)
    if len(found) > 1:
        raise ExtensionError(f"extensions {', '.join(found)} of indexcache.selections: expected one alone")
    if not found:
        raise PatternError("a selection needs an extension that is not installed, expected a pattern of F and S alone")
    return next(iter(found.values()))


class RegisteredSelection:
    """The annotation of a `PatternSelection` in a model of pydantic; the type is looked up once the model is used."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema of the registered type; without one everything is refused."""
        try:
            return handler.generate_schema(selection_type())
        except PatternError as error:
            refusal = str(error)

        def refuse(value: Any) -> Any:
            raise PatternError(refusal)

        return core_schema.no_info_plain_validator_function(refuse)
