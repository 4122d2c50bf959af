"""What is SOTR's own, its layers against loops; what it shares with SOLOv2 is in test_solov2.py and test_grid.py."""

import itertools
import json

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch.autograd import gradcheck

from helpers.reference import reference
from helpers.small_segmenters import NUM_CLASSES, drawn, small
from uniquery.backbones.resnet import ResNet
from uniquery.layers import winograd
from uniquery.layers.winograd import LargeTileWinograd
from uniquery.segmenters.sotr import SOTR, AxialAttention, ConvBranches, SOTRConfig, TwinTransformer
from uniquery.weights.foreign import to_uniquery_names
from uniquery.weights.foreign.adelaidet import is_condinst, is_solov2
from uniquery.weights.foreign.sotr import is_sotr, original_sotr_names, sotr_names

SIZES = ((96, 128), (70, 90))


def stirred(module):
    """In double precision, with gates that are not 0."""
    torch.manual_seed(0)
    for parameter in module.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3
    return module.double()


def random_map(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def naive_attention(layer: AxialAttention, x, axis):
    """Cell by cell and head by head: a softmax over the cells of its column or row."""
    batch, height, width, channels = x.shape
    size = channels // layer.heads
    keys, values = layer.keys_values.weight.chunk(2)
    y = torch.zeros_like(x)
    for i, row, column in itertools.product(range(batch), range(height), range(width)):
        others = x[i, :, column] if axis == "columns" else x[i, row]
        result = []
        for head in range(layer.heads):
            part = slice(head * size, (head + 1) * size)
            query = layer.queries.weight[part] @ x[i, row, column]
            scores = torch.stack([query @ (keys[part] @ other) / size**0.5 for other in others])
            weights = scores.exp() / scores.exp().sum()
            result.append(sum(w * (values[part] @ other) for w, other in zip(weights, others, strict=True)))
        y[i, row, column] = layer.gate * (layer.output.weight @ torch.cat(result) + layer.output.bias)
    return y


def naive_convs(layer: ConvBranches, x):
    """Branch by branch, as the original has it."""
    x = x.permute(0, 3, 1, 2)
    branches = [
        gate * second(F.leaky_relu(first(x), 0.01))
        for gate, first, second in zip(layer.gates, layer.first, layer.second, strict=True)
    ]
    return sum(branches).permute(0, 2, 3, 1)


class TestLayers:
    @pytest.mark.parametrize("axis", ["columns", "rows"])
    def test_attention_equals_loops(self, axis):
        layer, x = stirred(AxialAttention(8, 2, axis)), random_map(2, 3, 4, 8)
        torch.testing.assert_close(layer(x), naive_attention(layer, x, axis))

    @pytest.mark.parametrize("axis", ["columns", "rows"])
    def test_gradient_of_the_attention(self, axis):
        layer, x = stirred(AxialAttention(4, 2, axis)), random_map(2, 3, 2, 4).requires_grad_()
        assert gradcheck(lambda x, *_: layer(x), (x, *layer.parameters()))

    def test_two_branches_in_one_are_the_sum_of_both(self):
        layer, maps = stirred(ConvBranches(5)), [random_map(2, 4, 6, 5), random_map(2, 1, 3, 5)]
        for y, x in zip(layer(maps), maps, strict=True):
            torch.testing.assert_close(y, naive_convs(layer, x))

    def test_gradient_of_the_convolutions(self):
        layer, maps = stirred(ConvBranches(2)), [random_map(1, 3, 2, 2), random_map(1, 1, 2, 2)]
        for x in maps:
            x.requires_grad_()
        assert gradcheck(lambda *inputs: tuple(layer(inputs[:2])), (*maps, *layer.parameters()))


class TestTwinTransformer:
    @staticmethod
    def naive(transformer, x):
        """(B, C, h, w), one map, in the steps of the paper."""
        x = torch.cat([x, x], dim=3).permute(0, 2, 3, 1)
        for layer in transformer:
            x = x + naive_attention(layer.columns, x, "columns") + naive_attention(layer.rows, x, "rows")
            x = x + naive_convs(layer.convs, x)
        left, right = x.permute(0, 3, 1, 2).chunk(2, dim=3)
        return torch.stack([left, right]).mean(0)

    def test_equals_the_naive_way(self):
        transformer = stirred(TwinTransformer(4, 2, layers=2))
        maps = [random_map(2, 4, 3, 3), random_map(2, 4, 2, 4), random_map(2, 4, 1, 1)]
        for y, x in zip(transformer(maps), maps, strict=True):
            torch.testing.assert_close(y, self.naive(transformer, x))

    def test_gradient(self):
        transformer = stirred(TwinTransformer(4, 2, layers=1))
        maps = [random_map(1, 4, 2, 2).requires_grad_(), random_map(1, 4, 1, 2).requires_grad_()]
        assert gradcheck(lambda *inputs: tuple(transformer(inputs[:2])), (*maps, *transformer.parameters()))

    def test_starts_as_the_identity(self):
        x = torch.randn(2, 32, 4, 5)
        (y,) = TwinTransformer(32, 4, layers=2)([x])
        assert torch.equal(y, x)

    @pytest.mark.parametrize("branch", ["columns", "rows", "convs"])
    def test_each_branch_reaches_as_far_as_it_should(self, branch):
        """A change of one cell, through one branch alone."""
        transformer = stirred(TwinTransformer(4, 2, layers=1))
        gates = {"columns": [transformer[0].columns.gate], "rows": [transformer[0].rows.gate]}
        gates["convs"] = list(transformer[0].convs.gates)
        for name, of_branch in gates.items():
            for gate in of_branch:
                gate.data.fill_(float(name == branch))
        x = random_map(1, 4, 9, 9)
        changed = x.clone()
        changed[..., 4, 0] += 1
        (before,), (after,) = transformer([x]), transformer([changed])
        reached = ((after - before).abs().amax(1)[0] > 1e-9).nonzero().tolist()
        expected = {
            "columns": [(y, 0) for y in range(9)],
            "rows": [(4, x) for x in range(9)],
            # two cells far, and from the first column of the right half over the border to the last of the left
            "convs": [(y, x) for y in range(2, 7) for x in (0, 1, 2, 7, 8)],
        }
        assert {tuple(at) for at in reached} == set(expected[branch])

    def test_fewer_products_change_neither_outputs_nor_gradients(self, monkeypatch):
        transformer = stirred(TwinTransformer(256, 8, layers=1))
        for parameter in transformer.parameters():
            parameter.data.mul_(0.1)
        maps = [random_map(1, 256, 4, 4).requires_grad_(), random_map(1, 256, 3, 5).requires_grad_()]

        def results():
            y = transformer(maps)
            total = sum(x.square().sum() for x in y)
            return y, torch.autograd.grad(total, (*maps, *transformer.parameters()))

        calls, apply = [], LargeTileWinograd.apply
        monkeypatch.setattr(LargeTileWinograd, "apply", lambda *a: calls.append(a[0].shape[:2]) or apply(*a))
        outputs, gradients = results()
        assert calls == [(512, 256), (256, 512)]
        monkeypatch.setattr(winograd, "_use_winograd", lambda *_: False)
        expected, wanted = results()
        assert len(calls) == 2
        for a, b in zip((*outputs, *gradients), (*expected, *wanted), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


class TestForward:
    @pytest.mark.parametrize(
        ("grids", "ranges"),
        [((7,), ((0, 999),)), ((9, 5), ((0, 30), (20, 999))), ((3, 2, 1, 1), ((0, 20), (20, 40), (40, 60), (60, 80)))],
    )
    def test_fewer_levels(self, grids, ranges):
        images, targets = drawn(SIZES, (4, 3))
        model = small("sotr", grids=grids, size_ranges=ranges)
        outputs = model(images)
        assert outputs.logits.shape == (2, sum(s * s for s in grids), NUM_CLASSES)
        assert outputs.kernels.shape[:2] == outputs.logits.shape[:2]
        sum(model.losses(outputs, targets, model.assign(outputs, targets)).values()).backward()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
        assert len(model.eval().predict(outputs, SIZES)) == 2

    @torch.no_grad()
    def test_cells_are_counted_level_by_level_and_row_by_row(self):
        grids = (9, 4)
        model = small("sotr", grids=grids, size_ranges=((0, 99), (9, 999))).eval()
        images, _ = drawn(SIZES, (4, 3))
        p2, p3, *_ = model.fpn(model.backbone(model.normalize(images))).values()
        outputs, start = model(images), 0
        for features, side in zip((F.avg_pool2d(p2, 2), p3), grids, strict=True):
            resized = F.interpolate(features, size=(side, side), mode="bilinear")
            (cells,) = model.transformer([resized])
            for row, column in itertools.product(range(side), range(side)):
                at = start + row * side + column
                torch.testing.assert_close(outputs.logits[:, at], model.classes(cells[..., row, column]))
                torch.testing.assert_close(outputs.kernels[:, at], model.kernels(cells[..., row, column]))
            start += side * side
        assert start == outputs.logits.shape[1]

    def test_embeddings_are_never_negative(self):
        embeddings = small("sotr")(drawn(SIZES, (4, 3))[0]).pixels.embeddings
        assert (embeddings >= 0).all()
        assert embeddings.any()

    @torch.no_grad()
    def test_the_transformer_changes_the_masks_too(self):
        model = small("sotr").eval()
        images, _ = drawn(SIZES, (4, 3))
        before = model(images).pixels.embeddings
        model.transformer[0].rows.gate += 1
        assert not torch.allclose(model(images).pixels.embeddings, before, atol=1e-3)


class TestConfig:
    @pytest.mark.parametrize(
        "setting",
        [{"channels": 48}, {"layers": 0}, {"heads": 0}, {"heads": 7}, {"grids": ()}, {"head_convs": 2}],
        ids=str,
    )
    def test_settings_out_of_range(self, setting):
        with pytest.raises(ValidationError, match=next(iter(setting))):
            SOTRConfig(**setting)

    def test_the_defaults_are_the_originals(self):
        config = SOTRConfig()
        assert (config.channels, config.layers, config.heads) == (256, 12, 8)
        assert (config.mask_channels, config.kernel_channels) == (128, 256)
        assert config.grids == (40, 36, 24, 16, 12)
        assert (config.score_threshold, config.candidates, config.final_threshold) == (0.1, 500, 0.05)


@pytest.mark.realdata
def test_the_originals_names_cover_the_full_model():
    shapes = json.loads(reference("parity", "sotr", "full_state_dict_shapes.json").read_text())
    foreign = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    with torch.device("meta"):
        model = SOTR(ResNet(50, norm="frozen", stride_in_1x1=True), 80)
    ours = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert {name: tuple(tensor.shape) for name, tensor in sotr_names(foreign).items()} == ours
    back = original_sotr_names(model.state_dict())
    assert {name: list(tensor.shape) for name, tensor in back.items()} == shapes
    assert to_uniquery_names(foreign).keys() == ours.keys()
    assert is_sotr(foreign)
    assert not is_solov2(foreign)
    assert not is_condinst(foreign)
    assert not is_sotr(model.state_dict())
