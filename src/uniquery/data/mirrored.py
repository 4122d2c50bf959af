"""Classes that are mirror images of one another: a flip turns a left hand into a right hand."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from uniquery.data.dataset import Category
from uniquery.errors import DataError, did_you_mean

_LEFT_AND_RIGHT = {"left": "right", "l": "r"}
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def similar_pairs(classes: Sequence[str]) -> list[tuple[str, str]]:
    """The pairs of classes whose names differ in left and right only.

    >>> similar_pairs(["left_mirror", "door", "right_mirror", "HandL", "HandR", "bright", "leaf"])
    [('left_mirror', 'right_mirror'), ('HandL', 'HandR')]
    """
    by_words = {_words(name): name for name in classes}
    mirrored = {words: tuple(_LEFT_AND_RIGHT.get(word, word) for word in words) for words in by_words}
    return [
        (by_words[words], by_words[other]) for words, other in mirrored.items() if other != words and other in by_words
    ]


def _words(name: str) -> tuple[str, ...]:
    """The words of a class name in lower case; what is between them counts too.

    >>> _words("Left hand 2"), _words("leftHand")
    (('left', ' ', 'hand', ' 2'), ('left', 'hand'))
    """
    parts, end = list[str](), 0
    for match in _WORDS.finditer(name):
        parts += [name[end : match.start()], match.group().lower()]
        end = match.end()
    return tuple(part for part in (*parts, name[end:]) if part)


def mirrored_labels(categories: Sequence[Category], pairs: Sequence[tuple[str, str]]) -> Tensor | None:
    """(C,) the label that each class has in a flipped image; None if there are no pairs.

    >>> mirrored_labels([Category(1, "left"), Category(2, "door"), Category(3, "right")], [("left", "right")])
    tensor([2, 1, 0])

    Raises:
        DataError: a pair names a class that does not exist, or a thing and stuff, or a class is in several pairs.
    """
    if not pairs:
        return None
    labels = {category.name: label for label, category in enumerate(categories)}
    mirrored = torch.arange(len(categories))
    names = [name for pair in pairs for name in pair]
    for name in names:
        if name not in labels:
            raise DataError(f"data.flip_pairs: there is no class '{name}'.{did_you_mean(name, labels)}")
        if names.count(name) > 1:
            raise DataError(f"data.flip_pairs: the class '{name}' is there {names.count(name)} times.")
    for first, second in pairs:
        if categories[labels[first]].is_thing != categories[labels[second]].is_thing:
            thing, stuff = (first, second) if categories[labels[first]].is_thing else (second, first)
            raise DataError(
                f"data.flip_pairs: '{thing}' is a thing and '{stuff}' is stuff, which cannot be mirror images of one "
                "another: pair two things, or two kinds of stuff."
            )
        mirrored[labels[first]], mirrored[labels[second]] = labels[second], labels[first]
    return mirrored
