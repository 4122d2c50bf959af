"""The training objective: one module, one forward, named losses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor, nn

from uniquery.parallel import all_gather_rows, get_rank
from uniquery.querying.contract import QueriesT, Segmenter
from uniquery.querying.equivariance import EquivarianceLoss, feature_equivariance, view_of
from uniquery.querying.inter_scene import InterSceneLoss, PairLoss
from uniquery.querying.keyed_random import keyed_generator
from uniquery.querying.memory import PixelMemory, StoredPixels
from uniquery.querying.sampling import Sampler, instance_balanced, sample_pixels
from uniquery.querying.transforms import Transform, TransformGroup
from uniquery.structures import Images, Queries, Targets, index_in_batch

_WATCHED_QUERIES, _WATCHED_PIXELS = 64, 2048
_VIEWS, _PIXELS, _NEGATIVES, _QUERIES, _KEPT = range(5)  # what random numbers are for

Phase = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class InterScene:
    """Settings of the inter-scene part.

    Attributes:
        weight: of L_inter.
        ramp_steps: training forwards over which the weight grows from 0.
        loss: of a (query, pixel) pair.
        sampler: which pixels of an image enter the memory.
        capacity: of the memory, in pixels; 0 uses the other images of the same forward.
        dtype: of the stored embeddings.
        negatives_per_step: read a random part of the memory; None reads all.
        max_queries: cap on the queries of a decoder layer that take part; None takes all.
        queries: "matched" leaves out those that own no instance; only set prediction has such.
        layers: "all" takes the queries of every decoder layer, where there are several.
        gather: with several processes, every memory gets the pixels of all; False keeps a memory per process.
    """

    weight: float = 1.0
    ramp_steps: int = 0
    loss: PairLoss = field(default_factory=PairLoss)
    sampler: Sampler = field(default_factory=instance_balanced)
    capacity: int = 100_000
    dtype: Literal["float32", "bfloat16"] = "float32"
    negatives_per_step: int | None = None
    max_queries: int | None = None
    queries: Literal["all", "matched"] = "all"
    layers: Literal["last", "all"] = "last"
    gather: bool = True

    def __post_init__(self) -> None:
        if self.weight < 0 or self.ramp_steps < 0:
            raise ValueError("weight and ramp_steps must not be negative")
        if any(count is not None and count < 1 for count in (self.negatives_per_step, self.max_queries)):
            raise ValueError("negatives_per_step and max_queries must be at least 1, or None for all")
        if self.queries not in ("all", "matched") or self.layers not in ("last", "all"):
            raise ValueError("queries must be 'all' or 'matched', and layers 'last' or 'all'")


@dataclass(frozen=True)
class Equivariance:
    """Settings of the equivariance part.

    Attributes:
        weight: λ.
        group: the random policy G.
        views: "paired": each image comes with its view and the base loss is the mean of both's; "extra": views serve
            L_equi only.
        target: "masks" is Eq. 8, "features" Eq. 6. λ = 0 with paired views leaves plain augmentation, Eq. 7.
    """

    weight: float = 3.0
    group: TransformGroup = field(default_factory=TransformGroup)
    views: Literal["paired", "extra"] = "paired"
    target: Literal["masks", "features"] = "masks"

    def __post_init__(self) -> None:
        if self.weight < 0:
            raise ValueError("λ must not be negative")
        if self.views not in ("paired", "extra") or self.target not in ("masks", "features"):
            raise ValueError("views must be 'paired' or 'extra', and target 'masks' or 'features'")
        if self.views == "extra" and not self.weight:
            raise ValueError("λ = 0 leaves extra views without a use: take paired ones, or leave equivariance out")


@dataclass(frozen=True)
class _Pass:
    """What one forward gave, and which of its queries owns what."""

    outputs: Any
    targets: Sequence[Targets]
    assignment: Any


class UniqueQuerying(nn.Module):
    """L_base(I) + w · L_inter + λ · L_equi. With both parts left out it is the segmenter's own objective (Eq. 3).

    It adds no parameter: the segmenter inside keeps its names and its inference.

    Args:
        segmenter: what is trained.
        inter: the inter-scene part.
        equivariance: the equivariance part.
        seed: of what the two parts draw; the segmenter draws from torch's global generator.
    """

    def __init__(
        self,
        segmenter: Segmenter[Any, Any, Any],
        inter: InterScene | None = None,
        equivariance: Equivariance | None = None,
        *,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.segmenter = segmenter
        self.inter, self.equivariance = inter, equivariance
        self.memory = PixelMemory(inter.capacity, inter.dtype) if inter else PixelMemory(0)
        self.inter_loss = InterSceneLoss(
            inter.loss if inter else PairLoss(), dot_product_scale=segmenter.dot_product_scale
        )
        self.steps, self.seed = 0, seed
        self._last: tuple[Any, Tensor] | None = None  # queries and image ids of the last step, for `watch`

    def forward(
        self, images: Images, targets: Sequence[Targets], phase: Phase = lambda _: nullcontext()
    ) -> dict[str, Tensor]:
        """Weighted losses by name; `phase` is told which part of the work begins."""
        original = self._queried(images, targets, phase)
        supervised = [original]
        if self.equivariance:
            with phase("forward"):
                each = self._generators(_VIEWS, targets, "cpu")
                transforms = self.equivariance.group.draw(images.sizes, self._generator(_VIEWS), each)
                views = view_of(images, targets, transforms)
            view = self._queried(*views, phase)
            if self.equivariance.views == "paired":
                supervised.append(view)
        with phase("loss"):
            losses = _mean([self.segmenter.losses(p.outputs, p.targets, p.assignment) for p in supervised])
            if self.inter:
                losses["loss_inter"] = self._inter_scene(self.inter, supervised)
            if self.equivariance and self.equivariance.weight:
                losses["loss_equi"] = self._equivariance(self.equivariance, original, view, transforms)
        self.steps += self.training
        return losses

    def _queried(self, images: Images, targets: Sequence[Targets], phase: Phase) -> _Pass:
        with phase("forward"):
            outputs = self.segmenter(images)
        with phase("assign"):
            return _Pass(outputs, targets, self.segmenter.assign(outputs, targets))

    def _inter_scene(self, settings: InterScene, passes: Sequence[_Pass]) -> Tensor:
        """Eq. 5: push this step's pixels, then query the memory, each query without its own image."""
        targets = [target for one in passes for target in one.targets]
        if self.training:
            self.memory.push(self._sampled(settings, passes))
        stored = self._negatives(settings)
        layers = zip(*(self._layers(settings, one) for one in passes), strict=True)
        losses = [self._of_layer(settings, _joined(of_passes, passes), targets, stored) for of_passes in layers]
        ramp = min(1.0, (self.steps + 1) / settings.ramp_steps) if settings.ramp_steps else 1.0
        return settings.weight * ramp * torch.stack(losses).mean()

    def _layers(self, settings: InterScene, one: _Pass) -> Sequence[Any]:
        if settings.layers == "all":
            return self.segmenter.layer_queries(one.outputs, one.assignment)
        return [self.segmenter.queries(one.outputs, one.assignment)]

    def _sampled(self, settings: InterScene, passes: Sequence[_Pass]) -> StoredPixels:
        parts = []
        for which, one in enumerate(passes):
            pixels = one.outputs.pixels
            generators = self._generators(_PIXELS, one.targets, pixels.embeddings.device, which)
            parts.append(sample_pixels(pixels, one.targets, settings.sampler, generators))
        sampled = StoredPixels.cat(parts)
        if settings.gather:
            names = [f.name for f in fields(sampled)]
            sampled = StoredPixels(*all_gather_rows([getattr(sampled, name) for name in names]))
        # The same order in memory, and so the same random part of it, whichever process saw an image.
        sampled = sampled[sampled.image_ids.argsort(stable=True)]
        if 0 < settings.capacity < len(sampled):
            kept = self._some(len(sampled), settings.capacity, _KEPT)
            sampled = sampled[kept.to(sampled.image_ids.device)]
        return sampled

    def _of_layer(
        self, settings: InterScene, queries: Any, targets: Sequence[Targets], stored: StoredPixels | None
    ) -> Tensor:
        if settings.queries == "matched":
            queries = _matched(queries)
        if settings.max_queries and len(queries) > settings.max_queries:
            some = self._some(len(queries), settings.max_queries, _QUERIES, get_rank())
            queries = queries[some.to(queries.image.device)]
        ids = torch.tensor([t.image_id for t in targets], device=queries.image.device)[queries.image]
        self._last = queries.detach(), ids
        loss: Tensor = self.inter_loss(queries, ids, stored, self.segmenter.similarity, _stuff_labels(queries, targets))
        return loss

    def _negatives(self, settings: InterScene) -> StoredPixels | None:
        stored = self.memory.read()
        if stored is None or settings.negatives_per_step is None or len(stored) <= settings.negatives_per_step:
            return stored
        some = self._some(len(stored), settings.negatives_per_step, _NEGATIVES)
        return stored[some.to(stored.image_ids.device)]

    def _some(self, total: int, count: int, *key: int) -> Tensor:
        return torch.randperm(total, generator=self._generator(*key))[:count]

    def _generator(self, *key: int, device: torch.device | str = "cpu") -> torch.Generator:
        return keyed_generator(self.seed, self.steps, *key, device=device)

    def _generators(
        self, purpose: int, targets: Sequence[Targets], device: torch.device | str, which: int = 0
    ) -> list[torch.Generator]:
        """One for each image; it differs where an image comes twice, and for its view."""
        seen: Counter[int] = Counter()
        generators = []
        for target in targets:
            key = (purpose, target.image_id, seen[target.image_id], which)
            generators.append(self._generator(*key, device=device))
            seen[target.image_id] += 1
        return generators

    def _equivariance(
        self, settings: Equivariance, original: _Pass, view: _Pass, transforms: Sequence[Transform]
    ) -> Tensor:
        """Eq. 8 or 6."""
        pixels = original.outputs.pixels
        if settings.target == "features":
            return settings.weight * feature_equivariance(view.outputs.pixels, pixels, transforms)
        queries = _matched(self.segmenter.queries(view.outputs, view.assignment))
        loss = EquivarianceLoss(self.segmenter.decode, self.segmenter.mask_loss)
        return settings.weight * loss(queries, view.targets, pixels, transforms)

    @torch.no_grad()
    def watch(self) -> dict[str, float]:
        """How full and how old the memory is, and how strongly the owners of the last step fire on a part of it."""
        stored = self.memory.read()
        if self._last is None or stored is None or not len(stored):
            return {}
        queries, ids = self._last
        owners = (queries.target >= 0).nonzero().flatten()
        some = owners[:: max(1, len(owners) // _WATCHED_QUERIES)]
        seen = stored[:: max(1, len(stored) // _WATCHED_PIXELS)]
        seen = replace(seen, embeddings=seen.embeddings.float())
        fired = self.segmenter.similarity(queries[some], seen).sigmoid()[seen.of_other_images(ids[some])]
        return {
            "memory_fill": float(len(self.memory)),
            "memory_age": self.memory.mean_age(),
            "cross_scene_response": fired.mean().item() if len(fired) else 0.0,
            "hard_negatives": (fired > 0.5).float().mean().item() if len(fired) else 0.0,
        }

    def algorithm_state(self) -> dict[str, Tensor]:
        """What the algorithm remembers beside the segmenter's weights, for a checkpoint of training."""
        return {"steps": torch.tensor(self.steps), **{f"memory/{k}": v for k, v in self.memory.state_dict().items()}}

    def load_algorithm_state(self, state: Mapping[str, Tensor], device: torch.device | str = "cpu") -> None:
        """The inverse."""
        self.steps = int(state["steps"])
        memory = {k.removeprefix("memory/"): v for k, v in state.items() if k.startswith("memory/")}
        self.memory.load_state_dict(memory, device)


def _matched(queries: QueriesT) -> QueriesT:
    return queries[queries.target >= 0]


def _stuff_labels(queries: Queries, targets: Sequence[Targets]) -> Tensor | None:
    """(Q,) class of the stuff that each query owns, −1 for the others; None where there is no stuff at all."""
    if all(t.things is None for t in targets):
        return None
    labels = [
        torch.full_like(t.labels, -1) if t.things is None else t.labels.masked_fill(t.things, -1) for t in targets
    ]
    nobody = labels[0].new_full((1,), -1)  # what an unmatched query owns
    index = torch.where(queries.target >= 0, index_in_batch(targets, queries.image, queries.target), -1)
    return torch.cat([*labels, nobody])[index]


def _joined(queries: Sequence[QueriesT], passes: Sequence[_Pass]) -> QueriesT:
    """The queries of all passes, as if their images were one batch."""
    if len(queries) == 1:
        return queries[0]
    starts = accumulate((len(one.targets) for one in passes), initial=0)
    return queries[0].cat([replace(q, image=q.image + start) for q, start in zip(queries, starts, strict=False)])


def _mean(losses: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([one[name] for one in losses]).mean() for name in losses[0]}
