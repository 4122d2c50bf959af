"""What a run will need, from a few steps on this machine: its memory and its time. Nothing is written."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import cycle, islice, repeat
from typing import Any

import torch
from torch import Tensor

from uniquery.data.batch import Batch, EvaluationSamples, LoadedSample, TrainingSamples, collate
from uniquery.data.dataset import Dataset, is_panoptic
from uniquery.data.sampling import images_per_epoch
from uniquery.errors import DataError
from uniquery.evaluation.inference import forward_passes
from uniquery.parallel import choose_device, get_world_size, keep_freed_memory
from uniquery.querying.memory import PixelMemory
from uniquery.training.batches import load_splits, training_batches, training_samples
from uniquery.training.config import Config
from uniquery.training.distributed import process_group
from uniquery.training.memory_use import available_memory, limited_to_available, peak_memory, reset_peak_memory
from uniquery.training.out_of_memory import describe_batch, explain_out_of_memory
from uniquery.training.phase_clock import PhaseClock
from uniquery.training.resume import Resume, should_resume
from uniquery.training.run import TrainingRun, build_run, count_steps, images_per_step
from uniquery.training.step import compute_gradients, update_weights
from uniquery.weights.model_file import load_matching_weights

_TIMED_STEPS = 2
_DRAWS = 4  # random augmentations of each image, of which the largest is taken
_EVALUATED_IMAGES = 4  # of the most crowded, and of the largest
_SCORE_THRESHOLDS = ("score_threshold", "final_threshold", "object_threshold")


@dataclass(frozen=True)
class Measurement:
    """What some steps and predictions took.

    Attributes:
        device: where they ran.
        processes: how many processes ran them together.
        batches: the hardest batches, as text, by why they are hard.
        step_seconds: of an ordinary step.
        image_seconds: of the prediction of an image; None without validation data.
        peak_memory: bytes, of one process, data workers not included.
        available_memory: bytes that the process could have used; None if the system does not say.
    """

    device: torch.device
    processes: int
    batches: dict[str, str]
    step_seconds: float
    image_seconds: float | None
    peak_memory: int
    available_memory: int | None


@dataclass(frozen=True)
class Forecast:
    """How long a run will take, from a measurement.

    Attributes:
        measured: what it follows from.
        steps: of the run.
        evaluations: of the run.
        val_images: images of each evaluation.
    """

    measured: Measurement
    steps: int
    evaluations: int
    val_images: int

    @property
    def training_seconds(self) -> float:
        """Of all steps."""
        return self.steps * self.measured.step_seconds

    @property
    def evaluation_seconds(self) -> float:
        """Of all evaluations; the processes share the images."""
        images = math.ceil(self.val_images / self.measured.processes)
        return self.evaluations * images * (self.measured.image_seconds or 0.0)

    @property
    def seconds(self) -> float:
        """Of the whole run."""
        return self.training_seconds + self.evaluation_seconds


def dry_run(config: Config, *, resume: Resume = False) -> Forecast:
    """Loads the data, builds the model, and runs the hardest steps and predictions of a run; nothing is written.

    Args:
        config: the experiment.
        resume: as for `train`: without it, a folder that holds a run is an error.

    Raises:
        UserError: what would stop the run: configuration, data, weights or folder are wrong, or memory ran out.
    """
    device = choose_device(config.train.device)
    keep_freed_memory(device)
    with process_group(device):
        should_resume(config, resume)
        data, val = load_splits(config)
        measured = measure_config(config, data, val, pretrained=True)
        images = images_per_step(config)
    steps = count_steps(config.train, images_per_epoch(data, config.data.sampling), images)
    evaluations = count_evaluations(config, steps) if val is not None else 0
    return Forecast(measured, steps, evaluations, len(val) if val is not None else 0)


def measure_config(config: Config, data: Dataset, val: Dataset | None, *, pretrained: bool = False) -> Measurement:
    """Builds the model of an experiment and measures it on data.

    Args:
        config: the experiment.
        data: training data.
        val: validation data, if there is any.
        pretrained: whether to load the backbone's weights and `train.init_from`.
    """
    torch.manual_seed(config.seed)
    run = build_run(_with_all_detections(config), data, pretrained=pretrained)
    if pretrained and config.train.init_from:
        load_matching_weights(run.model, config.train.init_from)
    return measure(run, data, val)


def count_evaluations(config: Config, steps: int) -> int:
    """How often a run of so many steps is evaluated: every `train.eval_every` steps and at the end."""
    return math.ceil(steps / (config.train.eval_every or steps))


def seconds_per_step(config: Config) -> tuple[float, int]:
    """Seconds of an ordinary training step, and the number of steps of the run."""
    torch.manual_seed(config.seed)
    data, _ = load_splits(config)
    run = build_run(config, data, pretrained=False)
    clock = PhaseClock(run.device)
    with closing(training_batches(run, data, steps=(0, 1), workers=0)) as batches:
        _step(run, batches, clock)  # the first step is slower
    fill_memory(run.objective.memory)
    return _ordinary_seconds(run, data, clock), run.steps


def measure(run: TrainingRun, data: Dataset, val: Dataset | None) -> Measurement:
    """Runs steps and predictions on the images that need most memory, and ordinary steps for their time.

    Raises:
        UserError: memory ran out, or an image cannot be read.
    """
    clock, device, config = PhaseClock(run.device), run.device, run.config
    reset_peak_memory(device)
    available = available_memory(device)
    with limited_to_available(device), explain_out_of_memory(config, run.step, clock):
        samples = training_samples(run, data)
        scenes = config.train.batch_size // config.querying.forwards_per_image
        batches = {}
        for name, indices in hardest_images(data, scenes).items():
            clock.phase = "data"
            batch = _largest_batch(samples, list(islice(cycle(indices), scenes)))
            batches[name] = describe_batch(batch)
            _step(run, repeat(batch), clock)
            fill_memory(run.objective.memory)
        step_seconds = _ordinary_seconds(run, data, clock)
        clock.phase = "eval"
        image_seconds = _predict_hardest(run, val) if val is not None else None
    return Measurement(
        device=device,
        processes=get_world_size(),
        batches=batches,
        step_seconds=step_seconds,
        image_seconds=image_seconds,
        peak_memory=peak_memory(device),
        available_memory=available,
    )


def hardest_images(data: Dataset, count: int) -> dict[str, list[int]]:
    """Indices of at most `count` images of each kind: those with most instances, and the largest."""
    areas = data.sizes.prod(1)

    def most(values: Tensor) -> list[int]:
        return values.topk(min(count, len(data))).indices.tolist()

    return {"most crowded": most(data.instances_per_image()), "largest": most(areas)}


def fill_memory(memory: PixelMemory) -> None:
    """Fills the memory with copies of what it has, as of other images: so a step costs what it will cost later."""
    rows = memory.read()
    if rows is None or not len(rows) or not memory.capacity:
        return
    copies = rows[torch.arange(memory.capacity - len(rows), device=rows.image_ids.device) % len(rows)]
    memory.push(replace(copies, image_ids=-1 - copies.image_ids))


def _with_all_detections(config: Config) -> Config:
    """Without score thresholds: an untrained model would find nothing, and predictions would cost nothing."""
    thresholds = dict.fromkeys(set(_SCORE_THRESHOLDS) & set(type(config.model).model_fields), 0.0)
    return config.model_copy(update={"model": config.model.model_copy(update=thresholds)})


def _largest_batch(samples: TrainingSamples, indices: Sequence[int]) -> Batch:
    """A batch of these images, each with that of some random augmentations that gives it most pixels."""
    batch = collate([_largest_sample(samples, index) for index in indices])
    if isinstance(batch, DataError):
        raise batch
    return batch


def _largest_sample(samples: TrainingSamples, index: int) -> LoadedSample | DataError:
    drawn = [samples[epoch, index] for epoch in range(_DRAWS)]
    loaded = [one for one in drawn if isinstance(one, LoadedSample)]
    return max(loaded, key=lambda one: (math.prod(one.sample.size), len(one.sample.labels)), default=drawn[0])


def _step(run: TrainingRun, batches: Iterator[Batch], clock: PhaseClock) -> None:
    result = compute_gradients(run, batches, clock)
    update_weights(run, result.grad_norm, clock)


def _ordinary_seconds(run: TrainingRun, data: Dataset, clock: PhaseClock) -> float:
    """Mean seconds of the run's first steps; data workers load the next batch while a step computes."""
    clock.pop_means()
    count = min(_TIMED_STEPS, run.steps)
    with closing(training_batches(run, data, steps=(0, count), workers=0)) as batches:
        for _ in range(count):
            _step(run, batches, clock)
            clock.steps += 1
    means, workers = clock.pop_means(), run.config.data.workers
    loading = means.pop("data")
    computing = sum(means.values())
    return max(computing, loading / workers) if workers else computing + loading


def _predict_hardest(run: TrainingRun, val: Dataset) -> float:
    """Seconds per image of predictions on the most crowded and the largest images."""
    size, model = run.config.data.test_size, run.model
    samples = EvaluationSamples(val, size.short, size.longest)
    chosen = hardest_images(val, _EVALUATED_IMAGES).values()
    samples.indices = sorted({index for indices in chosen for index in indices})
    things = [bool(category.is_thing) for category in run.info.categories]
    start = time.perf_counter()
    with torch.inference_mode():
        for batch, outputs in forward_passes(model, samples, batch_size=run.config.eval.batch_size):
            predicted: Sequence[Any] = (
                model.predict_panoptic(outputs, batch.original_sizes, things)
                if is_panoptic(val.categories)
                else model.predict(outputs, batch.original_sizes)
            )
            del predicted
    return (time.perf_counter() - start) / len(samples)
