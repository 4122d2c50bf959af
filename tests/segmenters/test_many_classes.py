"""SOLOv2 with the classes of LVIS: what is scored before any mask is predicted, and how much memory that takes."""

from dataclasses import replace

import pytest
import torch

from helpers.small_segmenters import SMALL, drawn
from uniquery.backbones import BackboneConfig
from uniquery.segmenters import build_segmenter, grid
from uniquery.segmenters.grid import find_peaks, score_candidates

CLASSES, CANDIDATES = 1203, 50
LVIS = {"score_threshold": 1e-4, "final_threshold": 1e-4, "max_detections": 300}


def with_classes(count: int, **changes):
    torch.manual_seed(0)
    config = type(SMALL["solov2"])(**{**SMALL["solov2"].model_dump(), "max_detections": 300, **changes})
    return build_segmenter(config, BackboneConfig(name="tiny", weights="random"), count).eval()


class TestCandidates:
    GRIDS, STRIDES = (6, 4), (8, 16)

    def score(self, scores, candidates=CANDIDATES, threshold=1e-4):
        torch.manual_seed(1)
        masks, asked = torch.rand(52, 12, 12), []

        def predict(cells):
            asked.append(cells)
            return masks[cells]

        found = score_candidates(
            scores,
            self.GRIDS,
            self.STRIDES,
            predict,
            score_threshold=threshold,
            mask_threshold=0.5,
            max_candidates=candidates,
        )
        return found, torch.cat(asked)

    def test_masks_are_predicted_for_the_best_pairs_only(self):
        torch.manual_seed(0)
        scores = torch.rand(52, CLASSES)
        (cells, labels, _), asked = self.score(scores, candidates=2)
        peaks = find_peaks(scores, self.GRIDS)
        best = (scores * peaks).flatten().topk(grid._SCORED_PER_CANDIDATE * 2).indices // CLASSES
        assert set(asked.tolist()) == set(best.tolist())
        assert len(cells) == 2
        assert peaks[cells, labels].all()

    def test_few_pairs_are_scored_as_before(self, monkeypatch):
        scores = torch.rand(52, 3)
        limited, _ = self.score(scores)
        monkeypatch.setattr(grid, "_SCORED_PER_CANDIDATE", 10**9)
        unlimited, _ = self.score(scores)
        for a, b in zip(limited, unlimited, strict=True):
            assert torch.equal(a, b)

    def test_the_best_are_those_of_all_pairs_where_masks_are_alike(self, monkeypatch):
        torch.manual_seed(0)
        scores = torch.rand(52, CLASSES)
        monkeypatch.setattr(torch, "rand", lambda *size: torch.full(size, 0.75))
        limited, _ = self.score(scores)
        monkeypatch.setattr(grid, "_SCORED_PER_CANDIDATE", 10**9)
        unlimited, _ = self.score(scores)
        for a, b in zip(limited, unlimited, strict=True):
            assert torch.equal(a, b)


class TestModel:
    @pytest.fixture
    def batch(self):
        return drawn(((96, 128),), (4,))

    @torch.no_grad()
    def test_predicts_300_of_1203_classes(self, batch):
        model = with_classes(CLASSES, **LVIS, candidates=500)
        (instances,) = model.predict(model(batch[0]), [(96, 128)])
        assert 0 < len(instances) <= 300
        assert instances.scores.min() >= 1e-4
        assert len(instances.labels.unique()) > 1

    @torch.no_grad()
    def test_no_more_masks_at_once_than_with_80(self, batch, monkeypatch):
        """Memory: as many as `_MASKS_AT_ONCE` at a time, then the candidates, for any number of classes."""
        largest = {}
        for classes in (80, CLASSES):
            model, sizes = with_classes(classes, **LVIS, candidates=20), []
            predict = model._probabilities
            monkeypatch.setattr(
                model, "_probabilities", lambda o, i, c, p=predict, s=sizes: s.append(len(c)) or p(o, i, c)
            )
            model.predict(model(batch[0]), [(96, 128)])
            assert sum(sizes) <= grid._SCORED_PER_CANDIDATE * 20 + 20
            largest[classes] = max(sizes)
        assert largest[CLASSES] <= max(grid._MASKS_AT_ONCE, 20)

    def test_trains(self, batch):
        images, targets = batch
        targets = [replace(t, labels=t.labels * 400) for t in targets]
        model = with_classes(CLASSES).train()
        outputs = model(images)
        losses = model.losses(outputs, targets, model.assign(outputs, targets))
        sum(losses.values()).backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)
