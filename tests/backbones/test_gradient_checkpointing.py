"""Recomputing blocks in the backward pass changes memory and nothing else, for every kind of backbone."""

import copy
from collections import Counter

import pytest
import torch
from torch import nn

from uniquery.backbones import BackboneConfig, build_backbone
from uniquery.backbones.base import StagedBackbone
from uniquery.backbones.efficientnet_lite import EfficientNetLite
from uniquery.backbones.resnet import ResNet
from uniquery.backbones.swin import Swin
from uniquery.backbones.tiny import Tiny
from uniquery.layers.checkpointing import checkpointed

SMALL = {
    "basic, batch": lambda: ResNet(18, norm="batch", stem_channels=8, width=8),
    "basic, frozen": lambda: ResNet(18, norm="frozen", stem_channels=8, width=8),
    "bottleneck, batch": lambda: ResNet(50, norm="batch", stem_channels=8, width=4),
    "deformable, batch": lambda: ResNet(50, norm="batch", stem_channels=8, width=4, deformable_stages=("res4", "res5")),
    "efficientnet_lite0, batch": lambda: EfficientNetLite(0, norm="batch"),
    "efficientnet_lite0, frozen": lambda: EfficientNetLite(0, norm="frozen"),
    "swin": lambda: Swin(8, (2, 2, 4, 2), window=3, head_channels=4, drop_path=0.5),
    "tiny": Tiny,
}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=sorted(SMALL))
def pair(request) -> tuple[StagedBackbone, StagedBackbone]:
    """A backbone, and the same with the switch on."""
    return made(request.param)


def made(name: str) -> tuple[StagedBackbone, StagedBackbone]:
    torch.manual_seed(0)
    plain = SMALL[name]().train()
    saving = copy.deepcopy(plain)
    saving.checkpoint_gradients = True
    return plain, saving


def step(backbone: StagedBackbone, images: torch.Tensor) -> dict[str, torch.Tensor]:
    """Everything that a training step leaves behind: features, gradients, buffers and the state of chance."""
    torch.manual_seed(1)
    features = backbone(images)
    torch.stack([feature.float().pow(2).mean() for feature in features.values()]).sum().backward()
    left = {f"features {stride}": feature.detach() for stride, feature in features.items()}
    left |= {f"gradient {key}": value.grad for key, value in backbone.named_parameters() if value.grad is not None}
    left |= {f"buffer {key}": value.clone() for key, value in backbone.named_buffers()}
    return left | {"chance": torch.get_rng_state()}


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert set(ours) == set(theirs)
    assert [key for key, value in ours.items() if not torch.equal(value, theirs[key])] == []


def saved_bytes(backbone: StagedBackbone, images: torch.Tensor) -> int:
    """What autograd keeps of a forward pass, without what is there anyway: parameters and images."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*backbone.parameters(), images)}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        backbone(images)
    return sum(storage.nbytes() for pointer, storage in kept.items() if pointer not in own)


def calls(backbone: StagedBackbone, images: torch.Tensor) -> list[set[int]]:
    """Of the stem and each stage, how often one forward and backward pass ran its blocks with parameters."""
    counts: list[Counter[nn.Module]] = []
    hooks = []
    for stage in backbone.stages():
        blocks = [block for block in backbone.blocks(stage) if list(block.parameters())]
        counts.append(Counter())
        hooks += [
            block.register_forward_pre_hook(lambda module, _, of_stage=counts[-1]: of_stage.update([module]))
            for block in blocks
        ]
    features = backbone(images)
    if features[32].requires_grad:
        torch.stack([feature.pow(2).mean() for feature in features.values()]).sum().backward()
    for hook in hooks:
        hook.remove()
    return [set(of_stage.values()) for of_stage in counts]


def test_a_training_step_is_the_same_to_the_bit(pair):
    images = torch.randn(2, 3, 65, 64)
    plain, saving = (step(backbone, images) for backbone in pair)
    assert any(key.startswith("gradient stem") for key in plain)
    assert_same(saving, plain)


def test_a_second_step_is_the_same_to_the_bit(pair):
    """Batch statistics, which the second step starts from, moved once."""
    images = torch.randn(2, 3, 64, 64)
    for backbone in pair:
        step(backbone, images)
    plain, saving = (step(backbone, images.flip(3)) for backbone in pair)
    assert_same(saving, plain)


@pytest.mark.parametrize("name", ["basic, batch", "swin"])
def test_a_step_in_bfloat16_is_the_same_to_the_bit(name):
    images = torch.randn(2, 3, 96, 96)
    with torch.autocast("cpu", torch.bfloat16):
        plain, saving = (step(backbone, images) for backbone in made(name))
    assert_same(saving, plain)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_frozen_stages_stay_so(pair, count):
    images = torch.randn(2, 3, 64, 64)
    for backbone in pair:
        backbone.freeze(count)
    plain, saving = (step(backbone, images) for backbone in pair)
    assert not any(key.startswith("gradient stem") for key in plain)
    assert_same(saving, plain)


def test_learning_blocks_run_twice_and_frozen_ones_once(pair):
    plain, saving = pair
    saving.freeze(2)
    images = torch.randn(2, 3, 64, 64)
    assert calls(plain, images) == [{1}] * 5
    assert calls(saving, images) == [{1}] * 2 + [{2}] * 3


def test_evaluation_and_passes_without_gradient_run_once(pair):
    _, saving = pair
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert calls(saving, images) == [{1}] * 5
    assert calls(saving.eval(), images) == [{1}] * 5


def test_much_less_is_kept(pair):
    images = torch.randn(2, 3, 128, 128)
    plain, saving = (saved_bytes(backbone, images) for backbone in pair)
    assert 0 < saving < 0.4 * plain


def test_a_retained_graph_goes_backward_twice(pair):
    _, saving = pair
    features = saving(torch.randn(2, 3, 64, 64))
    loss = torch.stack([feature.pow(2).mean() for feature in features.values()]).sum()
    statistics = {key: value.clone() for key, value in saving.named_buffers()}
    parameters = list(saving.stages()[1].parameters())
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    second = torch.autograd.grad(loss, parameters)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(value, statistics[key]) for key, value in saving.named_buffers())


def test_statistics_move_once_and_stay_the_same_tensors():
    """The same tensors: whoever holds them, as a wrapper for several processes does, still sees them move."""
    norm = nn.BatchNorm2d(3)
    held = dict(norm.named_buffers())
    images = torch.randn(2, 3, 4, 4, requires_grad=True)
    checkpointed(norm, images).pow(2).sum().backward()
    assert norm.num_batches_tracked.item() == 1
    torch.testing.assert_close(norm.running_mean, 0.1 * images.detach().mean((0, 2, 3)))
    assert all(value is held[key] for key, value in norm.named_buffers())


def test_statistics_are_kept_although_recomputing_fails():
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.runs = nn.BatchNorm2d(3), 0

        def forward(self, x):
            out, self.runs = self.norm(x), self.runs + 1
            if self.runs == 2:
                raise KeyError("once is enough")
            return out.exp()

    module = Fails()
    held = module.norm.running_mean
    out = checkpointed(module, torch.randn(2, 3, 4, 4))
    with pytest.raises(KeyError):
        out.sum().backward()
    assert module.norm.running_mean is held
    assert module.norm.num_batches_tracked.item() == 1


@pytest.mark.parametrize("wanted", [False, True])
def test_the_configuration_switches_it(wanted):
    config = BackboneConfig(name="tiny", weights="random", checkpoint_gradients=wanted)
    assert build_backbone(config).checkpoint_gradients is wanted
    assert BackboneConfig(name="tiny").checkpoint_gradients is False
