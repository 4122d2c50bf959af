"""Errors that the user can fix: one clear sentence, no traceback, exit code 2."""

import difflib
from collections.abc import Iterable, Sequence


class UserError(Exception):
    """The input is wrong; the message says what, where and what to do."""


class ConfigError(UserError):
    """A configuration file or an override is wrong."""


class DataError(UserError):
    """A data set, an annotation or an image is wrong."""


class CheckpointError(UserError):
    """A checkpoint cannot be read, or does not fit."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A suggestion to append to a sentence, or an empty text; case does not matter.

    >>> did_you_mean("lerning_rate", ["learning_rate", "momentum"])
    " Did you mean 'learning_rate'?"
    >>> did_you_mean("x", ["learning_rate"])
    ''
    """
    names = list(known)
    close = difflib.get_close_matches(word, names, n=1)
    close = close or [name for name in names if name.casefold() == word.casefold()]
    return f" Did you mean '{close[0]}'?" if close else ""


def list_some(names: Sequence[str], most: int = 5) -> str:
    """The first names, and how many more there are.

    >>> list_some(["cat", "dog"]), list_some(["cat", "dog", "cow"], 1)
    ('cat, dog', 'cat and 2 more')
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
