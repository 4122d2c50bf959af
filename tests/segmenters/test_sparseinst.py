"""What is SparseInst's own, its formulas against loops; what it shares with the others is in test_contract.py."""

import itertools
import json
import math
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch.autograd import gradcheck

from helpers.reference import reference
from helpers.small_segmenters import NUM_CLASSES, SMALL, boxes_of, drawn, small
from uniquery import parallel
from uniquery.backbones.resnet import ResNet
from uniquery.errors import DataError
from uniquery.layers.fpn import FPN
from uniquery.segmenters import sparseinst
from uniquery.segmenters.grid import quarter_shares
from uniquery.segmenters.sparseinst import (
    POOL_SIZES,
    ContextEncoder,
    PyramidPooling,
    SparseInst,
    SparseInstConfig,
    compare_masks,
    dice_scores,
    pool_by_activation,
    upsample_masks,
)
from uniquery.structures import Images, Queries, Targets
from uniquery.weights.foreign import to_uniquery_names
from uniquery.weights.foreign.sparseinst import is_sparseinst, original_sparseinst_names, sparseinst_names

SIZES = ((64, 96), (64, 64))
QUERIES = SMALL["sparseinst"].queries


@pytest.fixture
def batch():
    return drawn(SIZES, (4, 3), radii=(6, 20))


def naive_masks(model, outputs, i):
    """(N, 2h, 2w) logits of all queries, resized by hand: each cell and its neighbors at a distance of ¼ and ¾."""
    logits = torch.einsum("nd,dhw->nhw", outputs.kernels[i], outputs.pixels.embeddings[i])
    _, height, width = logits.shape
    result = logits.new_zeros(len(logits), 2 * height, 2 * width)
    for y, x in itertools.product(range(2 * height), range(2 * width)):
        at_y, at_x = (y + 0.5) / 2 - 0.5, (x + 0.5) / 2 - 0.5
        for row, column in itertools.product(*([math.floor(p), math.floor(p) + 1] for p in (at_y, at_x))):
            weight = (1 - abs(at_y - row)) * (1 - abs(at_x - column))
            result[:, y, x] += weight * logits[:, min(max(row, 0), height - 1), min(max(column, 0), width - 1)]
    return result


def naive_share(mask, y, x):
    """The mean of the 2 × 2 pixels in the middle of a 4 × 4 block."""
    return mask[4 * y + 1 : 4 * y + 3, 4 * x + 1 : 4 * x + 3].double().mean().item()


def naive_shares(mask):
    height, width = (side // 4 for side in mask.shape)
    return torch.tensor([[naive_share(mask, y, x) for x in range(width)] for y in range(height)], dtype=torch.float64)


class TestFormulas:
    def test_masks_are_resized_bilinearly(self, batch):
        masks = batch[1][0].masks
        expected = torch.stack([naive_shares(mask) for mask in masks])
        assert set(expected.flatten().tolist()) == {0, 0.25, 0.5, 0.75, 1}
        torch.testing.assert_close(quarter_shares(masks).double(), expected)
        resized = F.interpolate(masks[None].float(), scale_factor=0.25, mode="bilinear")[0]
        torch.testing.assert_close(quarter_shares(masks), resized)

    def test_logits_are_upsampled_bilinearly(self, batch):
        model = small("sparseinst").double()
        outputs = model(batch[0])
        queries = model.queries(outputs, model.assign(outputs, batch[1]))
        upsampled = upsample_masks(model.decode(queries, outputs.pixels)).unflatten(0, (2, QUERIES))
        for i in range(2):
            torch.testing.assert_close(upsampled[i], naive_masks(model, outputs, i))

    def test_dice_of_every_pair(self):
        p, t = torch.rand(3, 2, 5, dtype=torch.float64), torch.rand(4, 2, 5, dtype=torch.float64)
        for n, k in itertools.product(range(3), range(4)):
            expected = 2 * (p[n] * t[k]).sum() / ((p[n] ** 2).sum() + (t[k] ** 2).sum() + 1e-4)
            torch.testing.assert_close(dice_scores(p, t)[n, k], expected)

    def test_pooling_by_activation(self):
        features, activation = torch.randn(2, 3, 2, 4).double(), torch.randn(2, 5, 2, 4).double()
        pooled = pool_by_activation(features, activation)
        for i, m, c in itertools.product(range(2), range(5), range(3)):
            weights = [1 / (1 + math.exp(-a)) for a in activation[i, m].flatten().tolist()]
            values = features[i, c].flatten().tolist()
            expected = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
            assert pooled[i, m, c].item() == pytest.approx(expected, rel=1e-12)

    def test_a_map_that_is_active_nowhere_pools_nothing(self):
        features = torch.ones(1, 3, 2, 4, requires_grad=True)
        activation = torch.full((1, 1, 2, 4), -100.0, requires_grad=True)
        pooled = pool_by_activation(features, activation)
        pooled.sum().backward()
        assert pooled.abs().max() < 1e-5
        assert activation.grad.isfinite().all()

    def test_gradient_of_the_pooling(self):
        features, activation = torch.randn(2, 3, 2, 2).double(), torch.randn(2, 4, 2, 2).double()
        assert gradcheck(pool_by_activation, (features.requires_grad_(), activation.requires_grad_()))

    def test_pooling_of_the_pyramid(self):
        pooling = PyramidPooling(8).double()
        x = torch.randn(1, 8, 6, 12).double()
        parts = []
        for level, size in zip(pooling.levels, POOL_SIZES, strict=True):
            cells = x.view(1, 8, size, 6 // size, size, 12 // size).mean((3, 5))
            values = torch.einsum("oc,bchw->bohw", level.weight[..., 0, 0], cells) + level.bias[:, None, None]
            parts.append(F.interpolate(values.clamp(min=0), size=(6, 12), mode="bilinear"))
        joined = torch.cat([*parts, x], dim=1)
        expected = torch.einsum("oc,bchw->bohw", pooling.merge.weight[..., 0, 0], joined)
        torch.testing.assert_close(pooling(x), (expected + pooling.merge.bias[:, None, None]).clamp(min=0))

    def test_context_of_a_pyramid_is_that_of_its_coarsest_lateral(self):
        fpn = FPN({8: 3, 16: 4}, 2, context=torch.nn.Tanh())
        features = {8: torch.randn(1, 3, 4, 4), 16: torch.randn(1, 4, 2, 2)}
        coarse = fpn.laterals["16"](features[16]).tanh()
        pyramid = fpn(features)
        torch.testing.assert_close(pyramid[16], fpn.outputs["16"](coarse))
        fine = fpn.laterals["8"](features[8]) + F.interpolate(coarse, scale_factor=2, mode="nearest")
        torch.testing.assert_close(pyramid[8], fpn.outputs["8"](fine))


class TestEncoder:
    FEATURES: ClassVar = {8: (5, 8, 12), 16: (6, 4, 6), 32: (7, 2, 3)}

    def made(self, **settings):
        torch.manual_seed(0)
        channels = {stride: shape[0] for stride, shape in self.FEATURES.items()}
        encoder = ContextEncoder(channels, SparseInstConfig(channels=32, **settings)).double()
        return encoder, {stride: 9 * torch.randn(2, *shape).double() for stride, shape in self.FEATURES.items()}

    def test_all_levels_are_resized_joined_and_fused(self):
        encoder, features = self.made()
        finest, *coarser = encoder.pyramid(features).values()
        joined = torch.cat([finest, *(F.interpolate(x, size=(8, 12), mode="bilinear") for x in coarser)], dim=1)
        torch.testing.assert_close(encoder(features), encoder.fusion(joined))

    def test_group_normalization_gives_unit_scale(self):
        encoder, features = self.made(norm="group")
        plain, _ = self.made()
        assert set(encoder.state_dict()) - set(plain.state_dict()) == {"norm.weight", "norm.bias"}
        assert encoder(features).std().item() == pytest.approx(1, abs=0.01)
        assert plain(features).std() > 3
        torch.testing.assert_close(encoder(features), F.group_norm(plain(features), 16))


class TestInstanceBranch:
    @pytest.mark.parametrize("groups", [1, 2, 4])
    def test_a_query_joins_the_features_of_its_maps(self, groups):
        """Map g of query n is channel g · N + n, made from group g of the channels."""
        model = small("sparseinst", groups=groups).double()
        branch = model.instance_branch
        x = torch.randn(2, 18, 4, 6).double()
        features = branch.convs(x)
        logits, kernels, objectness = branch(x)
        assert (branch.merge is None) == (groups == 1)
        for i, n in itertools.product(range(2), (0, 7, QUERIES - 1)):
            parts = []
            for g in range(groups):
                channels = slice(g * 16 // groups, (g + 1) * 16 // groups)
                weight, bias = (p[g * QUERIES + n : g * QUERIES + n + 1] for p in branch.activation.parameters())
                activation = F.conv2d(features[i : i + 1, channels], weight, bias, padding=1)
                parts.append(pool_by_activation(features[i : i + 1], activation)[0, 0])
            joined = torch.cat(parts)
            joined = joined if branch.merge is None else branch.merge(joined).relu()
            torch.testing.assert_close(logits[i, n], branch.classes(joined))
            torch.testing.assert_close(kernels[i, n], branch.kernels(joined))
            torch.testing.assert_close(objectness[i, n], branch.objectness(joined)[0])

    def test_at_first_classes_are_rare_and_activation_is_low(self):
        model = SparseInst(small("sparseinst").backbone, NUM_CLASSES, SMALL["sparseinst"])
        for layer in (model.instance_branch.classes, model.instance_branch.activation):
            torch.testing.assert_close(layer.bias.sigmoid(), torch.full_like(layer.bias, 0.01))


class TestMatching:
    def best_pairs(self, scores):
        """The pairs of the highest total, by trying all."""
        queries, instances = scores.shape
        if queries >= instances:
            every = itertools.permutations(range(queries), instances)
            best = max(every, key=lambda rows: sum(scores[row, k] for k, row in enumerate(rows)))
            return sorted(zip(best, range(instances), strict=True))
        every = itertools.permutations(range(instances), queries)
        best = max(every, key=lambda columns: sum(scores[row, k] for row, k in enumerate(columns)))
        return list(enumerate(best))

    def naive_scores(self, model, outputs, i, target, valid=None):
        probabilities = naive_masks(model, outputs, i).sigmoid()
        scores = torch.zeros(len(probabilities), len(target), dtype=torch.float64)
        keep = torch.ones_like(probabilities[0]) if valid is None else (naive_shares(valid) == 1).double()
        for n, k in itertools.product(range(len(probabilities)), range(len(target))):
            p, t = probabilities[n] * keep, naive_shares(target.masks[k]) * keep
            dice = 2 * (p * t).sum() / ((p**2).sum() + (t**2).sum() + 1e-4)
            scores[n, k] = dice**0.8 * outputs.logits[i, n, target.labels[k]].sigmoid() ** 0.2
        return scores

    @pytest.mark.parametrize("queries", [5, 2])
    @torch.no_grad()
    def test_the_highest_total_score(self, batch, queries):
        images, targets = batch
        model = small("sparseinst", queries=queries).double()
        outputs = model(images)
        assignment = model.assign(outputs, targets)
        for i, target in enumerate(targets):
            mine = assignment[assignment.image == i]
            found = sorted(zip(mine.query.tolist(), mine.target.tolist(), strict=True))
            assert found == self.best_pairs(self.naive_scores(model, outputs, i, target).numpy())
            assert len(found) == min(queries, len(target))

    @torch.no_grad()
    def test_scores_without_invalid_pixels(self, batch):
        images, targets = batch
        valid = torch.ones(images.pixels.shape[-2:], dtype=torch.bool)
        valid[:, 21:50] = False
        model = small("sparseinst", queries=4).double()
        outputs = model(images)
        found = model._match_scores(outputs, 0, replace(targets[0], valid=valid))
        torch.testing.assert_close(found, self.naive_scores(model, outputs, 0, targets[0], valid))
        assert not torch.allclose(found, self.naive_scores(model, outputs, 0, targets[0]))

    @torch.no_grad()
    def test_some_instances_at_a_time(self, monkeypatch):
        images, targets = drawn(SIZES, (20, 3))
        model = small("sparseinst")
        outputs = model(images)
        whole = model._match_scores(outputs, 0, targets[0])
        monkeypatch.setattr(sparseinst, "_INSTANCES_AT_ONCE", 7)
        torch.testing.assert_close(model._match_scores(outputs, 0, targets[0]), whole)

    def test_a_label_that_is_none_of_the_models(self, batch):
        images, targets = batch
        model = small("sparseinst")
        wrong = replace(targets[0], labels=targets[0].labels + NUM_CLASSES)
        with pytest.raises(DataError, match=f"Labels must be from 0 to {NUM_CLASSES - 1}"):
            model.assign(model(images), [wrong, targets[1]])


class TestLosses:
    @pytest.mark.parametrize("queries", [QUERIES, 2])
    def test_equal_the_formulas(self, batch, queries):
        """All four terms, summed query by query and pixel by pixel; also with more instances than queries."""
        images, targets = batch
        model = small("sparseinst", queries=queries).double()
        outputs = model(images)
        assignment = model.assign(outputs, targets)
        triples = zip(*(x.tolist() for x in (assignment.image, assignment.query, assignment.target)), strict=True)
        owned = {(i, n): t for i, n, t in triples}
        assert len(owned) == min(4, queries) + min(3, queries)
        of_class = of_mask = of_dice = of_objectness = 0.0
        masks = [naive_masks(model, outputs, i).detach() for i in range(2)]
        for i, n in itertools.product(range(2), range(queries)):
            for c, logit in enumerate(outputs.logits[i, n].tolist()):
                p = 1 / (1 + math.exp(-logit))
                hit = (i, n) in owned and targets[i].labels[owned[i, n]] == c
                of_class -= 0.25 * (1 - p) ** 2 * math.log(p) if hit else 0.75 * p**2 * math.log(1 - p)
        for (i, n), t in owned.items():
            share = naive_shares(targets[i].masks[t])
            p = masks[i][n].sigmoid()
            of_mask -= (share * p.log() + (1 - share) * (1 - p).log()).mean().item()
            of_dice += (1 - 2 * (p * share).sum() / ((p**2).sum() + (share**2).sum() + 1e-4)).item()
            predicted, inside = p >= 0.4, share > 0.5
            iou = (predicted & inside).sum().item() / ((predicted | inside).sum().item() + 1e-6)
            score = 1 / (1 + math.exp(-outputs.objectness[i, n].item()))
            of_objectness -= iou * math.log(score) + (1 - iou) * math.log(1 - score)
        losses = model.losses(outputs, targets, assignment)
        assert losses["loss_class"].item() == pytest.approx(2 * of_class / 7, rel=1e-6)
        assert losses["loss_mask"].item() == pytest.approx(5 * of_mask / len(owned), rel=1e-6)
        assert losses["loss_dice"].item() == pytest.approx(2 * of_dice / 7, rel=1e-6)
        assert losses["loss_objectness"].item() == pytest.approx(of_objectness / len(owned), rel=1e-6)

    def test_mask_loss_without_invalid_pixels_by_the_formulas(self, batch):
        images, targets = batch
        valid = torch.ones(images.pixels.shape[-2:], dtype=torch.bool)
        valid[10:40, 21:50] = False
        targets = [replace(targets[0], valid=valid), targets[1]]
        model = small("sparseinst").double()
        outputs = model(images)
        queries = model.queries(outputs, model.assign(outputs, targets))
        owners = queries[queries.target >= 0]
        expected = 0.0
        rows = zip(owners.embeddings, owners.image.tolist(), owners.target.tolist(), strict=True)
        for kernel, i, t in rows:
            one = replace(outputs, kernels=kernel[None, None].expand(2, 1, -1))
            p = naive_masks(model, one, i)[0].sigmoid().detach()
            share = naive_shares(targets[i].masks[t])
            keep = naive_shares(valid) == 1 if i == 0 else torch.ones_like(share).bool()
            p, share = p[keep], share[keep]
            expected -= 5 * (share * p.log() + (1 - share) * (1 - p).log()).mean().item()
            expected += 2 * (1 - 2 * (p * share).sum() / ((p**2).sum() + (share**2).sum() + 1e-4)).item()
        loss = model.mask_loss(model.decode(owners, outputs.pixels), owners, targets)
        assert loss.item() == pytest.approx(expected / len(owners), rel=1e-6)

    def test_gradcheck(self):
        _, targets = drawn(((32, 32), (32, 32)), (2, 1), radii=(4, 12))
        queries = Queries(torch.zeros(3, 1), torch.tensor([0, 1, 0]), torch.tensor([1, 0, 0]))
        model = small("sparseinst")
        logits = torch.randn(3, 4, 4, dtype=torch.float64, requires_grad=True)
        assert gradcheck(lambda x: model.mask_loss(x, queries, targets), (logits,))
        assert gradcheck(lambda x: compare_masks(x, queries, targets)[:2], (logits,))
        assert not compare_masks(logits, queries, targets)[2].requires_grad

    def test_gradcheck_of_all_terms(self, batch):
        images, targets = batch
        model = small("sparseinst", queries=3).double()
        outputs = model(images)
        assignment = model.assign(outputs, targets)
        leaves = [t.detach().requires_grad_() for t in (outputs.logits, outputs.kernels, outputs.objectness)]

        def losses(logits, kernels, objectness):
            changed = replace(outputs, logits=logits, kernels=kernels, objectness=objectness)
            changed = replace(changed, pixels=outputs.pixels.detach())
            return tuple(model.losses(changed, targets, assignment).values())

        assert gradcheck(losses, leaves)

    def test_a_query_on_invalid_pixels_is_no_negative(self, batch):
        images, targets = batch
        model = small("sparseinst").double()
        outputs = model(images)
        assignment = model.assign(outputs, targets)
        nowhere = torch.zeros(images.pixels.shape[-2:], dtype=torch.bool)
        invalid = [replace(targets[0], valid=nowhere), targets[1]]
        logits = outputs.logits.detach().requires_grad_()
        model.losses(replace(outputs, logits=logits), invalid, assignment)["loss_class"].backward()
        has_gradient = logits.grad.any(2)
        probabilities = torch.einsum("bnd,bdhw->bnhw", outputs.kernels, outputs.pixels.embeddings)
        has_mask = (probabilities > 0).flatten(2).any(2)
        owns = torch.zeros_like(has_mask)
        owns[assignment.image, assignment.query] = True
        assert torch.equal(has_gradient[0], owns[0] | ~has_mask[0])
        assert has_gradient[1].all()

    def test_several_processes_share_the_divisors(self, batch, monkeypatch):
        """With as many instances elsewhere, each term of this process counts half."""
        images, targets = batch
        model = small("sparseinst")
        outputs = model(images)
        assignment = model.assign(outputs, targets)
        alone = model.losses(outputs, targets, assignment)
        monkeypatch.setattr(sparseinst, "loss_normalizer", lambda count: parallel.loss_normalizer(2 * count))
        together = model.losses(outputs, targets, assignment)
        for key, loss in alone.items():
            torch.testing.assert_close(together[key], loss / 2)


class TestPredict:
    def outputs_of(self, model, images):
        outputs = model(images)
        generator = torch.Generator().manual_seed(3)
        logits = torch.randn(outputs.logits.shape, generator=generator)
        return replace(outputs, logits=logits, objectness=torch.randn(outputs.objectness.shape, generator=generator))

    @torch.no_grad()
    def test_scores_by_the_formula(self, batch):
        images, _ = batch
        model = small("sparseinst").eval()
        outputs = self.outputs_of(model, images)
        for i, instances in enumerate(model.predict(outputs, SIZES)):
            expected = []
            for n, mask in enumerate(naive_masks(model, outputs, i).sigmoid()):
                score, label = (outputs.logits[i, n].sigmoid() * outputs.objectness[i, n].sigmoid()).sqrt().max(0)
                inside = mask > 0.45
                if inside.any():
                    expected.append(((score * mask[inside].mean()).item(), label.item()))
            expected.sort(reverse=True)
            assert len(instances) == len(expected) > 5
            torch.testing.assert_close(instances.scores, torch.tensor([s for s, _ in expected]), rtol=1e-4, atol=1e-5)
            assert instances.labels.tolist() == [label for _, label in expected]

    @torch.no_grad()
    def test_masks_are_resized_as_probabilities(self, batch):
        images, _ = batch
        model = small("sparseinst").eval()
        outputs = self.outputs_of(model, images)
        size = (50, 77)
        instances = model.predict(outputs, (size, size))[1]
        probabilities = model._probabilities(outputs, 1, slice(None))
        padded = F.interpolate(probabilities[None], size=images.pixels.shape[-2:], mode="bilinear")
        valid = padded[:, :, : SIZES[1][0], : SIZES[1][1]]
        resized = F.interpolate(valid, size=size, mode="bilinear")[0]
        for mask in instances.masks:
            assert min((mask != (p > 0.45)).float().mean() for p in resized) < 1e-3

    @torch.no_grad()
    def test_thresholds_and_limits(self, batch):
        images, _ = batch
        everything = small("sparseinst").eval()
        outputs = self.outputs_of(everything, images)
        few = small("sparseinst", max_detections=3).eval()
        kept = everything.predict(outputs, SIZES)[0]
        assert torch.equal(few.predict(outputs, SIZES)[0].scores, kept.scores[:3])
        scores = (outputs.logits[0].sigmoid() * outputs.objectness[0].sigmoid()[:, None]).sqrt().amax(1)
        threshold = scores.sort().values[QUERIES // 2].item()
        strict = small("sparseinst", score_threshold=threshold).eval()
        assert 0 < len(strict.predict(outputs, SIZES)[0]) < len(kept)


class TestSettings:
    def test_defaults_are_the_originals(self):
        config = SparseInstConfig()
        assert (config.queries, config.channels, config.head_channels, config.kernel_channels) == (100, 256, 256, 128)
        assert (config.head_convs, config.groups, config.score_threshold) == (4, 4, 0.005)

    def test_groups_divide_the_channels(self):
        with pytest.raises(ValidationError, match="'groups' must divide 'head_channels'; 3 does not divide 256"):
            SparseInstConfig(groups=3)

    def test_groups_of_the_normalization_divide_the_channels(self):
        with pytest.raises(ValidationError, match=r"'channels' must be a multiple of 32 \(given: 48\)"):
            SparseInstConfig(norm="group", channels=48)


class TestWeights:
    FULL = pytest.mark.parametrize(("groups", "file"), [(4, "shapes"), (1, "shapes_base")], ids=["grouped", "base"])

    def shapes(self, state):
        return {name: list(tensor.shape) for name, tensor in state.items()}

    @pytest.mark.realdata
    @FULL
    def test_every_tensor_of_the_full_original_in_both_directions(self, groups, file):
        shapes = json.loads(reference("parity", "sparseinst", f"full_state_dict_{file}.json").read_text())
        foreign = {name: torch.zeros(shape) for name, shape in shapes.items()}
        model = SparseInst(ResNet(50, norm="frozen"), 80, SparseInstConfig(groups=groups))
        assert is_sparseinst(foreign)
        ours = to_uniquery_names(foreign)
        assert self.shapes(ours) == self.shapes(model.state_dict())
        assert self.shapes(original_sparseinst_names(model.state_dict())) == shapes
        assert list(original_sparseinst_names(sparseinst_names(foreign))) == list(foreign)

    def test_deformable_layers_keep_detectron2s_names(self):
        backbone = ResNet(50, norm="frozen", stem_channels=8, width=4, deformable_stages=("res4", "res5"))
        model = SparseInst(backbone, NUM_CLASSES, SMALL["sparseinst"])
        original = original_sparseinst_names(model.state_dict())
        assert {"backbone.res4.0.conv2_offset.weight", "backbone.res5.2.conv2_offset.bias"} <= set(original)
        assert "backbone.res3.0.conv2_offset.weight" not in original
        model.load_state_dict(sparseinst_names(original))

    def test_other_projects_are_not_taken_for_it(self):
        assert not is_sparseinst({"decoder.inst_branch.fc.weight": torch.zeros(1)})


def test_an_instance_without_a_pixel_at_the_stride_of_the_masks():
    masks = torch.zeros(1, 64, 64, dtype=torch.bool)
    masks[0, 4, 4] = True  # none of the pixels that are read
    target = Targets(torch.tensor([1]), boxes_of(masks), masks)
    model = small("sparseinst")
    outputs = model(Images(torch.zeros(1, 3, 64, 64), ((64, 64),)))
    assignment = model.assign(outputs, [target])
    assert len(assignment) == 1
    assert all(loss.isfinite() for loss in model.losses(outputs, [target], assignment).values())
