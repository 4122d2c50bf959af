"""Errors that the user can fix: one clear sentence, no traceback, exit code 2."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Something given to us is wrong; the message says what, where and what to do."""


class ConfigError(UserError):
    """A configuration file or an override is wrong."""


class DataError(UserError):
    """A data set, an annotation or an image is wrong."""


class CheckpointError(UserError):
    """A checkpoint cannot be read, or does not fit."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A suggestion to append to a sentence, or nothing; capitals do not matter.

    >>> did_you_mean("lerning_rate", ["learning_rate", "momentum"])
    " Did you mean 'learning_rate'?"
    >>> did_you_mean("x", ["learning_rate"])
    ''
    """
    names = list(known)
    close = difflib.get_close_matches(word, names, n=1)
    close = close or [name for name in names if name.casefold() == word.casefold()]
    return f" Did you mean '{close[0]}'?" if close else ""
