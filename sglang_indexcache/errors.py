"""Errors that are a user's to mend: one line each, naming what was found and what would be right."""


class IndexCacheError(ValueError):
    """Base of every error this project raises for bad input; a command line prints it and exits with 2."""


class PatternError(IndexCacheError):
    """A pattern that is no pattern, or that does not fit the model."""


class PatternFileError(IndexCacheError):
    """A pattern file that can't be read or says something contradictory."""


class SpellingError(IndexCacheError):
    """An engine configuration whose sharing schedule can't be told, or can't be written."""


class ModelConfigError(IndexCacheError):
    """A model without DSA attention, or one whose config.json can't be understood."""
