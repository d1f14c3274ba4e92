"""Errors that a user can mend: one line each, naming what was found and what is expected."""

from __future__ import annotations

import unicodedata

from sglang_indexcache.io.redaction import redacted

_HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # Unicode categories that a terminal acts on, or does not show
_WHITE = {"\n", "\r", "\t"}


def is_hidden(character: str) -> bool:
    """Return whether a terminal or an editor would not show `character`."""
    return unicodedata.category(character) in _HIDDEN


def one_line(text: object, limit: int = 1000) -> str:
    """Return `text` on one line that is safe to print, without secrets, and with hidden characters escaped.

    Args:
        text: anything with a `str`.
        limit: characters of the result.
    """
    shown = "".join(
        " " if letter in _WHITE else f"\\u{ord(letter):04x}" if is_hidden(letter) else letter
        for letter in redacted(str(text))[: 2 * limit]
    ).strip()
    return shown if len(shown) <= limit else shown[: limit - 3] + "..."


class IndexCacheError(ValueError):
    """Base of every error this project raises for bad input; a command line prints it and exits with 2.

    Args:
        message: one line; names in it may come from files and servers, so hidden characters are escaped.
    """

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class FileError(IndexCacheError):
    """A file that can't be read: it is missing, not a regular file, or too large."""


class PatternError(IndexCacheError):
    """A pattern that is invalid, or that does not fit the model."""


class PatternFileError(IndexCacheError):
    """A pattern file that can't be read or says something contradictory."""


class SpellingError(IndexCacheError):
    """An engine configuration whose sharing schedule can't be read or written."""


class ModelConfigError(IndexCacheError):
    """A model of no known family, or one whose config.json can't be understood."""


class ProofError(IndexCacheError):
    """A loaded model, or a set of ranks, that would not run the pattern."""
