"""Errors of a search, one line each."""

from sglang_indexcache import IndexCacheError


class DataError(IndexCacheError):
    """Calibration or evaluation data that can't be used."""


class RowError(DataError):
    """One row that can't be used, where others may be; the reader says which it is."""


class SearchError(IndexCacheError):
    """A search that can't be run as asked."""


class JournalError(IndexCacheError):
    """A work directory that belongs to another search, or is in use."""


class FolderError(IndexCacheError):
    """A folder to write to that holds what is not ours, or that another process writes to."""


class NonFiniteLossError(Exception):
    """An evaluation gave NaN or infinity: the run stops, since every comparison after it would be meaningless."""
