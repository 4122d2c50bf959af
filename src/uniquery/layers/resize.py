"""Upsampling that keeps cells aligned with the input pixels they cover."""

import torch
import torch.nn.functional as F
from torch import Tensor


def aligned_bilinear(x: Tensor, factor: int) -> Tensor:
    """Bilinear upsampling of (N, C, h, w) by a whole factor with the first samples aligned, as CondInst does it.

    >>> aligned_bilinear(torch.tensor([[[[0.0, 2.0]]]]), 2)[0, 0, 0]
    tensor([0., 0., 1., 2.])
    """
    if factor == 1:
        return x
    height, width = x.shape[-2:]
    x = F.pad(x, (0, 1, 0, 1), mode="replicate")
    x = F.interpolate(x, size=(factor * height + 1, factor * width + 1), mode="bilinear", align_corners=True)
    x = F.pad(x, (factor // 2, 0, factor // 2, 0), mode="replicate")
    return x[..., : factor * height, : factor * width]


def aligned_linear_matrix(cells: int, factor: int) -> Tensor:
    """(cells, factor · cells): `aligned_bilinear` along one axis, as a matrix."""
    return aligned_bilinear(torch.eye(cells).view(cells, 1, 1, cells), factor)[:, 0, 0]
