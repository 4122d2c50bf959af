"""The paper's recipes start: the full model of each trains two steps and is evaluated, on small drawn images."""

from contextlib import closing

import pytest
import torch
from torch import nn

from uniquery.data.dataset import is_panoptic
from uniquery.data.scenes import ScenesConfig
from uniquery.evaluation import evaluate
from uniquery.evaluation.inference import predict_dataset
from uniquery.evaluation.panoptic import evaluate_panoptic, predict_panoptic_dataset
from uniquery.paper import config_name, read_paper
from uniquery.paper.forecast import drawn_data
from uniquery.training.batches import load_splits, training_batches
from uniquery.training.config import load_config
from uniquery.training.phase_clock import PhaseClock
from uniquery.training.run import build_run
from uniquery.training.step import compute_gradients, update_weights

SIZE = 128
# Only the sizes of images and batch, the length and the weights differ from the recipe, never the model. The run is
# long enough for the recipe's warm-up: without it, the first update of random weights by SGD would be too large.
CHANGES = [
    "backbone.weights=random",
    "data.augment=[{op: flip}, {op: scale_jitter, range: [0.9, 1.1], size: 128}]",
    "data.test_size={short: 128, longest: 128}",
    "data.workers=0",
    "train.batch_size=2",
    "train.steps=10000",
    "train.device=cpu",
]
# The heads of SOLOv2 and SOTR work on grids that do not shrink with the image: they are among the slow tests.
FAST = [
    "table1/condinst-r50",
    "table1/condinst-r50-ours",
    "segmenters/sparseinst-r50",
    "segmenters/sparseinst-r50-ours",
    "segmenters/solq-r50-ours",
    "table1/mask2former-swin-s-ours",
]
ROWS = [f"{table}/{row.row}" for table, content in read_paper().tables.items() for row in content.rows if row.row]


def start(name: str) -> None:
    """Two steps and an evaluation."""
    table, row = name.split("/")
    classes = read_paper().data[read_paper().table(table).data].classes
    scenes = ScenesConfig(train_images=4, val_images=2, size=SIZE, crowding=4)
    with drawn_data(load_config(config_name(table, row), CHANGES), classes, scenes) as config:
        torch.manual_seed(0)
        data, val = load_splits(config)
        run, clock = build_run(config, data, pretrained=False), PhaseClock(torch.device("cpu"))
        assert len(run.info.categories) == classes
        damp(run.model.backbone)
        with closing(training_batches(run, data, steps=(0, 2))) as batches:
            for _ in range(2):
                result = compute_gradients(run, batches, clock)
                assert result.is_finite(), {key: float(loss) for key, loss in result.losses.items()}
                update_weights(run, result.grad_norm, clock)
                run.step += 1
        assert ("loss_inter" in result.losses) == (config.querying.inter is not None)
        assert ("loss_equi" in result.losses) == bool(
            config.querying.equivariance and config.querying.equivariance.weight
        )
        assert val is not None
        if is_panoptic(val.categories):
            segments = predict_panoptic_dataset(run.model, val, run.info.categories, config.data.test_size)
            assert "PQ_st" in evaluate_panoptic(val.ground_truth(), segments).values
        else:
            (results,) = predict_dataset(run.model, val, data.classes, config.data.test_size).values()
            metrics = evaluate(val.ground_truth(), results, protocol=config.eval.protocol).values
            assert ("APr" in metrics) == (table == "table2")


def damp(backbone: nn.Module) -> None:
    """Random weights behind frozen norm layers grow from block to block; after 33 blocks gradients are not finite."""
    for name, module in backbone.named_modules():
        if name.endswith("conv3"):
            module.norm.weight.fill_(0.2)


@pytest.mark.parametrize("name", FAST)
def test_the_full_model_starts(name):
    start(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [row for row in ROWS if row not in FAST])
def test_every_other_row_starts(name):
    start(name)
