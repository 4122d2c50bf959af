import tracemalloc

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from uniquery.data.augment import resized_size
from uniquery.layers.resize import aligned_bilinear, aligned_linear_matrix
from uniquery.masks import rle
from uniquery.masks.paste import encode_masks, resize_matrix, scale_boxes
from uniquery.masks.suppression import box_iou, nms


def naive_iou(a, b):
    width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
    height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - width * height
    return width * height / union if union else float("nan")


def naive_nms(boxes, scores, labels, threshold):
    """Takes the best box left, drops what it overlaps, and goes on."""
    left = sorted(range(len(boxes)), key=lambda i: -scores[i])  # stable: of equal scores, the first
    kept = []
    while left:
        best = left.pop(0)
        kept.append(best)
        left = [i for i in left if labels[i] != labels[best] or not naive_iou(boxes[best], boxes[i]) > threshold]
    return kept


def random_boxes(count, seed, spread=20):
    """Whole-numbered boxes, so that overlaps are exact; many overlap."""
    generator = torch.Generator().manual_seed(seed)
    corner = torch.randint(0, spread, (count, 2), generator=generator)
    side = torch.randint(5, 30, (count, 2), generator=generator)
    return torch.cat([corner, corner + side], dim=1).double()


class TestBoxIou:
    def test_equals_a_loop(self):
        a, b = random_boxes(20, seed=0, spread=60), random_boxes(30, seed=1, spread=60)
        expected = torch.tensor([[naive_iou(x, y) for y in b.tolist()] for x in a.tolist()], dtype=torch.float64)
        assert (expected == 0).any()
        torch.testing.assert_close(box_iou(a, b), expected)

    def test_limits(self):
        box = torch.tensor([[0.0, 0, 4, 2]])
        others = torch.tensor([[0.0, 0, 4, 2], [4, 0, 8, 2], [9, 9, 10, 10], [0, 0, 2, 2], [1, 1, 1, 1]])
        assert box_iou(box, others).tolist() == [[1, 0, 0, 0.5, 0]]
        assert box_iou(box[:0], others).shape == (0, 5)


class TestNms:
    @pytest.mark.parametrize("seed", range(8))
    @pytest.mark.parametrize("threshold", [0.0, 0.3, 0.6])
    def test_equals_the_greedy_loop(self, seed, threshold):
        generator = torch.Generator().manual_seed(seed)
        boxes = random_boxes(120, seed)
        scores = torch.randint(0, 40, (120,), generator=generator) / 40  # many ties
        labels = torch.randint(0, 3, (120,), generator=generator)
        expected = naive_nms(boxes.tolist(), scores.tolist(), labels.tolist(), threshold)
        assert nms(boxes, scores, labels, threshold).tolist() == expected
        assert 3 <= len(expected) < 120

    def test_more_boxes_than_one_chunk(self):
        boxes, scores, labels = random_boxes(700, seed=0, spread=200), torch.rand(700), torch.arange(700) % 2
        expected = naive_nms(boxes.tolist(), scores.tolist(), labels.tolist(), 0.5)
        assert nms(boxes, scores, labels, 0.5).tolist() == expected

    def test_a_long_chain(self):
        """Each box overlaps only its neighbors: every second one survives."""
        start = torch.arange(200) * 4.0
        boxes = torch.stack([start, torch.zeros(200), start + 10, torch.ones(200)], dim=1)
        scores = torch.linspace(1, 0, 200)
        assert nms(boxes, scores, torch.zeros(200), 0.4).tolist() == list(range(0, 200, 2))

    @pytest.mark.parametrize("count", [0, 1])
    def test_few_boxes(self, count):
        kept = nms(random_boxes(count, seed=0), torch.rand(count), torch.zeros(count, dtype=torch.int64), 0.5)
        assert kept.tolist() == list(range(count))
        assert kept.dtype == torch.int64

    def test_classes_do_not_meet(self):
        boxes = torch.tensor([[0.0, 0, 9, 9]] * 4)
        scores = torch.tensor([0.1, 0.2, 0.3, 0.4])
        assert nms(boxes, scores, torch.tensor([0, 1, 0, 1]), 0.5).tolist() == [3, 2]

    def test_exactly_the_threshold_is_kept(self):
        boxes = torch.tensor([[0.0, 0, 4, 2], [0, 0, 2, 2]])
        assert nms(boxes, torch.tensor([0.9, 0.8]), torch.zeros(2), 0.5).tolist() == [0, 1]
        assert nms(boxes, torch.tensor([0.9, 0.8]), torch.zeros(2), 0.49).tolist() == [0]

    def test_boxes_without_area_suppress_nothing(self):
        boxes = torch.tensor([[3.0, 3, 3, 3], [3, 3, 3, 3], [0, 0, 9, 9]])
        assert nms(boxes, torch.tensor([0.9, 0.8, 0.7]), torch.zeros(3), 0.5).tolist() == [0, 1, 2]


def smooth_maps(count, height, width, seed=0):
    """Probabilities with regions, not salt and pepper."""
    coarse = torch.randn(count, 1, 4, 4, generator=torch.Generator().manual_seed(seed))
    return (3 * F.interpolate(coarse, size=(height, width), mode="bicubic")[:, 0]).sigmoid()


def matrices(shape, factor, valid, size):
    return [
        resize_matrix(aligned_linear_matrix(cells, factor)[:, :inside], length)
        for cells, inside, length in zip(shape, valid, size, strict=True)
    ]


def dense(probabilities, factor, valid, size):
    """All masks at full size at once, in float64, before the threshold."""
    up = aligned_bilinear(probabilities.double()[:, None], factor)[..., : valid[0], : valid[1]]
    return F.interpolate(up, size=size, mode="bilinear", align_corners=False)[:, 0]


def assert_same_masks(rles, probabilities, threshold):
    """Equal wherever rounding cannot decide."""
    masks = torch.stack([torch.from_numpy(rle.decode(one)).bool() for one in rles])
    assert masks.shape == probabilities.shape
    decided = (probabilities - threshold).abs() > 1e-6
    assert decided.float().mean() > 0.99
    assert torch.equal(masks[decided], (probabilities > threshold)[decided])


class TestEncodeMasks:
    @pytest.mark.parametrize("maps", [smooth_maps(5, 16, 24), torch.rand(5, 16, 24)], ids=["smooth", "noise"])
    @pytest.mark.parametrize(
        ("factor", "valid", "size"),
        [
            (4, (64, 96), (64, 96)),
            (4, (64, 96), (201, 333)),
            (4, (64, 96), (15, 20)),
            (4, (64, 96), (300, 31)),
            (4, (50, 71), (50, 71)),
            (2, (31, 33), (97, 130)),
            (1, (16, 24), (16, 24)),
            (4, (1, 1), (7, 9)),
            (4, (64, 96), (1, 1)),
        ],
    )
    @pytest.mark.parametrize("threshold", [0.5, 0.8])
    def test_equals_resizing_all_of_them(self, maps, factor, valid, size, threshold):
        rows, columns = matrices((16, 24), factor, valid, size)
        assert_same_masks(encode_masks(maps, rows, columns, threshold), dense(maps, factor, valid, size), threshold)

    def test_limit_masks(self):
        maps = torch.full((7, 8, 8), 0.1)
        maps[1] = 0.87  # everything
        maps[2, 0, :] = maps[3, :, -1] = 0.87  # one border each
        maps[4, 0, 0] = maps[5, -1, -1] = 0.87  # one corner each
        maps[6, 0, 0] = maps[6, -1, -1] = 0.87  # two parts, far apart
        for size in [(32, 32), (77, 50), (9, 5)]:
            rows, columns = matrices((8, 8), 4, (32, 32), size)
            rles = encode_masks(maps, rows, columns, 0.5)
            assert rle.area(rles[0]) == 0
            assert rle.area(rles[1]) == size[0] * size[1]
            assert_same_masks(rles, dense(maps, 4, (32, 32), size), 0.5)

    def test_a_mask_inside_the_crop_only(self):
        maps = torch.full((2, 8, 8), 0.1)
        maps[0, 6:, 6:] = 0.9  # in what the crop cuts away
        maps[1, 3, :] = 0.9
        rows, columns = matrices((8, 8), 4, (20, 20), (40, 40))
        rles = encode_masks(maps, rows, columns, 0.5)
        assert rle.area(rles[0]) == 0
        assert rle.area(rles[1]) > 0
        assert_same_masks(rles, dense(maps, 4, (20, 20), (40, 40)), 0.5)

    def test_no_masks(self):
        assert encode_masks(torch.zeros(0, 8, 8), *matrices((8, 8), 4, (32, 32), (32, 32)), 0.5) == []

    def test_half_precision_maps(self):
        maps = smooth_maps(3, 8, 8).bfloat16()
        rows, columns = matrices((8, 8), 4, (32, 32), (64, 64))
        assert_same_masks(encode_masks(maps, rows, columns, 0.5), dense(maps, 4, (32, 32), (64, 64)), 0.5)

    def test_memory_is_that_of_one_mask(self):
        side, count = 6000, 30
        maps = torch.full((count, 60, 60), 0.1)
        for i, one in enumerate(maps):
            one[i : i + 20, 2 * i % 40 : 2 * i % 40 + 15] = 0.9
        maps[0] = 0.9
        rows, columns = matrices((60, 60), 4, (240, 240), (side, side))
        tracemalloc.start()
        with LargestTensor() as largest:
            rles = encode_masks(maps, rows, columns, 0.5)
        peak = tracemalloc.get_traced_memory()[1]  # of numpy: torch's tensors are those that `largest` sees
        tracemalloc.stop()
        assert len(rles) == count
        assert rle.area(rles[0]) == side * side
        assert side * side <= largest.elements <= 1.01 * side * side
        assert peak < 3 * side * side


class LargestTensor(TorchDispatchMode):
    """Watches how large the tensors become that operations return."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return result


class TestSizes:
    def test_resize_matrix_is_interpolation(self):
        torch.manual_seed(0)
        signal = torch.rand(1, 1, 10)
        for size in (3, 10, 27):
            expected = F.interpolate(signal, size=size, mode="linear", align_corners=False)[0, 0]
            torch.testing.assert_close(signal[0, 0] @ resize_matrix(torch.eye(10), size), expected)

    def test_scale_boxes(self):
        boxes = torch.tensor([[10.0, 20, 30, 40], [-5, -5, 500, 500], [90, 10, 120, 20]])
        scaled = scale_boxes(boxes, (50, 100), (100, 300))
        assert scaled.tolist() == [[30, 40, 90, 80], [0, 0, 300, 100], [270, 20, 300, 40]]
        assert torch.equal(scale_boxes(boxes[:1], (50, 100), (50, 100)), boxes[:1])
        assert scale_boxes(boxes[:0], (50, 100), (100, 300)).shape == (0, 4)

    @pytest.mark.parametrize(
        ("size", "short", "longest", "expected"),
        [
            ((480, 640), 800, 1333, (800, 1067)),
            ((640, 480), 800, 1333, (1067, 800)),
            ((400, 1000), 800, 1333, (533, 1333)),
            ((100, 100), 100, 200, (100, 100)),
            ((333, 333), 50, 50, (50, 50)),
            ((100, 145), 50, 200, (50, 73)),
            ((145, 100), 50, 200, (73, 50)),
            ((1, 5000), 800, 1333, (1, 1333)),
        ],
    )
    def test_resized_size(self, size, short, longest, expected):
        assert resized_size(*size, short=short, longest=longest) == expected
