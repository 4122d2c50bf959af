"""What is SOLQ's own, against versions written out query by query and cell by cell."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError

from helpers.processes import both_halves, half_of_a_batch, run_in_processes
from helpers.small_segmenters import NUM_CLASSES, SMALL, drawn, small
from uniquery.layers.deformable_attention import image_centers
from uniquery.querying import EquivarianceSettings, InterSceneSettings, UniqueQuerying
from uniquery.segmenters.solq import SOLQ, SOLQConfig, covered_share, refined_boxes
from uniquery.structures import Images, Queries

MIXED = ((96, 128), (70, 90))
IDENTITY = {"flip": 0.0, "crop": None}


@pytest.fixture
def batch():
    return drawn(MIXED, (4, 3))


def total(losses):
    return torch.stack(list(losses.values())).sum()


class TestSettings:
    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"heads": 5}, "5 does not divide 384"),
            ({"mask_size": 15}, "'vector_length' must be at most mask_size², 225; it is 256"),
            ({"channels": 100}, "multiple of 32"),
            ({"dropout": 1.0}, "less than 1"),
        ],
    )
    def test_mistakes(self, changes, words):
        with pytest.raises(ValidationError, match=words):
            SOLQConfig(**changes)


class TestBoxes:
    def test_refinement_by_hand(self):
        offsets = torch.tensor([0.5, -1.0, 2.0, 0.0])
        for reference in ([0.3, 0.8], [0.3, 0.8, 0.1, 0.6]):
            (found,) = refined_boxes(offsets[None], torch.tensor([reference])).tolist()
            logits = [math.log(p / (1 - p)) for p in reference] + [0.0] * (4 - len(reference))
            expected = [1 / (1 + math.exp(-o - x)) for o, x in zip(offsets.tolist(), logits, strict=True)]
            assert found == pytest.approx(expected, rel=1e-5)

    @pytest.mark.parametrize("values", [2, 4])
    def test_gradient(self, values):
        torch.manual_seed(0)
        offsets, reference = torch.randn(3, 4).double(), (torch.rand(3, values) * 0.8 + 0.1).double()
        assert torch.autograd.gradcheck(refined_boxes, (offsets.requires_grad_(), reference.requires_grad_()))

    def test_the_edges_of_an_image_are_finite(self):
        reference = torch.tensor([[0.0, 1.0, 0.0, 1.0]], requires_grad=True)
        boxes = refined_boxes(torch.zeros(1, 4), reference)
        boxes.sum().backward()
        assert boxes.tolist()[0] == pytest.approx([1e-5, 1 - 1e-5] * 2, rel=1e-3)
        assert reference.grad.isfinite().all()

    def test_each_layer_refines_the_one_before(self, batch):
        """And to the next layer a box is a constant, as in the original."""
        model = small("solq").eval()
        seen = []
        for layer in model.decoder.layers:
            layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs))
        outputs = model(batch[0])
        for i, (_, _, reference, _) in enumerate(seen):
            if i == 0:
                assert reference.shape == (2, 48, 2)
                assert reference.requires_grad
            else:
                assert torch.equal(reference, outputs.boxes[i - 1])
                assert not reference.requires_grad
            offsets = model.decoder.boxes[i](outputs.embeddings[i])
            torch.testing.assert_close(outputs.boxes[i], refined_boxes(offsets, reference))


def test_reference_points_as_the_original_has_them():
    """A token's center as a share of its image on its own level, times the share that the image takes of each level."""
    shapes = [(4, 6), (2, 3)]
    valid = [[(3, 4), (2, 2)], [(4, 6), (2, 3)]]  # rows and columns of two images on both levels
    extents = torch.tensor([[(w / s[1], h / s[0]) for (h, w), s in zip(image, shapes, strict=True)] for image in valid])
    centers = image_centers(shapes, extents)
    for image, cells in enumerate(valid):
        tokens = [(level, y, x) for level, (h, w) in enumerate(shapes) for y in range(h) for x in range(w)]
        for s, (level, y, x) in enumerate(tokens):
            for other in range(2):
                (own_h, own_w), (h, w) = cells[level], cells[other]
                expected = [(x + 0.5) / own_w * w / shapes[other][1], (y + 0.5) / own_h * h / shapes[other][0]]
                assert centers[image, s, other].tolist() == pytest.approx(expected)


class TestForward:
    def test_the_finest_tokens_are_the_pixel_embeddings(self, batch):
        model = small("solq").eval()
        images = batch[0]
        tokens = model.encoder(model.backbone(model.normalize(images)), images.sizes)
        assert tokens.shapes == [(12, 16), (6, 8), (3, 4), (2, 2)]
        embeddings = model(images).pixels.embeddings
        assert model(images).pixels.stride == 8
        for i, (height, width) in enumerate(images.sizes):
            rows, columns = -(-height // 8), -(-width // 8)
            expected = tokens.values[i, :192].T.view(-1, 12, 16)[:, :rows, :columns]
            torch.testing.assert_close(embeddings[i, :, :rows, :columns], expected)
            assert not embeddings[i, :, rows:].any()
            assert not embeddings[i, :, :, columns:].any()

    def test_padding_is_not_read(self, batch):
        """What tokens of the padding are changes nothing that counts."""
        model = small("solq").eval()
        images = batch[0]
        tokens = model.encoder(model.backbone(model.normalize(images)), images.sizes)
        changed = torch.where(tokens.valid[..., None], tokens.values, 9.0)
        for a, b in zip(model.decoder(tokens), model.decoder(replace(tokens, values=changed)), strict=True):
            assert torch.equal(a, b)

    def test_dropout_only_in_training(self, batch):
        model = small("solq")
        first, second = model(batch[0]).logits, model(batch[0]).logits
        assert not torch.equal(first, second)
        model.eval()
        assert torch.equal(model(batch[0]).logits, model(batch[0]).logits)
        without = small("solq", dropout=0.0)
        torch.testing.assert_close(without(batch[0]).logits, model(batch[0]).logits)

    def test_a_dot_product_of_normalized_vectors_starts_small(self, batch):
        torch.manual_seed(0)
        model = SOLQ(small("solq").backbone, NUM_CLASSES, SMALL["solq"])
        outputs = model(batch[0])
        queries = model.queries(outputs, model.assign(outputs, batch[1]))
        assert model.dot_product_scale == pytest.approx(32**-0.5)
        assert model.decode(queries, outputs.pixels).std() < 2


class TestDenseMasks:
    def test_cells_are_covered_by_shares(self):
        masks = torch.rand(3, 16, 24, generator=torch.Generator().manual_seed(0)) > 0.5
        shares = covered_share(masks, 8)
        for k in range(3):
            for y in range(2):
                for x in range(3):
                    cell = masks[k, 8 * y : 8 * y + 8, 8 * x : 8 * x + 8]
                    assert shares[k, y, x].item() == pytest.approx(cell.sum().item() / 64)
        torch.testing.assert_close(covered_share(masks[:, :, :8], 8), shares[:, :, :1])

    @pytest.mark.parametrize("some_invalid", [False, True])
    def test_the_loss_cell_by_cell(self, batch, some_invalid):
        model, (_, targets) = small("solq", dense_weight=1.7), batch
        valid = torch.ones(96, 128, dtype=torch.bool)
        if some_invalid:
            valid[:, 43:] = False
            targets = [replace(targets[0], valid=valid), targets[1]]
        torch.manual_seed(0)
        logits = torch.randn(4, 12, 16, dtype=torch.float64)
        queries = Queries(torch.zeros(4, 1), torch.tensor([0, 1, 0, 1]), torch.tensor([2, 0, 3, 2]))
        expected = 0.0
        for i in range(4):
            image = int(queries.image[i])
            mask = targets[image].masks[queries.target[i]].double()
            focal = overlap = squares = count = 0.0
            for y in range(12):
                for x in range(16):
                    cell = slice(8 * y, 8 * y + 8), slice(8 * x, 8 * x + 8)
                    if image == 0 and not valid[cell].all():
                        continue
                    p, t = logits[i, y, x].sigmoid().item(), mask[cell].mean().item()
                    weight, missed = 0.25 * t + 0.75 * (1 - t), p + t - 2 * p * t
                    focal -= weight * missed**2 * (t * math.log(p) + (1 - t) * math.log(1 - p))
                    overlap, squares, count = overlap + p * t, squares + p * p + t * t, count + 1
            expected += focal / count + 1 - 2 * overlap / (squares + 1e-5)
        assert model.mask_loss(logits, queries, targets).item() == pytest.approx(1.7 * expected / 4, rel=1e-6)

    def test_gradient(self, batch):
        model, (_, targets) = small("solq"), batch
        logits = torch.randn(2, 12, 16, dtype=torch.float64, requires_grad=True)
        queries = Queries(torch.zeros(2, 1), torch.tensor([0, 1]), torch.tensor([1, 2]))
        assert torch.autograd.gradcheck(lambda x: model.mask_loss(x, queries, targets), logits)

    def test_the_switch_adds_one_term_and_changes_no_other(self, batch):
        results = []
        for switch in (False, True):
            torch.manual_seed(1)
            results.append(UniqueQuerying(small("solq", dense_masks=switch))(*batch))
        off, on = results
        assert set(on) - set(off) == {"loss_mask"}
        assert all(torch.equal(off[name], on[name]) for name in off)
        assert on["loss_mask"] > 0

    def test_padding_does_not_count(self, batch):
        """As if each image were alone in a batch of its own size; cells at its edge are left out."""
        images, targets = batch
        model = small("solq", dense_masks=True).eval()
        outputs = model(images)
        assignment = model.assign(outputs, targets)
        changed = outputs.pixels.embeddings.detach().clone()
        changed[1, :, 70 // 8 :] = 5.0
        changed[1, :, :, 90 // 8 :] = -5.0
        other = replace(outputs, pixels=replace(outputs.pixels, embeddings=changed))
        expected = model.losses(outputs, targets, assignment)["loss_mask"]
        assert torch.equal(model.losses(other, targets, assignment)["loss_mask"], expected)

    @pytest.mark.parametrize("views", ["paired", "extra"])
    @pytest.mark.parametrize("switch", [False, True])
    def test_the_equivariance_loss_has_it_with_or_without_the_switch(self, views, switch):
        images, targets = drawn(((64, 96), (96, 64)), (3, 2))
        model = small("solq", dense_masks=True, dropout=0.0)
        losses = UniqueQuerying(model)(images, targets)
        model = small("solq", dense_masks=switch, dropout=0.0)
        settings = EquivarianceSettings(weight=3.0, **IDENTITY, views=views)
        found = UniqueQuerying(model, equivariance=settings)(images, targets)
        assert ("loss_mask" in found) == switch
        assert found["loss_equi"].item() == pytest.approx(3 * losses["loss_mask"].item(), rel=1e-5)

    def test_l_inter_works_without_it(self, batch):
        model = small("solq")
        objective = UniqueQuerying(model, inter=InterSceneSettings(capacity=500))
        losses = objective(*batch)
        assert "loss_mask" not in losses
        assert losses["loss_inter"] > 0


class TestPredict:
    @torch.no_grad()
    def test_a_prediction_by_hand(self, batch):
        images = batch[0]
        model = small("solq", max_detections=7).eval()
        outputs = model(images)
        size = (48, 64)
        found = model.predict(outputs, [size, size])[0]
        scores = outputs.logits[-1, 0].sigmoid()
        best = sorted(((scores[q, c].item(), q, c) for q in range(48) for c in range(NUM_CLASSES)), reverse=True)[:7]
        kept = iter(range(len(found)))
        for score, q, c in best:
            values = model.mask_vectors.decode(model.vectors(outputs.embeddings[-1, 0, q])[None])[0]
            inside = (values > (values.max() + values.min()) / 2).float()
            x, y, w, h = (outputs.boxes[-1, 0, q] * torch.tensor([64, 48, 64, 48])).tolist()
            ys, xs = (torch.arange(48) + 0.5 - y + h / 2) / h * 2 - 1, (torch.arange(64) + 0.5 - x + w / 2) / w * 2 - 1
            grid = torch.stack([xs.expand(48, 64), ys[:, None].expand(48, 64)], dim=-1)
            mask = F.grid_sample(inside[None, None], grid[None], align_corners=False)[0, 0] >= 0.5
            if mask.any():
                k = next(kept)
                assert found.scores[k].item() == pytest.approx(score, rel=1e-5)
                assert found.labels[k] == c
                assert (found.masks[k] != mask).float().mean() < 1e-3
                corners = [max(x - w / 2, 0), max(y - h / 2, 0), min(x + w / 2, 64), min(y + h / 2, 48)]
                assert found.boxes[k].tolist() == pytest.approx(corners, abs=1e-3)
        assert len(found) > 0
        assert next(kept, None) is None

    @torch.no_grad()
    def test_the_method_does_not_change_it(self, batch):
        """Pixel embeddings are for training."""
        model = small("solq").eval()
        outputs = model(batch[0])
        changed = replace(outputs, pixels=replace(outputs.pixels, embeddings=outputs.pixels.embeddings * 0))
        for a, b in zip(model.predict(outputs, MIXED), model.predict(changed, MIXED), strict=True):
            assert a.rles == b.rles


@pytest.mark.distributed
def test_two_processes_learn_what_one_does(tmp_path):
    changes = {"dropout": 0.0, "dense_masks": True}
    whole = both_halves("solq", changes)
    halves = run_in_processes(partial(half_of_a_batch, "solq", changes), 2, tmp_path)
    for name, loss in whole["losses"].items():
        mean = sum(half["losses"][name] for half in halves) / 2
        assert mean.item() == pytest.approx(loss.item(), rel=1e-9), name
    for name, gradient in whole["gradients"].items():
        for half in halves:
            torch.testing.assert_close(
                half["gradients"][name], gradient, rtol=1e-6, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
            )


def test_images_of_one_size_share_their_reference_points():
    """A batch without padding gives the same as each image alone."""
    images, _ = drawn(((64, 96), (64, 96)), (1, 1))
    model = small("solq").eval()
    together = model(images)
    for i in range(2):
        alone = model(Images(images.pixels[i : i + 1], images.sizes[i : i + 1]))
        torch.testing.assert_close(alone.boxes[:, 0], together.boxes[:, i], rtol=1e-4, atol=1e-5)
