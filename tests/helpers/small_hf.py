"""Small models of Hugging Face's Mask2Former; import it after `pytest.importorskip("transformers")`."""

from typing import Any

import torch
import transformers

from helpers.small_segmenters import NUM_CLASSES

QUERIES, LAYERS = 24, 4
STAGES = ["stage1", "stage2", "stage3", "stage4"]
BACKBONES = {
    "resnet": lambda: transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[16, 16, 32, 32], depths=[1] * 4, layer_type="basic", out_features=STAGES
    ),
    "swin": lambda: transformers.SwinConfig(
        image_size=64, embed_dim=8, depths=[1] * 4, num_heads=[1, 1, 2, 2], window_size=4, out_features=STAGES
    ),
}


def small_hf(backbone: str = "resnet", *, seed: int = 0, **changes: Any) -> Any:
    """A small model whose weights are stirred, so that no output is a constant of its initialization."""
    torch.manual_seed(seed)
    settings = {
        "num_labels": NUM_CLASSES,
        "num_queries": QUERIES,
        "feature_size": 32,
        "mask_feature_size": 32,
        "hidden_dim": 32,
        "num_attention_heads": 4,
        "encoder_layers": 1,
        "encoder_feedforward_dim": 64,
        "decoder_layers": LAYERS,
        "dim_feedforward": 64,
        "train_num_points": 256,
    }
    config = transformers.Mask2FormerConfig(backbone_config=BACKBONES[backbone](), **{**settings, **changes})
    model = transformers.Mask2FormerForUniversalSegmentation(config).train()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
    return model
