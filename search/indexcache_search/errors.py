"""Errors of a search, one line each."""

from sglang_indexcache import IndexCacheError


class DataError(IndexCacheError):
    """Calibration or evaluation data that can't be used."""


class RowError(DataError):
    """One row that can't be used; the reader adds which one."""


class LeftOutError(RowError):
    """One row that is no mistake and can't be used; the reader counts it by this reason."""


class NoRequestsError(DataError):
    """A log without a finished request; others beside it may have some, as after a rotation."""


class SearchError(IndexCacheError):
    """A search that can't be run as requested."""


class JournalError(IndexCacheError):
    """A work directory that belongs to another search, or is in use."""


class FolderError(IndexCacheError):
    """An output folder that holds foreign files, or that another process writes to."""


class NonFiniteLossError(Exception):
    """A loss that is NaN or infinite. It stops the run, since every later comparison would be meaningless."""
