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


def naive_errors(instances, predicted, crowds=(), labeled_classes=None):
    """(kinds of the instances, kinds of the predictions); (label, (H, W) bool) each, predictions best first."""
    matches = find_matches(instances, predicted)
    kinds = {}
    for p, (label, mask) in enumerate(predicted):
        own = [(g, m) for g, (other, m) in enumerate(instances) if other == label]
        if p in matches:
            kinds[p] = "leaked" if leak(mask, instances[matches[p]][1], instances) >= TENTH else "correct"
        elif (labeled_classes is not None and label not in labeled_classes) or any(
            other == label and share(crowd, mask) >= HALF for other, crowd in crowds
        ):
            kinds[p] = "ignored"
        elif merged_by((label, mask), instances):
            kinds[p] = "merged"
        elif any(g in matches.values() and share(m, mask) >= HALF for g, m in own):
            kinds[p] = "duplicate"
        elif any(other != label and iou(mask, m) >= HALF for other, m in instances):
            kinds[p] = "wrong class"
    in_question = [p for p in range(len(predicted)) if p not in kinds]
    split = set()
    for g, (label, instance) in enumerate(instances):
        if g in matches.values():
            continue
        pieces = [
            p
            for p in in_question
            if p not in kinds
            and predicted[p][0] == label
            and share(instance, predicted[p][1]) >= HALF
            and share(predicted[p][1], instance) >= TENTH
        ]
        if len(pieces) >= 2 and share(np.any([predicted[p][1] for p in pieces], axis=0), instance) >= HALF:
            split.add(g)
            kinds |= dict.fromkeys(pieces, "split")
    poor = {}  # instance -> kinds of the poor masks that belong to it
    for p in in_question:
        if p not in kinds:
            label, mask = predicted[p]
            best, g = max(
                ((iou(mask, m), -g) for g, (other, m) in enumerate(instances) if other == label),
                default=(Fraction(0), 0),
            )
            if best < TENTH:
                kinds[p] = "background"
            else:
                kinds[p] = "leaked" if leak(mask, instances[-g][1], instances) >= TENTH else "poor mask"
                poor.setdefault(-g, set()).add(kinds[p])
    outcomes = []
    for g, (label, instance) in enumerate(instances):
        found = [p for p, match in matches.items() if match == g]
        if found:
            outcomes.append(kinds[found[0]])
        elif any(
            kinds[p] == "wrong class" and predicted[p][0] != label and iou(predicted[p][1], instance) >= HALF
            for p in range(len(predicted))
        ):
            outcomes.append("wrong class")
        elif any(kinds[p] != "ignored" and g in merged_by(predicted[p], instances) for p in range(len(predicted))):
            outcomes.append("merged")
        elif g in split:
            outcomes.append("split")
        else:
            outcomes.append(next((k for k in ("leaked", "poor mask") if k in poor.get(g, ())), "missed"))
    return outcomes, [kinds[p] for p in range(len(predicted))]


def naive_boundary_iou(first, second):
    """Cheng et al., 2021: erosion by a 3 × 3 square, once for each pixel of the width."""
    width = max(1, round(0.02 * float(np.hypot(*first.shape))))
    outlines = [m & ~binary_erosion(m, np.ones((3, 3)), iterations=width, border_value=0) for m in (first, second)]
    return float(iou(*outlines))
