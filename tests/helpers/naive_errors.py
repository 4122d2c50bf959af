"""The definitions of docs/errors.md a second time, on dense masks, pixel by pixel and pair by pair."""

from fractions import Fraction

import numpy as np
from scipy.ndimage import binary_erosion

HALF, TENTH = Fraction(1, 2), Fraction(1, 10)


def count(mask):
    return int(np.count_nonzero(mask))


def share(part, whole):
    return Fraction(count(part & whole), count(whole)) if whole.any() else Fraction(0)


def iou(a, b):
    return Fraction(count(a & b), count(a | b)) if (a | b).any() else Fraction(0)


def leak(prediction, own, instances):
    elsewhere = np.zeros_like(prediction)
    for _, mask in instances:
        if mask is not own:
            elsewhere |= mask
    return Fraction(count(prediction & elsewhere & ~own), max(count(prediction), 1))


def merged_by(prediction, instances):
    """Indices of the instances that a prediction merges."""
    label, mask = prediction
    covered = [g for g, (other, instance) in enumerate(instances) if other == label and share(mask, instance) >= HALF]
    return covered if len(covered) > 1 else []


def find_matches(instances, predicted):
    matches = {}
    for p, (label, mask) in enumerate(predicted):
        options = [
            (iou(mask, instance), -g)
            for g, (other, instance) in enumerate(instances)
            if other == label and g not in matches.values() and iou(mask, instance) >= HALF
        ]
        if options:
            matches[p] = -max(options)[1]
    return matches


def first_kind(p, predicted, instances, matches, crowds, labeled_classes):
    """The kind of a prediction, unless it may be a piece or a poor mask."""
    label, mask = predicted[p]
    own = [(g, m) for g, (other, m) in enumerate(instances) if other == label]
    unlabeled = labeled_classes is not None and label not in labeled_classes
    if p in matches:
        return "leaked" if leak(mask, instances[matches[p]][1], instances) >= TENTH else "correct"
    if unlabeled or any(other == label and share(crowd, mask) >= HALF for other, crowd in crowds):
        return "ignored"
    if merged_by((label, mask), instances):
        return "merged"
    if any(g in matches.values() and share(m, mask) >= HALF for g, m in own):
        return "duplicate"
    if any(other != label and iou(mask, m) >= HALF for other, m in instances):
        return "wrong class"
    return None


def pieces_of(g, instances, predicted, free):
    """The predictions that split an instance."""
    label, instance = instances[g]
    pieces = [
        p
        for p in free
        if predicted[p][0] == label
        and share(instance, predicted[p][1]) >= HALF
        and share(predicted[p][1], instance) >= TENTH
    ]
    enough = len(pieces) >= 2 and share(np.any([predicted[p][1] for p in pieces], axis=0), instance) >= HALF
    return pieces if enough else []


def instance_kind(g, instances, predicted, kinds, split, poor):
    """The kind of an instance that no prediction finds."""
    label, instance = instances[g]
    others = [mask for p, (other, mask) in enumerate(predicted) if kinds[p] == "wrong class" and other != label]
    if any(iou(mask, instance) >= HALF for mask in others):
        return "wrong class"
    if any(kinds[p] != "ignored" and g in merged_by(predicted[p], instances) for p in range(len(predicted))):
        return "merged"
    if g in split:
        return "split"
    return next((k for k in ("leaked", "poor mask") if k in poor.get(g, ())), "missed")


def naive_errors(instances, predicted, crowds=(), labeled_classes=None):
    """(kinds of the instances, kinds of the predictions); (label, (H, W) bool) each, predictions best first."""
    matches = find_matches(instances, predicted)
    kinds = [first_kind(p, predicted, instances, matches, crowds, labeled_classes) for p in range(len(predicted))]
    split = set()
    for g in range(len(instances)):
        free = [p for p, kind in enumerate(kinds) if kind is None]
        pieces = [] if g in matches.values() else pieces_of(g, instances, predicted, free)
        split |= {g} if pieces else set()
        for p in pieces:
            kinds[p] = "split"
    poor = {}  # instance -> kinds of the poor masks that belong to it
    for p in [p for p, kind in enumerate(kinds) if kind is None]:
        label, mask = predicted[p]
        options = [(iou(mask, m), -g) for g, (other, m) in enumerate(instances) if other == label]
        best, g = max(options, default=(Fraction(0), 0))
        if best < TENTH:
            kinds[p] = "background"
        else:
            kinds[p] = "leaked" if leak(mask, instances[-g][1], instances) >= TENTH else "poor mask"
            poor.setdefault(-g, set()).add(kinds[p])
    found = {g: kinds[p] for p, g in matches.items()}
    rest = [g for g in range(len(instances)) if g not in found]
    found |= {g: instance_kind(g, instances, predicted, kinds, split, poor) for g in rest}
    return [found[g] for g in range(len(instances))], kinds


def naive_boundary_iou(first, second):
    """Cheng et al., 2021: erosion by a 3 × 3 square, once for each pixel of the width."""
    width = max(1, round(0.02 * float(np.hypot(*first.shape))))
    outlines = [m & ~binary_erosion(m, np.ones((3, 3)), iterations=width, border_value=0) for m in (first, second)]
    return float(iou(*outlines))
