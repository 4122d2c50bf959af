"""The federated class loss: against loops, in the segmenters that have it, and refused by those that cannot."""

from dataclasses import replace

import pytest
import torch

from helpers.coco_files import assert_one_sentence
from helpers.small_runs import small_config
from helpers.small_segmenters import SMALL, drawn, small
from uniquery.errors import ConfigError
from uniquery.segmenters import SEGMENTERS
from uniquery.segmenters.federated import drop_unlabeled_classes
from uniquery.structures import Targets
from uniquery.training.config import load_config
from uniquery.training.loop import train

SIGMOID = ("condinst", "solov2", "sotr", "sparseinst", "solq")


def target(labels, negative=None, not_exhaustive=None) -> Targets:
    lists = [None if one is None else torch.tensor(one, dtype=torch.int64) for one in (negative, not_exhaustive)]
    masks = torch.ones(len(labels), 4, 4, dtype=torch.bool)
    return Targets(torch.tensor(labels), torch.zeros(len(labels), 4), masks, 0, None, None, *lists)


def naive(losses, is_class, targets):
    kept = torch.zeros_like(losses)
    for i, one in enumerate(targets):
        for place in range(losses.shape[1]):
            for c in range(losses.shape[2]):
                taught = one.negative_classes is None or c in one.negative_classes.tolist() or c in one.labels.tolist()
                complete = one.not_exhaustive_classes is None or c not in one.not_exhaustive_classes.tolist()
                if is_class[i, place, c] or (taught and complete):
                    kept[i, place, c] = losses[i, place, c]
    return kept


class TestLoss:
    TARGETS = (
        target([0, 2], [3], [2]),
        target([1], [], []),
        target([4], None, [1, 4]),
        target([2], [0, 1]),
        target([3]),
    )

    def test_against_loops(self):
        torch.manual_seed(0)
        losses, is_class = torch.rand(5, 7, 6, dtype=torch.float64), torch.rand(5, 7, 6) < 0.1
        got = drop_unlabeled_classes(losses, is_class, self.TARGETS)
        assert torch.equal(got, naive(losses, is_class, self.TARGETS))
        assert torch.equal(got, drop_unlabeled_classes(losses, is_class.float(), self.TARGETS))

    def test_nothing_changes_without_lists(self):
        losses = torch.rand(1, 7, 6)
        assert drop_unlabeled_classes(losses, torch.zeros(1, 7, 6), [target([3])]) is losses

    def test_its_gradient(self):
        losses = torch.rand(5, 2, 6, dtype=torch.float64, requires_grad=True)
        is_class = torch.zeros(5, 2, 6)
        assert torch.autograd.gradcheck(lambda x: drop_unlabeled_classes(x, is_class, self.TARGETS), losses)


@pytest.mark.parametrize("name", SIGMOID)
class TestSegmenters:
    @pytest.fixture
    def batch(self):
        return drawn(((64, 96), (96, 64)), (3, 2))

    def losses(self, name, batch, targets):
        model = small(name)
        outputs = model(batch[0])
        torch.manual_seed(0)
        losses = model.losses(outputs, targets, model.assign(outputs, targets))
        return model, outputs, losses

    def test_all_classes_taught_is_the_usual_loss(self, name, batch):
        _, _, usual = self.losses(name, batch, batch[1])
        everything = [replace(t, negative_classes=torch.arange(3)) for t in batch[1]]
        _, _, same = self.losses(name, batch, everything)
        for key, value in usual.items():
            torch.testing.assert_close(same[key], value)

    def test_only_the_class_loss_is_smaller(self, name, batch):
        nothing = torch.tensor([], dtype=torch.int64)
        lists = [replace(t, negative_classes=nothing, not_exhaustive_classes=t.labels.unique()) for t in batch[1]]
        _, _, usual = self.losses(name, batch, batch[1])
        _, _, fewer = self.losses(name, batch, lists)
        for key in usual:
            if key in ("loss_class", "loss_auxiliary"):
                assert 0 < fewer[key] < usual[key]
            else:
                torch.testing.assert_close(fewer[key], usual[key])

    def test_classes_that_are_not_taught_get_no_gradient(self, name, batch):
        targets = [replace(t, labels=t.labels * 0, negative_classes=torch.tensor([2])) for t in batch[1]]
        _, outputs, losses = self.losses(name, batch, targets)
        (gradient,) = torch.autograd.grad(losses["loss_class"], outputs.logits)
        assert gradient[..., 0].abs().sum() > 0
        assert gradient[..., 2].abs().sum() > 0
        assert gradient[..., 1].abs().sum() == 0

    def test_without_instances_every_parameter_gets_a_gradient(self, name, batch):
        nothing = torch.tensor([], dtype=torch.int64)
        targets = [replace(t[:0], negative_classes=nothing, not_exhaustive_classes=nothing) for t in batch[1]]
        model, _, losses = self.losses(name, batch, targets)
        sum(losses.values()).backward()
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


class TestSwitch:
    def test_which_segmenters_have_it(self):
        for name in SEGMENTERS:
            assert SMALL[name].has_federated_loss == (name in SIGMOID)

    def test_others_refuse_it(self, scenes, tmp_path):
        with pytest.raises(ConfigError, match=r"mask2former cannot, condinst, .*solov2.*sotr.* can") as caught:
            load_config(small_config(tmp_path, scenes, model={"name": "mask2former"}), [("data.federated", {})])
        assert_one_sentence(str(caught.value).splitlines()[-1].strip())

    def test_a_training_with_it(self, scenes, tmp_path):
        config = load_config(small_config(tmp_path, scenes), [("data.federated", {"classes": 2}), "train.steps=2"])
        assert (train(config) / "last" / "model.safetensors").is_file()
