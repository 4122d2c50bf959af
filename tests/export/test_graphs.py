"""The graphs that are exported predict what the segmenters predict, before any exporter."""

import pytest
import torch
import torch.nn.functional as F

from helpers.exported import assert_same
from helpers.small_segmenters import SILENT, SMALL, drawn, small
from uniquery.errors import UserError
from uniquery.export.graphs import MaskFrame, build_graph
from uniquery.export.pasting import paste_outputs
from uniquery.export.selection import boxes_of_masks, select_best, suppress, take
from uniquery.layers.deformable_attention import deformable_sum
from uniquery.layers.deformable_sampling import sum_by_grid_sample
from uniquery.masks import rle
from uniquery.masks.suppression import matrix_nms, nms
from uniquery.segmenters.sparseinst import pooling_matrix

SIZES = [(90, 120), (64, 100)]


def both(model, images, sizes):
    """The instances of each image as the segmenter and as its graph predict them."""
    graph = build_graph(model)
    with torch.inference_mode():
        native = model.predict(model(images), sizes)
        outputs = graph(images.pixels, torch.tensor(images.sizes))
    threshold = model.config.mask_threshold
    pasted = [
        paste_outputs(outputs, i, graph.frame, valid, size, threshold)
        for i, (valid, size) in enumerate(zip(images.sizes, sizes, strict=True))
    ]
    return native, pasted, outputs


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("sizes", [SIZES, [(180, 233), (33, 51)]], ids=["own size", "resized"])
def test_a_graph_predicts_what_its_segmenter_predicts(name, sizes):
    native, exported, outputs = both(small(name).eval(), drawn(SIZES, [4, 3])[0], sizes)
    assert sum(len(one) for one in native) > 20
    for ours, theirs in zip(exported, native, strict=True):
        assert_same(ours, theirs)
    scores, labels, boxes, masks = outputs
    count = scores.shape[1]
    assert labels.shape == (2, count)
    assert boxes.shape == (2, count, 4)
    assert masks.shape[:2] == (2, count)
    assert masks.min() >= 0
    assert masks.max() <= 1


@pytest.mark.parametrize("name", SMALL)
def test_nothing_found_is_a_row_of_score_zero_or_an_empty_mask(name):
    native, exported, _ = both(small(name, **SILENT[name]).eval(), drawn(SIZES, [1, 1])[0], SIZES)
    assert [len(one) for one in native] == [len(one) for one in exported]


def test_padding_counts_where_the_original_counts_it():
    model = small("mask2former", attend_padding=True).eval()
    native, exported, _ = both(model, drawn(SIZES, [4, 3])[0], SIZES)
    for ours, theirs in zip(exported, native, strict=True):
        assert_same(ours, theirs)


def test_a_class_without_a_graph_is_named():
    with pytest.raises(UserError, match=r"^Linear cannot be exported"):
        build_graph(torch.nn.Linear(1, 1))


class TestSelection:
    def test_k_is_the_most_of_an_image_up_to_the_limit(self):
        scores = torch.tensor([[0.0, 0.2, 0.0, 0.9], [0.1, 0.0, 0.0, 0.0]])
        best, index = select_best(scores, 10)
        assert best.tolist() == scores.new_tensor([[0.9, 0.2], [0.1, 0.0]]).tolist()
        assert index[0].tolist() == [3, 1]
        assert select_best(scores, 1)[0].shape == (2, 1)
        assert select_best(torch.zeros(2, 3), 5)[0].tolist() == [[0.0], [0.0]]

    def test_take_keeps_further_axes(self):
        values = torch.arange(12.0).view(1, 3, 2, 2)
        assert take(values, torch.tensor([[2, 0]])).tolist() == values[:, [2, 0]].tolist()

    def test_suppression_is_nms_in_each_image(self):
        generator = torch.Generator().manual_seed(0)
        corner = torch.rand(2, 40, 2, generator=generator) * 20
        boxes = torch.cat([corner, corner + 4 + torch.rand(2, 40, 2, generator=generator) * 10], dim=2)
        scores, labels = torch.rand(2, 40, generator=generator), torch.randint(0, 3, (2, 40), generator=generator)
        class_scores = F.one_hot(labels, 3).mT * scores[:, None]
        kept = suppress(boxes, class_scores, 0.4)
        for i in range(2):
            expected = nms(boxes[i], scores[i], labels[i], 0.4)
            assert kept[i].nonzero().flatten().tolist() == sorted(expected.tolist())
            assert 0 < len(expected) < 40

    def test_boxes_around_masks(self):
        masks = torch.zeros(1, 2, 4, 4, dtype=torch.bool)
        masks[0, 0, 1:3, 2:4] = True
        assert boxes_of_masks(masks, 4, torch.tensor([[16, 13]])).tolist() == [[[8, 4, 13, 12], [0, 0, 0, 0]]]


class TestOperators:
    def test_matrix_nms_of_a_batch_is_that_of_each_image(self):
        generator = torch.Generator().manual_seed(0)
        masks = torch.rand(2, 9, 6, 6, generator=generator) > 0.4
        masks[1, 7:] = False  # padding of the batch
        scores = torch.rand(2, 9, generator=generator).sort(descending=True).values
        labels = torch.randint(0, 2, (2, 9), generator=generator)
        joined = matrix_nms(masks, scores, labels, 2.0)
        torch.testing.assert_close(joined[0], matrix_nms(masks[0], scores[0], labels[0], 2.0))
        torch.testing.assert_close(joined[1, :7], matrix_nms(masks[1, :7], scores[1, :7], labels[1, :7], 2.0))

    def test_deformable_attention_by_grid_sample(self):
        generator = torch.Generator().manual_seed(0)
        shapes = [(3, 5), (2, 2)]
        values = torch.randn(2, 4, 19, 8, generator=generator)
        x, y, logits = torch.randn(3, 2, 4, 7, 6, generator=generator) * 3
        expected = deformable_sum(values, x, y, logits, shapes)
        torch.testing.assert_close(sum_by_grid_sample(values, x, y, logits, shapes), expected, atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize("cells", [1, 4, 7, 12])
    @pytest.mark.parametrize("size", [1, 2, 3, 6])
    def test_pooling_matrix_is_adaptive_pooling(self, cells, size):
        x = torch.randn(1, 1, cells, generator=torch.Generator().manual_seed(0))
        expected = F.adaptive_avg_pool1d(x, size)
        torch.testing.assert_close(x @ pooling_matrix(cells, size, x).T, expected)


def test_masks_that_are_certain():
    """Probabilities of exactly 0 and 1, as a trained model gives them."""
    frame = MaskFrame("image", 4, 1.5, "logits", boxes_from_masks=True, scores_from_masks=True)
    masks = torch.zeros(1, 1, 8, 8)
    masks[..., 2:5, 3:6] = 1
    outputs = (torch.tensor([[0.8]]), torch.tensor([[1]]), torch.zeros(1, 1, 4), masks)
    (found,) = paste_outputs(outputs, 0, frame, (32, 32), (32, 32), 0.5)
    assert found.scores.item() == pytest.approx(0.8, abs=1e-2)
    inside = torch.from_numpy(rle.decode(found.rles[0])).bool()
    assert inside[10:18, 14:22].all()  # between the cells that are certain
    assert inside.sum() <= 12**2
