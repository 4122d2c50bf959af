"""The federated class loss: an image teaches only the classes that it is labeled for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from uniquery.structures import Targets


def drop_unlabeled_classes(class_losses: Tensor, is_class: Tensor, targets: Sequence[Targets]) -> Tensor:
    """The losses, 0 where a class is not the right one and its absence is not known.

    A query teaches its own class always. It teaches that another class is wrong only if that is known: the class is one
    of `Targets.negative_classes` or of the image's instances, and not one of `Targets.not_exhaustive_classes`.

    Args:
        class_losses: (…, B, L, C), a loss for each class by itself.
        is_class: (…, B, L, C), 1 or true for the right class.
        targets: ground truth of each image.

    >>> target = Targets(torch.tensor([0]), torch.zeros(1, 4), torch.ones(1, 2, 2), negative_classes=torch.tensor([2]))
    >>> drop_unlabeled_classes(torch.ones(1, 1, 4), torch.zeros(1, 1, 4), [target])
    tensor([[[1., 0., 1., 0.]]])
    """
    if all(t.negative_classes is None and t.not_exhaustive_classes is None for t in targets):
        return class_losses
    known = torch.stack([_known_classes(target, class_losses.shape[-1]) for target in targets])  # (B, C)
    return class_losses.masked_fill(~(known[:, None] | is_class.bool()), 0)


def _known_classes(target: Targets, num_classes: int) -> Tensor:
    """(C,) bool: whether the image says everywhere if a class is there."""
    device = target.labels.device
    known = torch.full((num_classes,), target.negative_classes is None, device=device)
    if target.negative_classes is not None:
        known[target.negative_classes] = True
        known[target.labels] = True
    if target.not_exhaustive_classes is not None:
        known[target.not_exhaustive_classes] = False
    return known
