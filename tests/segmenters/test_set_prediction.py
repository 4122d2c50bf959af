"""What Mask2Former and its Hugging Face adapter share; that their losses are right is in their own files."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from helpers.small_segmenters import NUM_CLASSES, drawn, small
from uniquery.errors import DataError
from uniquery.segmenters.hf_mask2former import HFMask2Former
from uniquery.segmenters.set_prediction import (
    best_instances,
    check_labels,
    match_layers,
    mostly_invalid,
    queries_with_targets,
)
from uniquery.structures import Targets

SIZES = ((96, 128), (70, 90))
EDGE = 60  # columns of the first image from here on are invalid
FAR = EDGE // 4 + 2  # cells that no valid pixel is interpolated from


def segmenter(name):
    if name == "mask2former":
        return small(name)
    pytest.importorskip("transformers")
    from helpers.small_hf import small_hf

    return HFMask2Former(small_hf())


def target(labels):
    return Targets(torch.tensor(labels), torch.zeros(len(labels), 4), torch.zeros(len(labels), 8, 8, dtype=torch.bool))


class TestMatchLayers:
    def test_each_layer_and_image_alone(self):
        costs = [torch.rand(3, 6, k, generator=torch.Generator().manual_seed(k)) for k in (4, 0, 2)]
        assignment = match_layers(costs, [target([0] * 4), target([]), target([1] * 2)], num_classes=2)
        assert assignment.image.tolist() == [0] * 4 + [2] * 2
        for layer, i in itertools.product(range(3), (0, 2)):
            pairs = assignment[assignment.image == i]
            query, owned = pairs.layer_query[:, layer].tolist(), pairs.layer_target[:, layer].tolist()
            assert sorted(owned) == list(range(costs[i].shape[2]))
            chosen = sum(costs[i][layer, q, k].item() for q, k in zip(query, owned, strict=True))
            every = itertools.permutations(range(6), costs[i].shape[2])
            best = min(sum(costs[i][layer, q, k].item() for k, q in enumerate(queries)) for queries in every)
            assert chosen == pytest.approx(best)
        assert torch.equal(assignment.query, assignment.layer_query[:, -1])
        assert torch.equal(assignment.target, assignment.layer_target[:, -1])

    def test_no_instance_at_all(self):
        assignment = match_layers([torch.zeros(3, 6, 0)] * 2, [target([]), target([])], num_classes=2)
        assert assignment.layer_query.shape == (0, 3)

    @pytest.mark.parametrize(("labels", "found"), [([0, 2], "0 to 2"), ([-1, 1], "-1 to 1")])
    def test_a_label_out_of_range(self, labels, found):
        with pytest.raises(DataError, match=f"Labels must be from 0 to 1, as the model has 2 classes; got {found}"):
            match_layers([torch.zeros(1, 6, 2)], [target(labels)], num_classes=2)
        with pytest.raises(DataError, match=found):
            check_labels(torch.tensor(labels), 2)
        check_labels(torch.tensor([]), 2)


def test_queries_own_what_they_were_matched_with():
    embeddings = torch.rand(2, 3, 5)
    image, query, owned = torch.tensor([[0, 1, 1], [2, 0, 1], [4, 0, 3]])
    queries = queries_with_targets(embeddings, image, query, owned)
    assert queries.target.tolist() == [-1, -1, 4, 0, 3, -1]
    assert queries.image.tolist() == [0, 0, 0, 1, 1, 1]
    assert torch.equal(queries.embeddings, embeddings.flatten(0, 1))


def test_best_instances_one_by_one():
    """Scores times mean probability, sorted; a query may be taken for two classes; an empty mask is dropped."""
    logits = torch.full((3, 4, 4), -4.0)
    logits[0, :2] = 4.0
    logits[1, 2:, 2:] = 1.0
    scores = torch.tensor([[0.9, 0.6], [0.8, 0.1], [0.0, 0.95]])
    eye = torch.eye(4)
    instances = best_instances(
        scores, lambda queries: (logits[queries], (eye, eye)), (4, 4), max_detections=4, logit_threshold=0.0
    )
    one, four = torch.tensor([1.0, 4.0]).sigmoid().tolist()
    assert instances.scores.tolist() == pytest.approx([0.9 * four, 0.6 * four, 0.8 * one])
    assert instances.labels.tolist() == [0, 1, 0]
    assert instances.boxes.tolist() == [[0, 0, 4, 2], [0, 0, 4, 2], [2, 2, 4, 4]]


@pytest.mark.parametrize("name", ["mask2former", "hugging face"])
class TestInvalidPixels:
    @pytest.fixture
    def case(self, name):
        images, targets = drawn(SIZES, (4, 3))
        valid = torch.ones(96, 128, dtype=torch.bool)
        valid[:, EDGE:] = False
        targets = [replace(targets[0], valid=valid), targets[1]]
        model = segmenter(name).double()
        outputs = model(images)
        torch.manual_seed(0)
        # An untrained network has its masks everywhere: these are blobs, some of them on one side.
        pixels = F.interpolate(torch.randn(2, 32, 3, 4), size=(24, 32), mode="bicubic").double()
        outputs = replace(
            outputs,
            embeddings=torch.randn_like(outputs.embeddings),
            pixels=replace(outputs.pixels, embeddings=pixels),
        )
        assignment = model.assign(outputs, targets)
        return model, outputs, targets, assignment

    @staticmethod
    def by_layer(assignment):
        """(layer, image, query) → target."""
        pairs = getattr(assignment, "all_layers", None) or assignment
        return {
            (layer, i, query): owned
            for layer in range(pairs.layer_query.shape[1])
            for i, query, owned in zip(
                pairs.image.tolist(),
                pairs.layer_query[:, layer].tolist(),
                pairs.layer_target[:, layer].tolist(),
                strict=True,
            )
        }

    @staticmethod
    def losses(model, outputs, targets, assignment):
        torch.manual_seed(1)
        return model.losses(outputs, targets, assignment)

    def test_masks_cell_by_cell(self, case):
        _, outputs, targets, _ = case
        result = mostly_invalid(outputs, targets)
        assert not result[:, 1].any()
        assert 0 < result[:, 0].sum() < result[:, 0].numel()
        for layer, q in itertools.product(range(len(result)), range(0, result.shape[2], 3)):
            logits = torch.einsum("d,dhw->hw", outputs.embeddings[layer, 0, q], outputs.pixels.embeddings[0])
            inside = [(x, y) for y, x in (logits > 0).nonzero().tolist()]
            there = [x for x, y in inside if not targets[0].valid[4 * y + 2, 4 * x + 2]]
            assert result[layer, 0, q] == (2 * len(there) > len(inside))
        assert mostly_invalid(outputs, [replace(t, valid=None) for t in targets]) is None

    def test_the_class_loss_query_by_query(self, case):
        model, outputs, targets, assignment = case
        owned, there = self.by_layer(assignment), mostly_invalid(outputs, targets)
        expected = []
        for layer in range(len(outputs.logits)):
            loss = weight = 0.0
            for i, q in itertools.product(range(2), range(outputs.logits.shape[2])):
                target = owned.get((layer, i, q))
                if target is None and there[layer, i, q]:
                    continue
                label = NUM_CLASSES if target is None else targets[i].labels[target]
                w = 0.1 if target is None else 1.0
                loss += w * F.cross_entropy(outputs.logits[layer, i, q], torch.as_tensor(label)).item()
                weight += w
            expected.append(2 * loss / weight)
        losses = self.losses(model, outputs, targets, assignment)
        assert losses["loss_class"].item() == pytest.approx(expected[-1], rel=1e-6)
        pairs = getattr(assignment, "all_layers", None) or assignment
        assert model.criterion.class_losses(outputs, targets, pairs).tolist() == pytest.approx(expected, rel=1e-6)

    def test_predictions_there_change_nothing(self, case):
        """Class logits of unmatched queries there, and pixels there; these keep their signs, and so the masks."""
        model, outputs, targets, assignment = case
        unmatched = torch.ones(outputs.logits.shape[:3], dtype=torch.bool)
        for key in self.by_layer(assignment):
            unmatched[key] = False
        ignored = mostly_invalid(outputs, targets) & unmatched
        assert all(layer.any() for layer in ignored)
        results = []
        for perturbed in (False, True):
            logits, embeddings = (t.detach().clone() for t in (outputs.logits, outputs.pixels.embeddings))
            if perturbed:
                logits[ignored] += 3 * torch.randn_like(logits[ignored])
                embeddings[0, ..., FAR:] *= 3
            logits.requires_grad_()
            embeddings.requires_grad_()
            changed = replace(outputs, logits=logits, pixels=replace(outputs.pixels, embeddings=embeddings))
            losses = self.losses(model, changed, targets, assignment)
            gradients = torch.autograd.grad(sum(losses.values()), (logits, embeddings))
            results.append(({k: v.item() for k, v in losses.items()}, gradients))
        (first, (of_logits, of_embeddings)), (second, others) = results
        assert first == pytest.approx(second, rel=1e-9)
        assert not of_logits[ignored].any()
        assert of_logits[~ignored].any(-1).all()
        assert not of_embeddings[0, ..., FAR:].any()
        assert of_embeddings[0, ..., :FAR].any()
        for a, b in zip((of_logits, of_embeddings), others, strict=True):
            torch.testing.assert_close(a, b)

    def test_matching_skips_them(self, case):
        model, outputs, targets, _ = case
        embeddings = outputs.pixels.embeddings.detach().clone()
        embeddings[0, ..., FAR:] *= -2
        changed = replace(outputs, pixels=replace(outputs.pixels, embeddings=embeddings))
        flipped = [targets[0], targets[1]]
        flipped[0] = replace(targets[0], masks=targets[0].masks ^ ~targets[0].valid)
        costs = []
        for arguments in ((outputs, targets), (changed, flipped)):
            torch.manual_seed(0)
            costs.append(model.criterion.costs(*arguments, [(1.0, 1.0)] * 2))
        for a, b in zip(*costs, strict=True):
            torch.testing.assert_close(a, b)
        both = []
        for arguments in ((outputs, targets), (changed, flipped)):
            torch.manual_seed(0)
            both.append(self.by_layer(model.assign(*arguments)))
        assert both[0] == both[1]

    def test_everywhere_valid_is_the_default(self, case):
        model, outputs, targets, _ = case
        losses = []
        for valid in (None, torch.ones(96, 128, dtype=torch.bool)):
            chosen = [replace(t, valid=valid) for t in targets]
            torch.manual_seed(0)
            assignment = model.assign(outputs, chosen)
            losses.append(model.losses(outputs, chosen, assignment))
        for key, loss in losses[0].items():
            torch.testing.assert_close(losses[1][key], loss)

    def test_queries_of_every_layer(self, case):
        model, outputs, _, assignment = case
        layers = model.layer_queries(outputs, assignment)
        last = model.queries(outputs, assignment)
        assert torch.equal(layers[-1].target, last.target)
        owned = self.by_layer(assignment)
        for layer, queries in enumerate(layers):
            assert (queries.target >= 0).sum() == len([key for key in owned if key[0] == layer])
