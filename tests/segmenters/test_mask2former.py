"""What is Mask2Former's own; what it shares with the others is in test_contract.py."""

import itertools
import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from helpers.reference import reference
from helpers.small_segmenters import NUM_CLASSES, SMALL, drawn, small
from uniquery import parallel
from uniquery.backbones import Backbone, PixelFormat
from uniquery.backbones.resnet import ResNet
from uniquery.backbones.swin import Swin
from uniquery.errors import DataError
from uniquery.layers.padding import repeat_border
from uniquery.segmenters import mask2former, set_prediction
from uniquery.segmenters.mask2former import Mask2Former, Mask2FormerConfig, attention_mask
from uniquery.structures import Images, Targets
from uniquery.weights.foreign.mask2former import (
    hf_mask2former_names,
    is_hf_mask2former,
    is_mask2former,
    mask2former_names,
)

SIZES = ((96, 128), (70, 90))
QUERIES = SMALL["mask2former"].queries
LAYERS = SMALL["mask2former"].decoder_layers + 1


@pytest.fixture
def batch():
    return drawn(SIZES, (4, 3))


def total(losses):
    return torch.stack(list(losses.values())).sum()


def stepped(model, images, targets, seed=1):
    """Outputs, assignment and losses, with given random points."""
    torch.manual_seed(seed)
    outputs = model(images)
    assignment = model.assign(outputs, targets)
    return outputs, assignment, model.losses(outputs, targets, assignment)


class TestMaskedAttention:
    def test_a_query_looks_where_its_mask_is(self):
        logits = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(0))
        logits[0, 1] = -1  # an empty mask: look everywhere
        logits[1, 3] = -torch.inf
        logits[1, 4] = 0  # sigmoid(0) is ½, which is inside
        attend = attention_mask(logits, None)
        for i, q in itertools.product(range(2), range(5)):
            inside = [p.item() >= 0.5 for p in logits[i, q].sigmoid()]
            assert attend[i, q].tolist() == (inside if any(inside) else [True] * 12)
        assert attend[1, 4].all()

    def test_never_at_padding(self):
        logits = torch.tensor([[[1.0, 1, -1, -1], [-1, -1, 1, 1], [-1, -1, -1, -1]]])
        valid = torch.tensor([[True, False, True, False]])
        assert attention_mask(logits, valid).tolist() == [
            [[True, False, False, False], [False, False, True, False], [True, False, True, False]]
        ]

    @torch.no_grad()
    def test_masks_at_a_levels_size_are_resized_masks(self, batch, monkeypatch):
        """The product with resized embeddings equals the resized product, which the original computes."""
        model, seen = small("mask2former", decoder_layers=4), []
        spy = lambda logits, valid: seen.append(logits) or attention_mask(logits, valid)  # noqa: E731
        monkeypatch.setitem(model.decoder.forward.__globals__, "attention_mask", spy)
        outputs = model(batch[0])
        assert [logits.shape[2] for logits in seen] == [12, 48, 192, 12]
        for layer, logits in enumerate(seen):
            pixels = repeat_border(outputs.pixels.embeddings, batch[0].sizes, 4)
            masks = torch.einsum("bnd,bdhw->bnhw", outputs.embeddings[layer], pixels)
            size = ((3, 4), (6, 8), (12, 16))[layer % 3]
            expected = F.interpolate(masks, size=size, mode="bilinear", align_corners=False).flatten(2)
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)

    def test_masks_steer_but_carry_no_gradient(self, batch):
        """Mask embeddings of the layers before the last reach the last class logits through the attention only."""
        model = small("mask2former")
        outputs = model(batch[0])
        gradients = torch.autograd.grad(
            outputs.logits[-1].sum(), list(model.decoder.masks.parameters()), allow_unused=True
        )
        assert all(gradient is None for gradient in gradients)


class TestMatching:
    def test_every_layer_matches_every_instance_once(self, batch):
        model = small("mask2former")
        outputs = model(batch[0])
        assignment = model.assign(outputs, batch[1])
        assert assignment.layer_query.shape == assignment.layer_target.shape == (7, LAYERS)
        assert torch.equal(assignment.query, assignment.layer_query[:, -1])
        assert torch.equal(assignment.target, assignment.layer_target[:, -1])
        for i, count in enumerate((4, 3)):
            mine = assignment[assignment.image == i]
            for layer in range(LAYERS):
                assert sorted(mine.layer_target[:, layer].tolist()) == list(range(count))
                assert len(set(mine.layer_query[:, layer].tolist())) == count

    def test_costs_pair_by_pair(self, batch):
        images, targets = batch
        model = small("mask2former").double()
        outputs = model(images)
        torch.manual_seed(3)
        costs = torch.cat(model.criterion.costs(outputs, targets, model._extents(outputs)), dim=2)
        torch.manual_seed(3)
        start = 0
        for i, target in enumerate(targets):
            share = torch.tensor([SIZES[i][1] / 128, SIZES[i][0] / 96])
            points = torch.rand(model.config.points, 2).double() * share
            grid = (2 * points - 1)[None, None]
            masks = F.grid_sample(target.masks[None].double(), grid, align_corners=False)[0, :, 0]
            for layer, q, k in itertools.product((0, 2), (0, 5), range(len(target))):
                product = torch.einsum("d,dhw->hw", outputs.embeddings[layer, i, q], outputs.pixels.embeddings[i])
                x = F.grid_sample(product[None, None], grid, align_corners=False)[0, 0, 0]
                p, t = x.sigmoid(), masks[k]
                expected = (
                    -2 * outputs.logits[layer, i, q].softmax(0)[target.labels[k]]
                    + 5 * F.binary_cross_entropy_with_logits(x, t)
                    + 5 * (1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1))
                )
                assert costs[layer, q, start + k].item() == pytest.approx(expected.item(), rel=1e-6)
            start += len(target)

    def test_more_instances_than_queries(self):
        images, targets = drawn(SIZES, (QUERIES + 9, 3), radii=(3, 9))
        model = small("mask2former")
        _, assignment, losses = stepped(model, images, targets)
        first = assignment[assignment.image == 0]
        assert len(first) == QUERIES
        assert sorted(first.query.tolist()) == list(range(QUERIES))
        assert len(set(first.target.tolist())) == QUERIES
        assert first.target.max() >= QUERIES  # the best of them, not the first
        total(losses).backward()
        assert total(losses).isfinite()

    @pytest.mark.parametrize("label", [-1, NUM_CLASSES])
    def test_a_label_out_of_range(self, batch, label):
        images, targets = batch
        model = small("mask2former")
        targets[1].labels[2] = label
        with pytest.raises(DataError, match=r"Labels must be from 0 to 2, as the model has 3 classes; got"):
            model.assign(model(images), targets)

    def test_a_diverged_network_is_matched_all_the_same(self, batch):
        model = small("mask2former")
        outputs = model(batch[0])
        spoilt = replace(outputs, embeddings=outputs.embeddings * torch.nan)
        assert len(model.assign(spoilt, batch[1])) == 7

    def test_queries_of_every_layer(self, batch):
        images, targets = batch
        model = small("mask2former")
        outputs = model(images)
        assignment = model.assign(outputs, targets)
        layers = model.layer_queries(outputs, assignment)
        assert len(layers) == LAYERS
        last = model.queries(outputs, assignment)
        for a, b in zip((layers[-1].embeddings, layers[-1].target), (last.embeddings, last.target), strict=True):
            assert torch.equal(a, b)
        for k, queries in enumerate(layers):
            assert torch.equal(queries.embeddings, outputs.embeddings[k].flatten(0, 1))
            assert queries.image.tolist() == [0] * QUERIES + [1] * QUERIES
            owned = {
                (i, q): t
                for i, q, t in zip(
                    assignment.image.tolist(),
                    assignment.layer_query[:, k].tolist(),
                    assignment.layer_target[:, k].tolist(),
                    strict=True,
                )
            }
            for row, target in enumerate(queries.target.tolist()):
                assert target == owned.get(divmod(row, QUERIES), -1)

    def test_queries_of_a_part_of_the_assignment(self, batch):
        """As the algorithm asks for the views' half of a batch: the others own nothing."""
        model = small("mask2former")
        outputs = model(batch[0])
        assignment = model.assign(outputs, batch[1])
        queries = model.queries(outputs, assignment[assignment.image >= 1])
        assert len(queries) == 2 * QUERIES
        assert (queries.target >= 0).sum() == 3
        assert (queries.image[queries.target >= 0] == 1).all()


class TestLosses:
    def test_names(self, batch):
        _, _, losses = stepped(small("mask2former"), *batch)
        assert list(losses) == ["loss_class", "loss_mask", "loss_dice", "loss_auxiliary"]

    def test_the_class_loss_query_by_query(self, batch):
        images, targets = batch
        model = small("mask2former", no_object_weight=0.3)
        outputs, assignment, losses = stepped(model, images, targets)
        owned = {
            (i, q): targets[i].labels[t].item()
            for i, q, t in zip(*(getattr(assignment, n).tolist() for n in ("image", "query", "target")), strict=True)
        }
        loss, weight = 0.0, 0.0
        for i, q in itertools.product(range(2), range(QUERIES)):
            label = owned.get((i, q), NUM_CLASSES)
            w = 1.0 if (i, q) in owned else 0.3
            loss -= w * outputs.logits[-1, i, q].log_softmax(0)[label].item()
            weight += w
        assert losses["loss_class"].item() == pytest.approx(2 * loss / weight, rel=1e-5)

    def test_the_mask_losses_mask_by_mask(self, batch):
        images, targets = batch
        model = small("mask2former").double()
        outputs, assignment, _ = stepped(model, images, targets)
        torch.manual_seed(4)
        losses = model.losses(outputs, targets, assignment)
        torch.manual_seed(4)
        sampling, expected = model.criterion.sampling, torch.zeros(2).double()
        for i, target in enumerate(targets):
            mine = assignment[assignment.image == i]
            points = torch.rand(sampling.num_candidates, 2).double() * torch.tensor(
                [SIZES[i][1] / 128, SIZES[i][0] / 96]
            )
            for q, k in zip(mine.query.tolist(), mine.target.tolist(), strict=True):
                product = torch.einsum("d,dhw->hw", outputs.embeddings[-1, i, q], outputs.pixels.embeddings[i])
                x, t = (
                    F.grid_sample(m[None, None], (2 * points - 1)[None, None], align_corners=False)[0, 0, 0]
                    for m in (product, target.masks[k].double())
                )
                chosen = x[: sampling.num_uncertainty_candidates].abs().argsort()[: sampling.num_uncertain]
                chosen = torch.cat([chosen, torch.arange(sampling.num_uncertainty_candidates, sampling.num_candidates)])
                p, t = x[chosen].sigmoid(), t[chosen]
                expected[0] += 5 * F.binary_cross_entropy(p, t)
                expected[1] += 5 * (1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1))
        assert losses["loss_mask"].item() == pytest.approx(expected[0].item() / 7, rel=1e-6)
        assert losses["loss_dice"].item() == pytest.approx(expected[1].item() / 7, rel=1e-6)

    def test_weights(self, batch):
        """Each loss follows its own weight; matching is given, as the weights also move it."""
        plain = small("mask2former").eval()
        outputs, assignment, _ = stepped(plain, *batch)
        names = {"class_weight": "loss_class", "mask_weight": "loss_mask", "dice_weight": "loss_dice"}
        for weight, name in names.items():
            torch.manual_seed(0)
            before = plain.losses(outputs, batch[1], assignment)
            changed = small("mask2former", **{weight: 3 * getattr(plain.config, weight)}).eval()
            torch.manual_seed(0)
            after = changed.losses(outputs, batch[1], assignment)
            for key in names.values():
                factor = 3 if key == name else 1
                assert after[key].item() == pytest.approx(factor * before[key].item(), rel=1e-5), key

    def test_normalizers_are_means_over_processes(self, batch, monkeypatch):
        model = small("mask2former").eval()
        outputs, assignment, _ = stepped(model, *batch)

        def losses():
            torch.manual_seed(0)
            return model.losses(outputs, batch[1], assignment)

        alone = losses()
        for module in (parallel, set_prediction):
            monkeypatch.setattr(module, "all_reduce_mean", lambda value: 4 * value)
        for key, loss in losses().items():
            assert loss.item() == pytest.approx(alone[key].item() / 4, rel=1e-5), key

    def test_mask_loss_is_that_of_the_base(self, batch):
        """On unpadded images both draw the same points."""
        images, targets = drawn(((96, 128),) * 2, (4, 3))
        model = small("mask2former")
        outputs, assignment, _ = stepped(model, images, targets)
        one = replace(outputs, logits=outputs.logits[-1:], embeddings=outputs.embeddings[-1:])
        last = replace(assignment, layer_query=assignment.query[:, None], layer_target=assignment.target[:, None])
        torch.manual_seed(0)
        base = model.criterion.mask_losses(one, targets, last, model._extents(one)).sum()
        queries = model.queries(outputs, assignment)
        queries = queries[queries.target >= 0]
        torch.manual_seed(0)
        loss = model.mask_loss(model.decode(queries, outputs.pixels), queries, targets)
        torch.testing.assert_close(loss, base)

    def test_gradient_of_the_mask_loss(self, batch):
        """With random points alone: which are the most uncertain may change between two sides of a difference."""
        images, targets = batch
        model = small("mask2former", points=16, queries=8, importance=0.0).double()
        outputs, assignment, _ = stepped(model, images, targets)
        queries = model.queries(outputs, assignment)
        queries = queries[queries.target >= 0]
        logits = model.decode(queries, outputs.pixels).detach().requires_grad_()

        def loss(x):
            torch.manual_seed(0)
            return model.mask_loss(x, queries, targets)

        assert torch.autograd.gradcheck(loss, logits, fast_mode=True)

    def test_invalid_pixels_do_not_count_in_the_base_either(self, batch):
        images, targets = batch
        valid = torch.zeros(96, 128, dtype=torch.bool)
        valid[:, :64] = True
        known = [replace(t, valid=valid) for t in targets]
        flipped = [replace(t, masks=t.masks ^ ~valid) for t in known]
        (_, _, first), (_, _, second) = (stepped(small("mask2former"), images, t) for t in (known, flipped))
        for key, loss in first.items():
            assert torch.equal(loss, second[key]), key


class LocalBackbone(Backbone):
    """Each cell sees the pixels it covers and no others, so that what differs is the segmenter's doing."""

    def __init__(self):
        super().__init__()
        self.channels = {4: 8, 8: 8, 16: 8, 32: 8}
        self.pixels = PixelFormat(mean=(127.5,) * 3, std=(50.0,) * 3, order="RGB")
        self.patches = nn.ModuleDict({str(s): nn.Conv2d(3, c, s, stride=s) for s, c in self.channels.items()})

    def forward(self, images):
        return {stride: self.patches[str(stride)](images) for stride in self.channels}


def padded(image, size):
    pixels = torch.full((1, 3, *size), 77, dtype=torch.uint8)
    pixels[0, :, : image.shape[1], : image.shape[2]] = image
    return pixels


class TestPadding:
    """The same image of 64 × 96, alone and beside padding."""

    @pytest.fixture
    def model(self):
        torch.manual_seed(0)
        model = Mask2Former(LocalBackbone(), NUM_CLASSES, SMALL["mask2former"]).double().eval()
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
        return model

    def runs(self, model, sizes=((64, 96), (96, 160), (64, 128))):
        images, targets = drawn(((64, 96),), (3,))
        for size in sizes:
            masks = F.pad(targets[0].masks, (0, size[1] - 96, 0, size[0] - 64))
            yield Images(padded(images.pixels[0], size), ((64, 96),)), [replace(targets[0], masks=masks)]

    def test_outputs(self, model):
        first, *others = (model(images) for images, _ in self.runs(model))
        for outputs in others:
            torch.testing.assert_close(outputs.logits, first.logits, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(outputs.embeddings, first.embeddings, rtol=1e-6, atol=1e-6)
            inside = outputs.pixels.embeddings[..., :16, :24]
            torch.testing.assert_close(inside, first.pixels.embeddings, rtol=1e-6, atol=1e-6)
            assert not outputs.pixels.embeddings[..., 16:, :].any()

    def test_losses(self, model):
        first, *others = (stepped(model, *run)[2] for run in self.runs(model))
        for losses in others:
            for key, loss in first.items():
                assert losses[key].item() == pytest.approx(loss.item(), rel=1e-5), key

    @torch.no_grad()
    def test_predictions(self, model):
        first, *others = (model.predict(model(images), [(50, 70)])[0] for images, _ in self.runs(model))
        for instances in others:
            torch.testing.assert_close(instances.scores, first.scores, rtol=1e-5, atol=1e-6)
            assert instances.rles == first.rles

    def test_a_neighbor_of_another_size(self, model):
        """In a batch as alone."""
        images, _ = drawn(((64, 96), (96, 128)), (3, 2))
        together = model(images)
        alone = model(Images(images.pixels[:1, :, :64, :96], ((64, 96),)))
        torch.testing.assert_close(together.logits[:, :1], alone.logits, rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize("size", [(70, 90), (100, 136)])
    def test_no_mask_is_at_a_border_for_lack_of_a_look(self, model, size, monkeypatch):
        """A coarse cell at the border may lie over padding with all that is looked at."""
        seen = []
        look = mask2former.attention_mask
        monkeypatch.setattr(mask2former, "attention_mask", lambda *a: (seen.append(a), look(*a))[1])
        images, _ = drawn((size,), (3,))
        model(images)
        for logits, valid in seen:
            inside = torch.ones_like(logits, dtype=torch.bool) if valid is None else valid[:, None].expand_as(logits)
            assert (logits[inside] != 0).all()

    def test_the_original_attends_to_it(self, model):
        original = Mask2Former(
            model.backbone,
            NUM_CLASSES,
            Mask2FormerConfig(**{**SMALL["mask2former"].model_dump(), "attend_padding": True}),
        ).double()
        original.load_state_dict(model.state_dict())
        first, second, _ = (original.eval()(images) for images, _ in self.runs(model))
        assert not torch.allclose(first.logits, second.logits, rtol=1e-3)
        (unpadded, _), *_ = self.runs(model)
        assert torch.equal(original(unpadded).logits, model(unpadded).logits)


class TestPredict:
    @torch.no_grad()
    def test_the_best_pairs_of_query_and_class(self, batch):
        model = small("mask2former", max_detections=9).eval()
        outputs = model(batch[0])
        for i, size in enumerate(((120, 150), (70, 90))):
            (instances,) = model.predict(
                replace(
                    outputs,
                    logits=outputs.logits[:, i : i + 1],
                    embeddings=outputs.embeddings[:, i : i + 1],
                    pixels=replace(outputs.pixels, embeddings=outputs.pixels.embeddings[i : i + 1]),
                    sizes=outputs.sizes[i : i + 1],
                ),
                [size],
            )
            expected = self.naive(outputs, i, size)
            assert len(instances) == len(expected)
            for k, (score, label, mask) in enumerate(expected):
                assert instances.scores[k].item() == pytest.approx(score, abs=1e-4)
                assert instances.labels[k] == label
                assert (instances.masks[k] != mask).float().mean() < 1e-3
                ys, xs = instances.masks[k].nonzero(as_tuple=True)
                assert instances.boxes[k].tolist() == [xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]

    def naive(self, outputs, i, size):
        probabilities = outputs.logits[-1, i].softmax(1)[:, :-1]
        height, width = SIZES[i]
        pixels = outputs.pixels.embeddings[i, :, : -(-height // 4), : -(-width // 4)]
        pairs = sorted(itertools.product(range(QUERIES), range(NUM_CLASSES)), key=lambda p: -probabilities[p])[:9]
        found = []
        for q, label in pairs:
            logits = torch.einsum("d,dhw->hw", outputs.embeddings[-1, i, q], pixels)[None, None]
            logits = F.interpolate(logits, scale_factor=4, mode="bilinear")[..., :height, :width]
            logits = F.interpolate(logits, size=size, mode="bilinear")[0, 0]
            if (logits > 0).any():
                score = probabilities[q, label] * logits[logits > 0].sigmoid().mean()
                found.append((score.item(), label, logits > 0))
        return sorted(found, key=lambda one: -one[0])

    @torch.no_grad()
    def test_panoptic(self, batch):
        model = small("mask2former", object_threshold=0.3, overlap_threshold=0.0).eval()
        outputs = model(batch[0])
        generator = torch.Generator().manual_seed(0)  # the queries of an untrained network are all alike
        logits, embeddings, pixels = (
            torch.randn(x.shape, generator=generator)
            for x in (outputs.logits, outputs.embeddings, outputs.pixels.embeddings)
        )
        outputs = replace(
            outputs, logits=4 * logits, embeddings=embeddings, pixels=replace(outputs.pixels, embeddings=pixels)
        )
        results = model.predict_panoptic(outputs, SIZES, is_thing=[True, False, True])
        assert len(results) == 2
        for result, size in zip(results, SIZES, strict=True):
            assert result.ids.shape == size
            assert set(result.ids.unique().tolist()) - {0} <= {s.id for s in result.segments}
            assert [s.is_thing for s in result.segments] == [s.label != 1 for s in result.segments]
            assert all(0.3 < s.score <= 1 for s in result.segments)
            assert sum(s.label == 1 for s in result.segments) <= 1
            assert len(result.segments) > 3
            assert {s.label for s in result.segments} == {0, 1, 2}
        silent = small("mask2former", object_threshold=1.0).eval()
        assert all(not r.segments for r in silent.predict_panoptic(outputs, SIZES, [True] * 3))


class TestConfig:
    def test_heads_must_divide_the_channels(self):
        with pytest.raises(ValidationError, match="'heads' must divide 'channels'; 5 does not divide 256"):
            Mask2FormerConfig(heads=5)

    @pytest.mark.parametrize(
        "setting",
        [
            {"channels": 48},
            {"queries": 0},
            {"decoder_layers": 0},
            {"encoder_layers": 0},
            {"mask_threshold": 1.0},
            {"importance": 1.5},
            {"oversample": 0.5},
            {"points": 0},
            {"no_object_weight": 0.0},
            {"a": 1},
        ],
        ids=str,
    )
    def test_settings_out_of_range(self, setting):
        with pytest.raises(ValidationError, match=next(iter(setting))):
            Mask2FormerConfig(**setting)

    def test_fewer_layers_than_levels(self, batch):
        model = small("mask2former", decoder_layers=1)
        total(stepped(model, *batch)[2]).backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


class TestNames:
    @pytest.mark.realdata
    def test_the_originals_cover_the_full_model(self):
        shapes = json.loads(reference("parity", "mask2former", "full_state_dict_shapes.json").read_text())
        foreign = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        with torch.device("meta"):
            model = Mask2Former(ResNet(50, norm="frozen"), 80)
        ours = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        assert is_mask2former(foreign)
        assert not is_hf_mask2former(foreign)
        assert {name: tuple(tensor.shape) for name, tensor in mask2former_names(foreign).items()} == ours

    def test_the_originals_swin(self):
        ours = Mask2Former(Swin(32, (2, 2, 2, 2)), 5, SMALL["mask2former"]).state_dict()
        names = {"backbone.patch_embed.proj.weight", "backbone.layers.3.blocks.1.attn.relative_position_bias_table"}
        names |= {"backbone.layers.2.downsample.norm.bias", "backbone.norm0.weight"}
        assert set(mask2former_names(dict.fromkeys(names, torch.zeros(1)))) <= set(ours)
        assert len(mask2former_names(dict.fromkeys(names, torch.zeros(1)))) == 4


def hugging_faces(kind):
    """Our small model and theirs, with the same stirred weights, in float64."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    stages = {"out_features": ["stage1", "stage2", "stage3", "stage4"]}
    if kind == "resnet":
        wide = {"embedding_size": 8, "hidden_sizes": [16, 32, 64, 128], "depths": [3, 4, 6, 3]}
        their_backbone = transformers.ResNetConfig(**wide, **stages)
        backbone = ResNet(50, norm="frozen", stem_channels=8, width=4, res2_channels=16)
    else:
        deep = {"embed_dim": 32, "num_heads": [1, 2, 4, 8], "depths": [2, 2, 2, 2]}
        their_backbone = transformers.SwinConfig(**deep, **stages)
        backbone = Swin(32, (2, 2, 2, 2))
    config = transformers.Mask2FormerConfig(
        backbone_config=their_backbone,
        num_labels=5,
        feature_size=64,
        mask_feature_size=64,
        hidden_dim=64,
        encoder_layers=2,
        encoder_feedforward_dim=96,
        decoder_layers=4,
        dim_feedforward=80,
        num_attention_heads=4,
        num_queries=12,
        train_num_points=256,
    )
    theirs = transformers.Mask2FormerForUniversalSegmentation(config).eval()
    for parameter in theirs.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.02)
    settings = Mask2FormerConfig(
        queries=12,
        channels=64,
        heads=4,
        encoder_layers=2,
        encoder_width=96,
        decoder_layers=3,
        decoder_width=80,
        points=256,
    )
    ours = Mask2Former(backbone, 5, settings).eval()
    ours.load_state_dict(hf_mask2former_names(theirs.state_dict()))
    return ours.double(), theirs.double()


@pytest.mark.parametrize("kind", ["resnet", "swin"])
class TestHuggingFacesModel:
    @torch.no_grad()
    def test_every_layer_gives_the_same(self, kind):
        ours, theirs = hugging_faces(kind)
        images, _ = drawn(((64, 96),), (3,))
        outputs = ours(images)
        expected = theirs(pixel_values=ours.normalize(images), output_auxiliary_logits=True)
        layers = [*expected.auxiliary_logits, expected]
        assert len(layers) == len(outputs.logits) == 4
        for logits, embeddings, layer in zip(outputs.logits, outputs.embeddings, layers, strict=True):
            masks = torch.einsum("bnd,bdhw->bnhw", embeddings, outputs.pixels.embeddings)
            torch.testing.assert_close(logits, layer["class_queries_logits"], rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(masks, layer["masks_queries_logits"], rtol=1e-6, atol=1e-6)

    def test_every_layers_losses_and_all_gradients_are_the_same(self, kind, monkeypatch):
        """On the same points: ours draws those that compete and the others at once, theirs one after the other."""
        ours, theirs = hugging_faces(kind)
        images, targets = drawn(((64, 96), (64, 96)), (4, 3))
        sampling = ours.criterion.sampling
        table = torch.rand(sampling.num_candidates, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        parts = {
            sampling.points: table[: sampling.points],  # for matching
            sampling.num_candidates: table,
            sampling.num_uncertainty_candidates: table[: sampling.num_uncertainty_candidates],
            sampling.points - sampling.num_uncertain: table[sampling.num_uncertainty_candidates :],
        }
        assert len(parts) == 4
        real = torch.rand

        def rand(*shape, **more):
            return parts[shape[-2]].expand(shape).contiguous() if len(shape) > 1 else real(*shape, **more)

        monkeypatch.setattr(torch, "rand", rand)
        outputs = ours(images)
        assignment = ours.assign(outputs, targets)
        of_class = ours.criterion.class_losses(outputs, targets, assignment)
        of_mask, of_dice = ours.criterion.mask_losses(outputs, targets, assignment, ours._extents(outputs))
        total(ours.losses(outputs, targets, assignment)).backward()
        seen = []
        theirs.criterion.register_forward_hook(lambda *arguments: seen.append(arguments[2]))  # weighted afterwards
        labels = {"mask_labels": [t.masks.double() for t in targets], "class_labels": [t.labels for t in targets]}
        theirs(pixel_values=ours.normalize(images), **labels).loss.backward()
        (expected,) = seen
        assert len(expected) == 3 * len(outputs.logits)
        for name, losses in (("cross_entropy", of_class), ("mask", of_mask), ("dice", of_dice)):
            wanted = [expected[f"loss_{name}{suffix}"].item() for suffix in ("_0", "_1", "_2", "")]
            assert losses.tolist() == pytest.approx(wanted, rel=1e-8)
        gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in theirs.named_parameters()}
        wanted = hf_mask2former_names({**theirs.state_dict(), **gradients})
        for name, parameter in ours.named_parameters():
            torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-6, atol=1e-9, msg=lambda m, n=name: n + m)

    def test_the_names_tell_whose_they_are(self, kind):
        foreign = hugging_faces(kind)[1].state_dict()
        assert is_hf_mask2former(foreign)
        assert not is_mask2former(foreign)


class Largest(TorchDispatchMode):
    """Remembers the largest floating-point tensor that any operation returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.layout == torch.strided:
                self.numel = max(self.numel, leaf.numel())
        return out


def test_masks_are_never_copied_in_a_wider_type():
    """A hundred full-size masks in float32 would be what memory goes to."""
    images, targets = drawn(SIZES, (100, 3), radii=(3, 9))
    model = small("mask2former", points=64)
    outputs = model(images)
    with Largest() as largest:
        total(model.losses(outputs, targets, model.assign(outputs, targets))).backward()
    assert 0 < largest.numel < targets[0].masks.numel() / 2


def test_one_transfer_for_all_layers_and_images(batch, monkeypatch):
    images, targets = batch
    model = small("mask2former")
    outputs = model(images)
    calls = []
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: calls.append(self.shape) or self)
    model.assign(outputs, targets)
    assert calls == [(LAYERS * QUERIES + 1, 7)]


def test_targets_without_masks_keep_their_place():
    """An image without instances between two that have some."""
    images, targets = drawn((*SIZES, (64, 64)), (2, 0, 3))
    model = small("mask2former")
    _, assignment, losses = stepped(model, images, targets)
    assert assignment.image.tolist() == [0, 0, 2, 2, 2]
    assert isinstance(targets[1], Targets)
    assert total(losses).isfinite()
