"""The adapter around Hugging Face's Mask2Former: off it is their model to the loss, on it is the algorithm."""

import builtins
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from helpers.small_segmenters import NUM_CLASSES, drawn
from uniquery.errors import DataError, UserError
from uniquery.masks.suppression import box_iou
from uniquery.querying import EquivarianceSettings, InterSceneSettings, UniqueQuerying
from uniquery.segmenters.hf_mask2former import HFMask2Former
from uniquery.structures import Images, Targets

transformers = pytest.importorskip("transformers")

from helpers.small_hf import BACKBONES, LAYERS, QUERIES, small_hf  # noqa: E402 — it imports transformers

SIZES = ((96, 128), (70, 90))
MEAN, STD = (
    torch.tensor([255 * x for x in of_channels]).view(3, 1, 1)
    for of_channels in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
)


@pytest.fixture
def batch():
    return drawn(SIZES, (4, 3))


BATCHES = {
    "normal": lambda: drawn(SIZES, (4, 3)),
    "one image empty": lambda: drawn(SIZES, (0, 5)),
    "no instance": lambda: drawn(SIZES, (0, 0)),
    "more instances than queries": lambda: drawn(SIZES, (QUERIES + 6, 3), radii=(3, 9)),
}


def as_hf(images: Images, targets: list[Targets]) -> dict[str, Any]:
    """What their image processor makes: rescaled and normalized at once, then padded with zeros."""
    values = torch.zeros(images.pixels.shape)
    mask = torch.zeros(len(images), *images.pixels.shape[-2:], dtype=torch.int64)
    for i, (height, width) in enumerate(images.sizes):
        values[i, :, :height, :width] = (images.pixels[i, :, :height, :width] - MEAN) / STD
        mask[i, :height, :width] = 1
    return {
        "pixel_values": values,
        "pixel_mask": mask,
        "mask_labels": [t.masks.float() for t in targets],
        "class_labels": [t.labels for t in targets],
    }


def total(losses):
    return torch.stack(list(losses.values())).sum()


def run(objective, images, targets, seed=1):
    torch.manual_seed(seed)
    return objective(images, targets)


def matched(model, images, targets):
    outputs = model(images)
    assignment = model.assign(outputs, targets)
    return outputs, assignment, model.queries(outputs, assignment)


class TestOff:
    """Without the algorithm, their model and ours are one."""

    @pytest.mark.parametrize("kind", sorted(BATCHES))
    @pytest.mark.parametrize("backbone", sorted(BACKBONES))
    def test_loss_and_gradients_are_theirs(self, backbone, kind):
        images, targets = BATCHES[kind]()
        model = small_hf(backbone)
        torch.manual_seed(1)
        expected = model(**as_hf(images, targets)).loss
        expected.backward()
        theirs = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()

        losses = run(UniqueQuerying(HFMask2Former(model)), images, targets)
        assert list(losses) == ["loss_class", "loss_mask", "loss_dice", "loss_auxiliary"]
        torch.testing.assert_close(total(losses), expected.squeeze(), rtol=1e-5, atol=0)
        total(losses).backward()
        for name, parameter in model.named_parameters():
            if theirs[name] is None:
                assert parameter.grad is None, name
            else:
                torch.testing.assert_close(parameter.grad, theirs[name], rtol=1e-3, atol=1e-4, msg=name)

    def test_terms_and_weights_are_theirs(self, batch):
        images, targets = batch
        model = small_hf(class_weight=3.0, mask_weight=7.0, dice_weight=0.5, no_object_weight=0.3)
        terms = []
        plain = model.get_loss_dict
        model.get_loss_dict = lambda **kwargs: terms.append(plain(**kwargs)) or terms[-1]
        torch.manual_seed(1)
        model(**as_hf(images, targets))
        losses = run(UniqueQuerying(HFMask2Former(model)), images, targets)
        names = {"loss_class": "loss_cross_entropy", "loss_mask": "loss_mask", "loss_dice": "loss_dice"}
        for ours, theirs in names.items():
            torch.testing.assert_close(losses[ours], terms[0][theirs], rtol=1e-5, atol=0)
        deep = sum(value for name, value in terms[0].items() if name not in names.values())
        torch.testing.assert_close(losses["loss_auxiliary"], deep, rtol=1e-5, atol=0)

    def test_with_layer_drop(self, batch):
        """Their decoder then skips layers at random, so that the number of predictions varies."""
        images, targets = batch
        model = small_hf(dropout=0.5)
        counts = set()
        for seed in range(4):
            torch.manual_seed(seed)
            expected = model(**as_hf(images, targets)).loss
            adapter = HFMask2Former(model)
            torch.testing.assert_close(
                total(run(UniqueQuerying(adapter), images, targets, seed)), expected.squeeze(), rtol=1e-5, atol=0
            )
            torch.manual_seed(seed)
            counts.add(len(adapter(images).logits))
        assert len(counts) > 1

    @torch.no_grad()
    def test_other_colors(self, batch):
        images, _ = batch
        model = small_hf().eval()
        adapter = HFMask2Former(model, image_mean=(0.5, 0.4, 0.3), image_std=(0.2, 0.3, 0.4))
        pixels = images.pixels / 255 - torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1)
        pixels /= torch.tensor([0.2, 0.3, 0.4]).view(3, 1, 1)
        for i, (height, width) in enumerate(images.sizes):
            pixels[i, :, height:] = 0
            pixels[i, :, :, width:] = 0
        torch.testing.assert_close(adapter(images).masks[-1], model(pixels).masks_queries_logits, rtol=1e-4, atol=1e-4)

    def test_the_network_runs_once(self, batch):
        model = small_hf()
        calls = []
        model.model.pixel_level_module.encoder.register_forward_hook(lambda *_: calls.append(1))
        run(UniqueQuerying(HFMask2Former(model)), *batch)
        assert len(calls) == 1


class TestQueries:
    @torch.no_grad()
    def test_decode_gives_their_masks(self, batch):
        images, targets = batch
        model = small_hf().eval()
        adapter = HFMask2Former(model)
        outputs, _, queries = matched(adapter, images, targets)
        expected = model(**as_hf(images, targets), output_auxiliary_logits=True)
        decoded = adapter.decode(queries, outputs.pixels).view_as(expected.masks_queries_logits)
        assert decoded.std() > 0.01
        torch.testing.assert_close(decoded, expected.masks_queries_logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(outputs.logits[-1], expected.class_queries_logits, rtol=1e-4, atol=1e-4)
        assert len(outputs.embeddings) == len(expected.auxiliary_logits) + 1 == LAYERS
        for layer, theirs in enumerate(expected.auxiliary_logits):
            masks = torch.einsum("bnd,bdhw->bnhw", outputs.embeddings[layer], outputs.pixels.embeddings)
            torch.testing.assert_close(masks, theirs["masks_queries_logits"], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(outputs.logits[layer], theirs["class_queries_logits"], rtol=1e-4, atol=1e-4)

    def test_shapes(self, batch):
        adapter = HFMask2Former(small_hf())
        outputs, _, queries = matched(adapter, *batch)
        assert outputs.pixels.stride == 4
        assert outputs.pixels.embeddings.shape == (2, 32, 24, 32)
        assert queries.embeddings.shape == (2 * QUERIES, 32)
        assert queries.image.tolist() == [0] * QUERIES + [1] * QUERIES
        for i, count in enumerate((4, 3)):
            owned = queries.target[queries.image == i]
            assert sorted(owned[owned >= 0].tolist()) == list(range(count))

    def test_similarity_is_decode_pixel_by_pixel(self, batch):
        adapter = HFMask2Former(small_hf()).eval()
        outputs, _, queries = matched(adapter, *batch)
        logits = adapter.decode(queries, outputs.pixels)
        for i in range(2):
            mine, pixels = queries.image == i, outputs.pixels.of_image(i)
            some = torch.randperm(len(pixels))[:50]
            similar = adapter.similarity(queries[mine], pixels[some])
            torch.testing.assert_close(similar, logits[mine].flatten(1)[:, some], rtol=1e-4, atol=1e-5)
            product = adapter.dot_product_scale * queries[mine].embeddings @ pixels[some].embeddings.T
            torch.testing.assert_close(similar, product)

    def test_decode_of_shuffled_and_of_no_queries(self, batch):
        adapter = HFMask2Former(small_hf()).eval()
        outputs, _, queries = matched(adapter, *batch)
        order = torch.randperm(len(queries))
        expected = adapter.decode(queries, outputs.pixels)[order]
        torch.testing.assert_close(adapter.decode(queries[order], outputs.pixels), expected, rtol=1e-4, atol=1e-5)
        assert adapter.decode(queries[:0], outputs.pixels).shape == (0, 24, 32)
        assert adapter.similarity(queries[:0], outputs.pixels.of_image(0)).shape == (0, 24 * 32)

    def test_the_assignment_is_their_matching(self, batch):
        images, targets = batch
        model = small_hf()
        adapter = HFMask2Former(model)
        outputs = adapter(images)
        torch.manual_seed(2)
        assignment = adapter.assign(outputs, targets)
        torch.manual_seed(2)
        labels = as_hf(images, targets)
        pairs = model.criterion.matcher(
            outputs.masks[-1], outputs.logits[-1], labels["mask_labels"], labels["class_labels"]
        )
        assert assignment.image.tolist() == [0] * 4 + [1] * 3
        assert assignment.query.tolist() == [q for queries, _ in pairs for q in queries.tolist()]
        assert assignment.target.tolist() == [t for _, owned in pairs for t in owned.tolist()]
        assert not assignment.query.requires_grad

    def test_queries_of_every_layer(self, batch):
        adapter = HFMask2Former(small_hf())
        outputs, assignment, last = matched(adapter, *batch)
        layers = adapter.layer_queries(outputs, assignment)
        assert len(layers) == LAYERS
        assert torch.equal(layers[-1].embeddings, last.embeddings)
        assert torch.equal(layers[-1].target, last.target)
        for queries, embeddings in zip(layers, outputs.embeddings, strict=True):
            assert torch.equal(queries.embeddings, embeddings.flatten(0, 1))
            assert queries.embeddings.requires_grad
            for i, count in enumerate((4, 3)):
                owned = queries.target[queries.image == i]
                assert sorted(owned[owned >= 0].tolist()) == list(range(count))

    def test_queries_of_a_part_of_the_assignment(self, batch):
        """As the algorithm asks for the views' half of a batch: the others own nothing."""
        adapter = HFMask2Former(small_hf())
        outputs, assignment, _ = matched(adapter, *batch)
        part = assignment[assignment.image >= 1]
        for queries in (adapter.queries(outputs, part), *adapter.layer_queries(outputs, part)):
            assert len(queries) == 2 * QUERIES
            assert queries.image[queries.target >= 0].tolist() == [1, 1, 1]


FORMS = {
    "inter": lambda: {"inter": InterSceneSettings(capacity=500)},
    "inter, matched, all layers": lambda: {"inter": InterSceneSettings(capacity=500, queries="matched", layers="all")},
    "paired": lambda: {"equivariance": EquivarianceSettings()},
    "extra, turned": lambda: {"equivariance": EquivarianceSettings(views="extra", rotate=(0, 60), scale=(0.5, 2.0))},
    "both": lambda: {"inter": InterSceneSettings(capacity=500), "equivariance": EquivarianceSettings()},
    "both, turned": lambda: {
        "inter": InterSceneSettings(capacity=500),
        "equivariance": EquivarianceSettings(rotate=(0, 60), scale=(0.5, 2.0)),
    },
}


class TestOn:
    @pytest.mark.parametrize("kind", ["normal", "one image empty", "no instance"])
    @pytest.mark.parametrize("form", sorted(FORMS))
    def test_finite_losses_and_gradients(self, form, kind):
        images, targets = BATCHES[kind]()
        model = small_hf()
        objective = UniqueQuerying(HFMask2Former(model), **FORMS[form]()).train()
        for step in range(2):  # the second meets a memory that is not empty
            model.zero_grad()
            losses = run(objective, images, [replace(t, image_id=t.image_id + 2 * step) for t in targets])
            total(losses).backward()
        assert ("loss_inter" in losses) == ("inter" in FORMS[form]())
        assert ("loss_equi" in losses) == ("equivariance" in FORMS[form]())
        for name, loss in losses.items():
            assert loss.shape == (), name
            assert loss.isfinite(), name
        if kind == "normal":
            assert all(loss > 0 for loss in losses.values())
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name

    def test_parts_reach_the_network(self, batch):
        """Each part alone moves mask embeddings; the equivariance part also moves the features."""
        model = small_hf()
        objective = UniqueQuerying(
            HFMask2Former(model), inter=InterSceneSettings(capacity=500), equivariance=EquivarianceSettings()
        )
        losses = run(objective, *batch)
        decoder = model.model.transformer_module.decoder.mask_predictor.mask_embedder
        features = model.model.pixel_level_module.decoder.mask_projection
        for name, parameters in {
            "loss_inter": list(decoder.parameters()),
            "loss_equi": [*decoder.parameters(), *features.parameters()],
        }.items():
            gradients = torch.autograd.grad(losses[name], parameters, retain_graph=True)
            assert all(gradient.any() for gradient in gradients), name

    def test_the_base_losses_stay_when_inter_joins(self, batch):
        model = small_hf()
        off = run(UniqueQuerying(HFMask2Former(model)), *batch)
        on = run(UniqueQuerying(HFMask2Former(model), inter=InterSceneSettings()), *batch)
        for name, loss in off.items():
            assert torch.equal(loss, on[name]), name

    def test_the_model_learns(self):
        images, targets = drawn(((64, 64),) * 2, (1, 1), radii=(14, 18))
        model = small_hf(num_queries=6, decoder_layers=2)
        objective = UniqueQuerying(
            HFMask2Former(model), inter=InterSceneSettings(capacity=500), equivariance=EquivarianceSettings()
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        history = []
        torch.manual_seed(0)
        for _ in range(25):
            losses = objective(images, targets)
            optimizer.zero_grad()
            total(losses).backward()
            optimizer.step()
            history.append(total(losses).item())
        assert sum(history[-5:]) < 0.7 * sum(history[:5])

    @pytest.mark.parametrize("kind", ["bfloat16 autocast", "float64"])
    def test_other_precisions_are_close(self, batch, kind):
        settings = {"inter": InterSceneSettings(capacity=500)}
        adapter = HFMask2Former(small_hf(train_num_points=2048)).eval()
        single = run(UniqueQuerying(adapter, **settings), *batch)
        if kind == "float64":
            other = run(UniqueQuerying(adapter.double(), **settings), *batch)
        else:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                other = run(UniqueQuerying(adapter, **settings), *batch)
        total(other).backward()
        for name, loss in single.items():
            assert other[name].item() == pytest.approx(loss.item(), rel=5e-2), name
        assert all(p.grad is not None and p.grad.isfinite().all() for p in adapter.parameters())


class TestMaskLoss:
    @pytest.fixture
    def case(self, batch):
        adapter = HFMask2Former(small_hf())
        outputs, _, queries = matched(adapter, *batch)
        queries = queries[queries.target >= 0]
        logits = adapter.decode(queries, outputs.pixels).detach().requires_grad_()
        valid = torch.zeros(96, 128, dtype=torch.bool)
        valid[:, :64] = True
        return adapter, logits, queries, [replace(t, valid=valid) for t in batch[1]]

    def loss(self, adapter, logits, queries, targets):
        torch.manual_seed(1)
        return adapter.mask_loss(logits, queries, targets)

    def test_it_is_theirs_on_points_alone(self, batch):
        """Many random points and no choice among them: what is left of the randomness is small."""
        images, targets = batch
        model = small_hf(train_num_points=40_000, importance_sample_ratio=0.0, mask_weight=3.0, dice_weight=4.0)
        adapter = HFMask2Former(model)
        outputs, assignment, queries = matched(adapter, images, targets)
        queries = queries[queries.target >= 0]
        losses = adapter.losses(outputs, targets, assignment)
        loss = adapter.mask_loss(adapter.decode(queries, outputs.pixels), queries, targets)
        expected = losses["loss_mask"] + losses["loss_dice"]
        assert loss.item() == pytest.approx(expected.item(), rel=1e-2)

    def test_invalid_pixels_do_not_count(self, case):
        adapter, logits, queries, targets = case
        loss = self.loss(adapter, logits, queries, targets)
        loss.backward()
        assert not logits.grad[..., 18:].any()
        assert logits.grad[..., :16].any()
        flipped = [replace(t, masks=t.masks ^ ~t.valid) for t in targets]
        assert torch.equal(self.loss(adapter, logits, queries, flipped), loss)
        everywhere = [replace(t, valid=None) for t in flipped]
        assert not torch.equal(self.loss(adapter, logits, queries, everywhere), loss)

    def test_nowhere_valid(self, case):
        adapter, logits, queries, targets = case
        nowhere = [replace(t, valid=torch.zeros_like(t.valid)) for t in targets]
        loss = self.loss(adapter, logits, queries, nowhere)
        loss.backward()
        assert loss.isfinite()
        assert not logits.grad.any()

    def test_right_masks_cost_less_than_wrong_ones(self, case):
        adapter, logits, queries, targets = case
        owned = torch.stack([targets[i].masks[t] for i, t in zip(queries.image, queries.target, strict=True)]).float()
        right = 20 * F.interpolate(owned[:, None], size=logits.shape[-2:], mode="area")[:, 0] - 10
        unsaid = [replace(t, valid=None) for t in targets]
        losses = [self.loss(adapter, x, queries, unsaid).item() for x in (right, logits.detach(), -right)]
        assert losses == sorted(losses)
        assert losses[0] < 0.5 * losses[2]

    def test_gradient(self, batch):
        images, targets = batch
        adapter = HFMask2Former(small_hf(train_num_points=16, importance_sample_ratio=0.0))
        outputs, _, queries = matched(adapter, images, targets)
        queries = queries[queries.target >= 0]
        logits = adapter.decode(queries, outputs.pixels).detach().double().requires_grad_()
        assert torch.autograd.gradcheck(lambda x: self.loss(adapter, x, queries, targets), logits, fast_mode=True)


class TestPadding:
    def test_what_lies_in_the_padding_does_not_matter(self, batch):
        images, targets = batch
        soiled = images.pixels.clone()
        soiled[1, :, 70:] = 255
        soiled[1, :, :, 90:] = 255
        adapter = HFMask2Former(small_hf())
        clean, dirty = (
            run(UniqueQuerying(adapter), Images(pixels, images.sizes), targets) for pixels in (images.pixels, soiled)
        )
        for name, loss in clean.items():
            assert torch.equal(loss, dirty[name]), name

    def test_the_model_is_told(self, batch):
        model = small_hf()
        seen = []
        model.model.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs), with_kwargs=True)
        HFMask2Former(model)(batch[0])
        assert seen[0]["pixel_mask"].sum((1, 2)).tolist() == [96 * 128, 70 * 90]
        assert seen[0]["pixel_mask"][1, :70, :90].all()


class TestPredict:
    @pytest.mark.parametrize("sizes", [SIZES, ((37, 53), (211, 97))])
    @torch.no_grad()
    def test_sizes_scores_labels_boxes(self, batch, sizes):
        adapter = HFMask2Former(small_hf(), max_detections=20).eval()
        for instances, (height, width) in zip(adapter.predict(adapter(batch[0]), sizes), sizes, strict=True):
            assert 0 < len(instances) <= 20
            assert instances.masks.shape == (len(instances), height, width)
            assert instances.scores.tolist() == sorted(instances.scores.tolist(), reverse=True)
            assert ((instances.scores > 0) & (instances.scores <= 1)).all()
            assert ((instances.labels >= 0) & (instances.labels < NUM_CLASSES)).all()
            boxes = torch.stack([torch.cat([yx.min(0).values.flip(0), yx.max(0).values.flip(0) + 1])
                                 for yx in (mask.nonzero() for mask in instances.masks)])  # fmt: skip
            assert torch.equal(instances.boxes, boxes.float())

    @torch.no_grad()
    def test_the_best_masks_are_theirs_resized(self, batch):
        images, targets = batch
        model = small_hf().eval()
        adapter = HFMask2Former(model)
        expected = model(**as_hf(images, targets))
        sizes = ((120, 150), (70, 90))
        for i, instances in enumerate(adapter.predict(adapter(images), sizes)):
            scores, labels = expected.class_queries_logits[i].softmax(1)[:, :-1].max(1)
            full = F.interpolate(expected.masks_queries_logits[i][None], size=(96, 128), mode="bilinear")
            height, width = images.sizes[i]
            masks = F.interpolate(full[..., :height, :width], size=sizes[i], mode="bilinear")[0]
            inside = masks > 0
            scores = scores * (masks.sigmoid() * inside).flatten(1).sum(1) / inside.flatten(1).sum(1).clamp(min=1)
            best = scores.argmax()
            assert instances.scores[0].item() == pytest.approx(scores[best].item(), abs=1e-4)
            assert instances.labels[0] == labels[best]
            assert (instances.masks[0] != inside[best]).float().mean() < 1e-3

    @torch.no_grad()
    def test_the_mask_threshold(self, batch):
        adapter = HFMask2Former(small_hf()).eval()
        outputs = adapter(batch[0])
        low, high = (adapter.predict(outputs, SIZES, mask_threshold=t)[0] for t in (0.3, 0.7))
        assert low.masks.sum() > high.masks.sum()
        for instances in HFMask2Former(small_hf(), mask_threshold=1 - 1e-12).eval().predict(outputs, SIZES):
            assert len(instances) == 0

    def test_an_overfitted_model_finds_its_instance(self):
        images, targets = drawn(((64, 64),), (1,), radii=(14, 18))
        model = small_hf(num_queries=6, decoder_layers=2)
        adapter = HFMask2Former(model)
        objective = UniqueQuerying(adapter)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        torch.manual_seed(0)
        for _ in range(60):
            optimizer.zero_grad()
            total(objective(images, targets)).backward()
            optimizer.step()
        (instances,) = adapter.predict(adapter(images), images.sizes)
        assert instances.labels[0] == targets[0].labels[0]
        assert box_iou(instances.boxes[:1], targets[0].boxes).item() > 0.7


class TestSaving:
    def test_names_and_weights_are_unchanged(self, batch):
        model = small_hf()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        trainable = [name for name, p in model.named_parameters() if p.requires_grad]
        objective = UniqueQuerying(
            HFMask2Former(model), inter=InterSceneSettings(capacity=500), equivariance=EquivarianceSettings()
        )
        model.eval()
        run(objective, *batch)
        assert [name for name, p in model.named_parameters() if p.requires_grad] == trainable
        after = model.state_dict()
        assert list(before) == list(after)
        assert all(torch.equal(value, after[name]) for name, value in before.items())
        assert list(objective.state_dict()) == [f"segmenter.model.{name}" for name in before]
        assert {id(p) for p in objective.parameters()} == {id(p) for p in model.parameters()}

    @torch.no_grad()
    def test_save_pretrained_and_back(self, batch, tmp_path):
        images, _ = batch
        adapter = HFMask2Former(small_hf()).eval()
        adapter.model.save_pretrained(tmp_path)
        assert (tmp_path / "model.safetensors").is_file()
        again = transformers.Mask2FormerForUniversalSegmentation.from_pretrained(tmp_path, use_safetensors=True)
        restored = HFMask2Former(again).eval()
        first, second = (m.predict(m(images), SIZES) for m in (adapter, restored))
        for a, b in zip(first, second, strict=True):
            assert a.rles == b.rles
            assert torch.equal(a.scores, b.scores)

    def test_a_checkpoint_with_other_classes(self, batch, tmp_path):
        """What the error about the number of labels tells people to do."""
        small_hf(num_labels=7).save_pretrained(tmp_path)
        model = transformers.Mask2FormerForUniversalSegmentation.from_pretrained(
            tmp_path, num_labels=NUM_CLASSES, ignore_mismatched_sizes=True, use_safetensors=True
        ).train()
        assert model.criterion.empty_weight.tolist() == pytest.approx([1.0] * NUM_CLASSES + [0.1])
        losses = run(UniqueQuerying(HFMask2Former(model, NUM_CLASSES)), *batch)
        assert total(losses).isfinite()


class TestUnpack:
    def test_a_processors_batch_gives_the_same_loss(self, batch):
        images, targets = batch
        model = small_hf()
        adapter = HFMask2Former(model)
        theirs = as_hf(images, targets)
        torch.manual_seed(1)
        expected = model(**theirs).loss
        ours, unpacked = adapter.unpack(theirs, [7, 9])
        torch.testing.assert_close(
            total(run(UniqueQuerying(adapter), ours, unpacked)), expected.squeeze(), rtol=1e-5, atol=0
        )
        assert ours.sizes == images.sizes
        torch.testing.assert_close(ours.pixels[1, :, :70, :90], images.pixels[1, :, :70, :90].float())
        assert [t.image_id for t in unpacked] == [7, 9]
        for a, b in zip(unpacked, targets, strict=True):
            assert torch.equal(a.masks, b.masks)
            assert torch.equal(a.boxes, b.boxes)
            assert torch.equal(a.labels, b.labels)

    def test_without_padding_and_without_instances(self):
        images, targets = drawn(((64, 96),) * 2, (0, 2))
        theirs = as_hf(images, targets)
        del theirs["pixel_mask"]
        ours, unpacked = HFMask2Former(small_hf()).unpack(theirs, [0, 1])
        assert ours.sizes == ((64, 96), (64, 96))
        assert [len(t) for t in unpacked] == [0, 2]


class TestErrors:
    def test_transformers_is_missing(self, monkeypatch):
        model = small_hf()
        plain = builtins.__import__

        def without(name, *args, **kwargs):
            if name.split(".")[0] == "transformers":
                raise ImportError(name)
            return plain(name, *args, **kwargs)

        monkeypatch.setattr(builtins, "__import__", without)
        with pytest.raises(UserError, match=r"needs transformers.*pip install 'uniquery\[hf\]'"):
            HFMask2Former(model)

    def test_another_model(self):
        with pytest.raises(UserError, match="Mask2FormerForUniversalSegmentation of transformers, not a Linear"):
            HFMask2Former(torch.nn.Linear(1, 1))
        with pytest.raises(UserError, match="not a Mask2FormerModel"):
            HFMask2Former(small_hf().model)

    def test_another_number_of_classes(self):
        with pytest.raises(UserError, match=r"3 labels but the data 5 classes.*num_labels=5"):
            HFMask2Former(small_hf(), num_classes=5)

    @pytest.mark.parametrize("mean", [(123.7, 116.3, 103.5), (0.5, 0.5)])
    def test_colors_of_another_scale(self, mean):
        with pytest.raises(UserError, match=r"image_mean and image_std are three numbers each, for colors in 0\.\.1"):
            HFMask2Former(small_hf(), image_mean=mean)

    @pytest.mark.parametrize("label", [-1, NUM_CLASSES])
    def test_a_label_out_of_range(self, batch, label):
        images, targets = batch
        targets[1].labels[2] = label
        with pytest.raises(DataError, match=r"Labels must be from 0 to 2, as the model has 3 classes; got"):
            run(UniqueQuerying(HFMask2Former(small_hf())), images, targets)

    def test_not_as_many_labels_as_masks(self, batch):
        images, targets = batch
        short = replace(targets[1], labels=targets[1].labels[:2])
        with pytest.raises(DataError, match="Image 1 has 2 labels for 3 masks"):
            run(UniqueQuerying(HFMask2Former(small_hf())), images, [targets[0], short])
