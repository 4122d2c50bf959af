import pytest
import torch
import torch.nn.functional as F

from uniquery.masks import rle
from uniquery.masks.panoptic import panoptic_segments
from uniquery.masks.paste import encode_scored_masks, resize_matrices

IS_THING = [True, True, False, False]


def case(count=9, seed=0):
    """Smooth blobs, of which some win little."""
    generator = torch.Generator().manual_seed(seed)
    logits = F.interpolate(4 * torch.randn(1, count, 4, 6, generator=generator) - 4, size=(8, 12), mode="bilinear")[0]
    labels = torch.randint(0, 4, (count,), generator=generator).tolist()
    scores = (0.8 + 0.2 * torch.rand(count, generator=generator)).tolist()
    return logits, labels, scores


def dense(logits, valid, size):
    """(N, H, W) probabilities at the output size, by way of the padded input image."""
    inside = F.interpolate(logits[None], scale_factor=4, mode="bilinear")[..., : valid[0], : valid[1]]
    return F.interpolate(inside, size=size, mode="bilinear")[0].sigmoid()


def naive(probabilities, labels, scores, overlap):
    """The original's rule, mask by mask."""
    owner = (probabilities * torch.tensor(scores)[:, None, None]).argmax(0)
    ids, segments, stuff = torch.zeros_like(owner), [], {}
    for k, label in enumerate(labels):
        mine, alone = owner == k, probabilities[k] >= 0.5
        both = mine & alone
        if mine.sum() == 0 or alone.sum() == 0 or both.sum() == 0 or mine.sum() / alone.sum() < overlap:
            continue
        if not IS_THING[label] and label in stuff:
            ids[both] = stuff[label]
            continue
        segments.append((len(segments) + 1, label, scores[k], IS_THING[label]))
        ids[both] = len(segments)
        if not IS_THING[label]:
            stuff[label] = len(segments)
    return ids, segments


@pytest.mark.parametrize("overlap", [0.0, 0.5, 0.8])
@pytest.mark.parametrize("seed", range(3))
def test_the_naive_way(seed, overlap):
    logits, labels, scores = case(seed=seed)
    valid, size = (30, 45), (41, 59)
    ours = panoptic_segments(logits, labels, scores, IS_THING, resize_matrices((8, 12), 4, valid, size), overlap)
    ids, segments = naive(dense(logits, valid, size), labels, scores, overlap)
    assert len(segments) >= 2
    assert (ours.ids != ids).float().mean() < 1e-3  # rounding at the edges
    assert [(s.id, s.label, s.score, s.is_thing) for s in ours.segments] == segments


def test_stuff_of_one_class_is_one_segment_and_things_are_not():
    logits = torch.full((4, 2, 4), -5.0)
    for k in range(4):
        logits[k, :, k] = 5
    eye = torch.eye(2), torch.eye(4)
    result = panoptic_segments(logits, [2, 0, 2, 0], [0.9] * 4, IS_THING, eye, 0.8)
    assert result.ids.tolist() == [[1, 2, 1, 3]] * 2
    assert [(s.label, s.is_thing) for s in result.segments] == [(2, False), (0, True), (0, True)]


def test_no_mask():
    result = panoptic_segments(torch.zeros(0, 2, 4), [], [], IS_THING, (torch.eye(2), torch.eye(4)), 0.8)
    assert not result.ids.any()
    assert result.segments == ()


class TestScoredMasks:
    @pytest.mark.parametrize("threshold", [-1.0, 0.0, 1.5])
    @pytest.mark.parametrize("size", [(30, 45), (60, 91), (7, 5), (1, 1)])
    def test_masks_and_scores_equal_the_dense_way(self, size, threshold):
        logits, _, _ = case()
        rles, scores = encode_scored_masks(logits, *resize_matrices((8, 12), 4, (30, 45), size), threshold)
        resized = torch.logit(dense(logits.double(), (30, 45), size))
        for one, score, values in zip(rles, scores, resized, strict=True):
            inside = values > threshold
            decided = (values - threshold).abs() > 1e-4
            ours = torch.from_numpy(rle.decode(one)).bool()
            assert torch.equal(ours[decided], inside[decided])
            expected = values[inside].sigmoid().mean().item() if inside.any() else 0.0
            assert score.item() == pytest.approx(expected, abs=1e-3 if decided.all() else 0.05)

    def test_an_empty_mask_scores_nothing(self):
        rles, scores = encode_scored_masks(
            torch.full((2, 8, 12), -3.0), *resize_matrices((8, 12), 4, (32, 48), (9, 9)), 0.0
        )
        assert scores.tolist() == [0.0, 0.0]
        assert not rle.decode(rles[0]).any()
        assert encode_scored_masks(torch.zeros(0, 8, 12), torch.eye(8), torch.eye(12), 0.0)[1].shape == (0,)
