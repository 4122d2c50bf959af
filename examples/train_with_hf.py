"""Hugging Face's Mask2Former, trained with the method in a plain loop.

    python examples/train_with_hf.py                                # a tiny random model on drawn scenes
    python examples/train_with_hf.py --model facebook/mask2former-swin-tiny-coco-instance
    python examples/train_with_hf.py --model my/folder --annotations train.json --images train/ --device cuda

What changes in a loop that you already have: the model is wrapped twice, and the losses come from the wrapper.
"""

import argparse
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation, SwinConfig

from uniquery.data.batch import TrainingSamples, collate, raise_errors
from uniquery.data.coco import CocoData
from uniquery.data.sampling import StepBatchSampler
from uniquery.data.scenes import ScenesConfig, make_scenes
from uniquery.querying import EquivarianceSettings, InterSceneSettings, UniqueQuerying
from uniquery.segmenters.hf_mask2former import HFMask2Former


def load(name: str | None, classes: list[str]) -> Mask2FormerForUniversalSegmentation:
    """A model of the hub or of a folder, its class layer new if it knows other classes; without a name a tiny one."""
    names = {"id2label": dict(enumerate(classes)), "label2id": {name: i for i, name in enumerate(classes)}}
    if name:
        return Mask2FormerForUniversalSegmentation.from_pretrained(
            name, **names, ignore_mismatched_sizes=True, use_safetensors=True
        )
    backbone = SwinConfig(
        embed_dim=16, depths=[1, 1, 1, 1], num_heads=[1, 2, 2, 4], out_features=["stage1", "stage2", "stage3", "stage4"]
    )
    small = {"feature_size": 64, "mask_feature_size": 64, "hidden_dim": 64, "num_queries": 50, "train_num_points": 2048}
    layers = {"encoder_layers": 2, "decoder_layers": 4, "encoder_feedforward_dim": 128, "dim_feedforward": 128}
    return Mask2FormerForUniversalSegmentation(Mask2FormerConfig(backbone_config=backbone, **small, **layers, **names))


def main(arguments: list[str] | None = None) -> list[dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a name on the hub or a folder")
    parser.add_argument("--annotations", type=Path, help="a COCO json; without it, scenes are drawn")
    parser.add_argument("--images", type=Path, help="the folder of its images")
    parser.add_argument("--out", type=Path, default=Path("runs/hf"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--scenes", type=int, default=2, help="of a step; each is joined by its view")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args(arguments)

    torch.manual_seed(0)
    if args.annotations is None:
        drawn = make_scenes(args.out / "scenes", ScenesConfig(train_images=100, val_images=1, size=96))
        args.annotations, args.images = drawn.annotations("train"), drawn.images("train")
    data = CocoData(args.annotations, args.images)
    batches = StepBatchSampler(len(data), args.scenes, seed=0, last_step=args.steps)
    loader = DataLoader(TrainingSamples(data, augmentations=[], seed=0), batch_sampler=batches, collate_fn=collate)

    model = load(args.model, data.classes)
    segmenter = HFMask2Former(model, num_classes=len(data.classes))
    objective = UniqueQuerying(
        segmenter,
        inter=InterSceneSettings(capacity=100_000),  # queries stay off the instances of other images, Eq. 5
        equivariance=EquivarianceSettings(weight=3.0),  # and follow flips and crops, Eq. 8
    )
    objective.to(args.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
    history = []
    for step, batch in enumerate(raise_errors(loader)):
        batch = batch.to(torch.device(args.device))
        losses = objective(batch.images, batch.targets)
        optimizer.zero_grad()
        sum(losses.values()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)  # as Mask2Former was trained
        optimizer.step()
        history.append({name: loss.item() for name, loss in losses.items()})
        if step % 10 == 0:
            print(f"step {step:4d}  " + "  ".join(f"{name} {value:.3f}" for name, value in history[-1].items()))

    model.save_pretrained(args.out / "model")  # an ordinary folder of Hugging Face's
    print(f"saved to {args.out / 'model'}")
    return history


if __name__ == "__main__":
    main()
