"""Empty modules with the parameters, names and shapes of mmdetection 3's, written after its source files.

From mmdet/models: backbones/resnet.py and swin.py, necks/fpn.py, dense_heads/condinst_head.py (with fcos_head.py and
anchor_free_head.py), solov2_head.py and mask2former_head.py, layers/msdeformattn_pixel_decoder.py and
layers/transformer/. mmdetection itself is not needed.
"""

from collections.abc import Sequence

import torch
from torch import nn


class ConvModule(nn.Module):
    """mmcv's: `conv`, and `bn` or `gn`; a bias by default only without normalization."""

    def __init__(self, inputs: int, outputs: int, kernel: int, norm: str | None = None, bias: bool | None = None):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, bias=norm is None if bias is None else bias)
        if norm == "bn":
            self.bn = nn.BatchNorm2d(outputs)
        if norm == "gn":
            self.gn = nn.GroupNorm(32, outputs)


class Named(nn.Module):
    """Modules and parameters by their names."""

    def __init__(self, **children: nn.Module | torch.Tensor):
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child if isinstance(child, nn.Module) else nn.Parameter(child))


def bottleneck(inputs: int, width: int, downsample: bool) -> nn.Module:
    block = Named(
        conv1=nn.Conv2d(inputs, width, 1, bias=False),
        bn1=nn.BatchNorm2d(width),
        conv2=nn.Conv2d(width, width, 3, bias=False),
        bn2=nn.BatchNorm2d(width),
        conv3=nn.Conv2d(width, 4 * width, 1, bias=False),
        bn3=nn.BatchNorm2d(4 * width),
    )
    if downsample:
        block.downsample = nn.Sequential(nn.Conv2d(inputs, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width))
    return block


def resnet50() -> nn.Module:
    net = Named(conv1=nn.Conv2d(3, 64, 7, bias=False), bn1=nn.BatchNorm2d(64))
    inputs = 64
    for stage, count in enumerate((3, 4, 6, 3), start=1):
        width = 32 << stage
        blocks = [bottleneck(inputs if i == 0 else 4 * width, width, downsample=i == 0) for i in range(count)]
        net.add_module(f"layer{stage}", nn.Sequential(*blocks))
        inputs = 4 * width
    return net


class PatchMerging(nn.Module):
    """mmdetection's own forward: `nn.Unfold` orders the four cells after the channels."""

    def __init__(self, channels: int):
        super().__init__()
        self.norm = nn.LayerNorm(4 * channels)
        self.reduction = nn.Linear(4 * channels, 2 * channels, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, C, h, w) to (B, h/2 · w/2, 2C)."""
        return self.reduction(self.norm(nn.functional.unfold(x, kernel_size=2, stride=2).transpose(1, 2)))


def swin(channels: int, depths: Sequence[int], window: int = 7, head_channels: int = 32) -> nn.Module:
    def block(width: int) -> nn.Module:
        heads = width // head_channels
        attention = Named(
            relative_position_bias_table=torch.randn((2 * window - 1) ** 2, heads),
            qkv=nn.Linear(width, 3 * width),
            proj=nn.Linear(width, width),
        )
        attention.register_buffer("relative_position_index", torch.zeros(window**2, window**2, dtype=torch.int64))
        ffn = Named(layers=nn.Sequential(nn.Sequential(nn.Linear(width, 4 * width)), nn.Linear(4 * width, width)))
        return Named(norm1=nn.LayerNorm(width), attn=Named(w_msa=attention), norm2=nn.LayerNorm(width), ffn=ffn)

    widths = [channels << i for i in range(4)]
    stages = nn.ModuleList()
    for i, (width, depth) in enumerate(zip(widths, depths, strict=True)):
        stage = Named(blocks=nn.ModuleList(block(width) for _ in range(depth)))
        if i < 3:
            stage.downsample = PatchMerging(width)
        stages.append(stage)
    embedding = Named(projection=nn.Conv2d(3, channels, 4, 4), norm=nn.LayerNorm(channels))
    return Named(patch_embed=embedding, stages=stages, **{f"norm{i}": nn.LayerNorm(w) for i, w in enumerate(widths)})


def fpn(first: int, extra: int) -> nn.Module:
    inputs = (256, 512, 1024, 2048)[first:]
    convs = [ConvModule(256, 256, 3) for _ in range(len(inputs) + extra)]
    return Named(lateral_convs=nn.ModuleList(ConvModule(c, 256, 1) for c in inputs), fpn_convs=nn.ModuleList(convs))


def condinst(classes: int = 80) -> nn.Module:
    def tower() -> nn.ModuleList:
        return nn.ModuleList(ConvModule(256, 256, 3, "gn", bias=True) for _ in range(4))

    scale = [Named(scale=torch.tensor(1.0)) for _ in range(5)]
    box_head = Named(
        cls_convs=tower(),
        reg_convs=tower(),
        conv_cls=nn.Conv2d(256, classes, 3),
        conv_reg=nn.Conv2d(256, 4, 3),
        conv_centerness=nn.Conv2d(256, 1, 3),
        scales=nn.ModuleList(scale),
        controller=nn.Conv2d(256, 169, 3),
    )
    levels = [Named(**{f"conv{i}": ConvModule(256, 128, 3, "bn")}) for i in range(3)]
    features = Named(
        convs_all_levels=nn.ModuleList(levels),
        conv_branch=nn.Sequential(*(ConvModule(128, 128, 3, "bn") for _ in range(4))),
        conv_pred=nn.Conv2d(128, 8, 1),
    )
    return Named(
        backbone=resnet50(),
        neck=fpn(first=1, extra=2),
        bbox_head=box_head,
        mask_head=Named(mask_feature_head=features),
    )


def solov2(classes: int = 80) -> nn.Module:
    def tower(inputs: int) -> nn.ModuleList:
        return nn.ModuleList(ConvModule(inputs if i == 0 else 512, 512, 3, "gn") for i in range(4))

    levels = [Named(conv0=ConvModule(256, 128, 3, "gn"))]
    for level in (1, 2, 3):
        inputs = [258 if level == 3 else 256, 128, 128]
        levels.append(Named(**{f"conv{i}": ConvModule(inputs[i], 128, 3, "gn") for i in range(level)}))
    features = Named(convs_all_levels=nn.ModuleList(levels), conv_pred=ConvModule(128, 256, 1, "gn"))
    head = Named(
        cls_convs=tower(256),
        kernel_convs=tower(258),
        conv_cls=nn.Conv2d(512, classes, 3),
        conv_kernel=nn.Conv2d(512, 256, 3),
        mask_feature_head=features,
    )
    return Named(backbone=resnet50(), neck=fpn(first=0, extra=0), mask_head=head)


def mask2former(backbone: nn.Module, channels: Sequence[int], classes: int = 80) -> nn.Module:
    def ffn(width: int) -> nn.Module:
        return Named(layers=nn.Sequential(nn.Sequential(nn.Linear(256, width)), nn.Linear(width, 256)))

    def encoder_layer() -> nn.Module:
        attention = Named(
            sampling_offsets=nn.Linear(256, 192),
            attention_weights=nn.Linear(256, 96),
            value_proj=nn.Linear(256, 256),
            output_proj=nn.Linear(256, 256),
        )
        return Named(self_attn=attention, ffn=ffn(1024), norms=nn.ModuleList(nn.LayerNorm(256) for _ in range(2)))

    def decoder_layer() -> nn.Module:
        return Named(
            self_attn=Named(attn=nn.MultiheadAttention(256, 8)),
            cross_attn=Named(attn=nn.MultiheadAttention(256, 8)),
            ffn=ffn(2048),
            norms=nn.ModuleList(nn.LayerNorm(256) for _ in range(3)),
        )

    pixel_decoder = Named(
        input_convs=nn.ModuleList(ConvModule(c, 256, 1, "gn", bias=True) for c in reversed(channels[1:])),
        encoder=Named(layers=nn.ModuleList(encoder_layer() for _ in range(6))),
        level_encoding=nn.Embedding(3, 256),
        lateral_convs=nn.ModuleList([ConvModule(channels[0], 256, 1, "gn")]),
        output_convs=nn.ModuleList([ConvModule(256, 256, 3, "gn")]),
        mask_feature=nn.Conv2d(256, 256, 1),
    )
    head = Named(
        pixel_decoder=pixel_decoder,
        transformer_decoder=Named(layers=nn.ModuleList(decoder_layer() for _ in range(9)), post_norm=nn.LayerNorm(256)),
        query_embed=nn.Embedding(100, 256),
        query_feat=nn.Embedding(100, 256),
        level_embed=nn.Embedding(3, 256),
        cls_embed=nn.Linear(256, classes + 1),
        mask_embed=nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)),
    )
    return Named(backbone=backbone, panoptic_head=head)
