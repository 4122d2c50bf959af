"""Diagnosis of scenes and segmenters whose answers are known."""

from dataclasses import dataclass, replace

import pytest
import torch

from uniquery.data.augment import Sample
from uniquery.data.batch import Batch
from uniquery.evaluation.diagnose import (
    TRANSFORMS,
    ProbedImage,
    Response,
    cross_scene_response,
    equivariance_error,
    probe_images,
)
from uniquery.masks import rle
from uniquery.masks.geometry import mask_boxes
from uniquery.querying import Segmenter
from uniquery.querying.memory import InstancePixels
from uniquery.structures import Assignment, Images, Instances, Outputs, PixelMap, Queries, Targets

STRIDE = 4


def logit(*probabilities):
    return torch.tensor(probabilities, dtype=torch.float64).logit().float()


@dataclass(frozen=True)
class ToyOutputs(Outputs):
    """With the images they came of."""

    images: Images


class Toy(Segmenter[ToyOutputs, Assignment, Queries]):
    """Finds whatever is bright; its embeddings are the red values.

    Args:
        turns: the image that it looks at, of the one that it is given.
        confidence: score of what it finds.
    """

    dot_product_scale = 1.0

    def __init__(self, turns=lambda pixels: pixels, confidence=0.9):
        super().__init__()
        self.anywhere = torch.nn.Parameter(torch.zeros(1))
        self.turns, self.confidence = turns, confidence

    def forward(self, images):
        looked = Images(self.turns(images.pixels), images.sizes)
        red = looked.pixels[:, :1, STRIDE // 2 :: STRIDE, STRIDE // 2 :: STRIDE]
        return ToyOutputs(PixelMap(red.float() / 255, STRIDE), looked)

    def assign(self, outputs, targets):
        counts = [len(t) for t in targets]
        image = torch.arange(len(targets)).repeat_interleave(torch.tensor(counts))
        target = torch.cat([torch.arange(count) for count in counts])
        return Assignment(target, image, target)

    def queries(self, outputs, assignment):
        return Queries(torch.full((len(assignment), 1), 2.0), assignment.image, assignment.target)

    def predict(self, outputs, sizes, *, mask_threshold=None):
        found = []
        for pixels, (height, width) in zip(outputs.images.pixels, sizes, strict=True):
            masks = (pixels[:1, :height, :width] > 128).to(torch.uint8)
            rles = [rle.encode(mask.numpy()) for mask in masks]
            found.append(
                Instances(
                    torch.tensor([self.confidence]),
                    torch.zeros(1, dtype=torch.int64),
                    mask_boxes(masks.bool()),
                    rles,
                    (height, width),
                )
            )
        return found

    def mask_loss(self, logits, queries, targets):
        raise NotImplementedError

    def losses(self, outputs, targets, assignment):
        raise NotImplementedError


def pixels_of(values, image_id, locations=None, labels=None):
    count = len(values)
    ids = torch.full((count,), image_id)
    at = torch.zeros(count, 2) if locations is None else torch.tensor(locations).float()
    return InstancePixels(values[:, None], at, ids, ids * 0 if labels is None else torch.tensor(labels), ids == ids)


def scene(queries, own, pixels, image_id, locations=None, labels=None):
    """What a scene needs for its responses: one-channel queries and pixels, so that a logit is their product.

    Its one instance, of class 0, covers the left half of 32 × 32 pixels.
    """
    nowhere = torch.zeros(len(queries), dtype=torch.int64)
    masks = torch.zeros(1, 32, 32, dtype=torch.bool)
    masks[:, :, :16] = True
    targets = Targets(torch.zeros(1, dtype=torch.int64), mask_boxes(masks), masks, image_id)
    return ProbedImage(
        batch=Batch(Images(torch.zeros(1, 3, 32, 32), ((32, 32),)), [targets], [(32, 32)]),
        pixel_map=None,
        queries=Queries(queries[:, None], nowhere, nowhere),
        own_response=own,
        instance_pixels=pixels_of(pixels, image_id, locations, labels),
        instances=None,
    )


class TestCrossSceneResponse:
    def test_known_responses(self):
        """Queries of 1 read a pixel's logit off; those of −1 its opposite."""
        scenes = [
            scene(torch.ones(2), torch.tensor([0.9, 0.5]), logit(0.2, 0.9), 0),
            scene(-torch.ones(1), torch.tensor([0.1]), logit(0.1, 0.3, 0.6, 0.8), 1),
        ]
        found = cross_scene_response(Toy(), scenes)
        fired = 2 * [0.1, 0.3, 0.6, 0.8] + [0.8, 0.1]  # never on the own scene
        assert found.queries == 3
        assert found.own == pytest.approx(0.5)
        assert found.mean == pytest.approx(sum(fired) / 10, rel=1e-6)
        assert found.above_half == pytest.approx(0.5)
        assert found.p99 == pytest.approx(0.8, abs=5e-4)

    def test_the_percentile_is_that_of_all_pairs(self):
        low, high = torch.full((98,), 0.25), torch.tensor([0.75, 0.95])
        pixels = torch.cat([low, high]).logit()
        scenes = [
            scene(torch.ones(1), torch.ones(1), pixels[:0], 0),
            scene(torch.ones(0), torch.ones(0), pixels, 1),
        ]
        found = cross_scene_response(Toy(), scenes)
        assert found.queries == 1
        assert found.mean == pytest.approx((98 * 0.25 + 0.75 + 0.95) / 100, rel=1e-6)
        assert found.p99 == pytest.approx(0.75, abs=5e-4)
        assert found.above_half == pytest.approx(0.02)

    def test_inside_and_outside_same_and_other_class(self):
        """The query's own instance covers x < 16; the last pixel lies outside of its image."""
        asking = scene(torch.ones(1), torch.ones(1), logit()[:0], 0)
        locations = [[2, 2], [15, 31], [16, 5], [40, 5]]
        pixels = logit(0.9, 0.7, 0.3, 0.1)
        asked = scene(torch.ones(0), torch.ones(0), pixels, 1, locations, labels=[0, 1, 0, 2])
        response = cross_scene_response(Toy(), [asking, asked])
        assert (response.inside.pairs, response.outside.pairs) == (2, 2)
        assert response.inside.mean == pytest.approx(0.8)
        assert response.outside.mean == pytest.approx(0.2)
        assert (response.inside.above_half, response.outside.above_half) == (1, 0)
        assert response.same_class.mean == pytest.approx(0.6)
        assert response.other_class.mean == pytest.approx(0.4)
        assert response.instances == 2
        assert [group.instances for group in (response.inside, response.outside, response.same_class)] == [1, 1, 1]

    def test_a_group_without_a_pair(self):
        scenes = [scene(torch.ones(1), torch.ones(1), logit(0.2), image_id) for image_id in (0, 1)]
        response = cross_scene_response(Toy(), scenes)
        assert response.other_class == Response(pairs=0, instances=0, mean=None, above_half=None)
        assert (response.same_class.pairs, response.same_class.instances) == (2, 2)

    def test_nothing_to_compare(self):
        one = scene(torch.ones(2), torch.ones(2), logit(0.2, 0.9), 0)
        silent = scene(torch.ones(0), torch.ones(0), logit()[:0], 1)
        assert cross_scene_response(Toy(), [one]) is None
        assert cross_scene_response(Toy(), [one, silent]) is None


def bright(left, right, size=(64, 96)):
    """An image that is bright in some columns, red 204 there and 0 elsewhere; padded to 96 × 96."""
    pixels = torch.zeros(1, 3, 96, 96, dtype=torch.uint8)
    pixels[..., : size[0], left:right] = 204
    masks = pixels[0, :1] > 0
    targets = Targets(torch.zeros(1, dtype=torch.int64), mask_boxes(masks), masks, 0)
    return Batch(Images(pixels, (size,)), [targets], [size])


def read(model, batch):
    """The scene as `probe_images` makes it, without files."""
    outputs = model(batch.images)
    (found,) = model.predict(outputs, batch.images.sizes)
    return ProbedImage(batch, outputs.pixels, None, None, None, found)


class TestEquivarianceError:
    @pytest.mark.parametrize("name", ["flip", "crop"])
    def test_a_segmenter_that_follows(self, name):
        model = Toy()
        found = equivariance_error(model, [read(model, bright(16, 48))], TRANSFORMS[name])
        assert found.mask_error == 0
        assert found.feature_error == 0

    def test_a_segmenter_that_ignores_a_flip(self):
        """It undoes the flip: the bright columns stay at 16–48, where 48–80 is wanted; no overlap at all."""
        model = Toy()
        scenes = [read(model, bright(16, 48))]
        model.turns = lambda pixels: pixels.flip(3)
        found = equivariance_error(model, scenes, TRANSFORMS["flip"])
        assert found.mask_error == 1
        # Twice the mean square a² / 3 of a third of the columns, relative to their variance a² / 3 · (1 − 1 / 3).
        assert found.feature_error == pytest.approx(2 / (1 - 1 / 3))
        assert (found.instances, found.images) == (1, 1)

    def test_half_of_it(self):
        """Columns 16–64 mirrored are 32–80: they share 32 of 64 columns. Another scene follows by its symmetry."""
        model = Toy()
        scenes = [read(model, bright(16, 64)), read(model, bright(32, 64))]
        model.turns = lambda pixels: pixels.flip(3)
        alone = equivariance_error(model, scenes[:1], TRANSFORMS["flip"])
        assert alone.mask_error == pytest.approx(0.5)
        assert alone.feature_error == pytest.approx(32 / 48 / (1 - 1 / 2))
        both = equivariance_error(model, scenes, TRANSFORMS["flip"])
        assert both.mask_error == pytest.approx(0.25)
        assert both.feature_error == pytest.approx(16 / 48 / (1 - 1 / 2))
        assert (both.instances, both.images) == (2, 2)

    def test_a_constant_added_to_the_features_changes_nothing(self):
        """The unit is the spread over the image, not the size of the features."""
        model = Toy()
        scenes = [read(model, bright(16, 64))]
        model.turns = lambda pixels: pixels.flip(3)
        before = equivariance_error(model, scenes, TRANSFORMS["flip"])
        plain = model.forward
        shifted = replace(scenes[0].pixel_map, embeddings=scenes[0].pixel_map.embeddings + 5)
        model.forward = lambda images: replace(
            (outputs := plain(images)), pixels=replace(outputs.pixels, embeddings=outputs.pixels.embeddings + 5)
        )
        after = equivariance_error(model, [replace(scenes[0], pixel_map=shifted)], TRANSFORMS["flip"])
        assert after.feature_error == pytest.approx(before.feature_error, rel=1e-4)

    def test_another_class_is_no_match(self):
        model = Toy()
        one = read(model, bright(16, 48))
        one.instances.labels.fill_(1)
        assert equivariance_error(model, [one], TRANSFORMS["flip"]).mask_error == 1

    def test_nothing_to_compare(self):
        model = Toy()
        assert equivariance_error(model, [read(model, bright(0, 20, size=(31, 96)))], TRANSFORMS["flip"]) is None
        one = read(model, bright(16, 48))
        empty = ProbedImage(**{**vars(one), "instances": one.instances[torch.zeros(1, dtype=torch.bool)]})
        for scene, name in ((empty, "flip"), (read(model, bright(72, 96)), "crop")):  # the crop shows 0–64
            found = equivariance_error(model, [scene], TRANSFORMS[name])
            assert (found.mask_error, found.instances, found.images) == (None, 0, 1)
            assert found.feature_error == 0


class TestProbeImages:
    """Of data in memory, as large as the model sees it."""

    class Data:
        image_ids = (7, 8)

        def load(self, index):
            image = torch.zeros(3, 64, 96, dtype=torch.uint8)
            image[..., 16:48] = 204
            mask = torch.zeros(1, 64, 96, dtype=torch.uint8)
            mask[:, :, 16:48] = 1
            if index:  # whose instance is twice as wide as what is bright
                mask[:, :, 16:80] = 1
            return Sample(image, mask, torch.zeros(1, dtype=torch.int64))

    def test_own_responses_pixels_and_findings(self):
        first, second = probe_images(Toy(), self.Data(), 64, 96, [0, 1])
        bright = torch.tensor(2 * 204 / 255).sigmoid().item()
        assert first.own_response.tolist() == pytest.approx([bright])
        assert second.own_response.tolist() == pytest.approx([(bright + 0.5) / 2])
        assert first.instance_pixels.image_ids.tolist() == [7] * 10
        assert second.instance_pixels.image_ids.tolist() == [8] * 10
        assert (first.instance_pixels.embeddings == 0.8).all()
        assert first.instances.masks.nonzero()[:, 2].unique().tolist() == list(range(16, 48))

    def test_what_is_not_confident_is_left_out(self):
        (one,) = probe_images(Toy(confidence=0.4), self.Data(), 64, 96, [0])
        assert len(one.instances) == 0
