"""The training objective: one module, one forward, named losses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from uniquery.parallel import all_gather_rows, get_rank
from uniquery.querying.contract import QueriesT, Segmenter
from uniquery.querying.equivariance import EquivarianceLoss, EquivarianceSettings, feature_equivariance, view_of
from uniquery.querying.inter_scene import InterSceneLoss, InterSceneSettings
from uniquery.querying.keyed_random import keyed_generator
from uniquery.querying.memory import InstancePixels, PixelMemory
from uniquery.querying.sampling import sample_pixels
from uniquery.querying.transforms import Transform
from uniquery.structures import Images, Queries, Targets, index_in_batch

_LOGGED_QUERIES, _LOGGED_PIXELS = 64, 2048
_VIEWS, _PIXELS, _NEGATIVES, _QUERIES, _KEPT = range(5)  # keys of random numbers: what they are drawn for

Phase = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class _Pass:
    """Outputs of one forward pass, its targets, and which query owns which of them."""

    outputs: Any
    targets: Sequence[Targets]
    assignment: Any


class UniqueQuerying(nn.Module):
    """L_base(I) + w · L_inter + λ · L_equi. With both parts left out it is the segmenter's own objective (Eq. 3).

    It adds no parameter: the segmenter inside keeps its parameter names and its inference.

    Args:
        segmenter: the model to train.
        inter: settings of the inter-scene part; None: off.
        equivariance: settings of the equivariance part; None: off.
        seed: seed of random views, pixels, queries and negatives; the segmenter uses torch's global generator.
        mirrored: (C,) the label that each class has in a flipped view; None: the same.
    """

    def __init__(
        self,
        segmenter: Segmenter[Any, Any, Any],
        inter: InterSceneSettings | None = None,
        equivariance: EquivarianceSettings | None = None,
        *,
        seed: int = 0,
        mirrored: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.segmenter = segmenter
        self.inter, self.equivariance = inter, equivariance
        self.memory = PixelMemory(inter.capacity, inter.dtype) if inter else PixelMemory(0)
        self.inter_loss = InterSceneLoss(inter.loss if inter else None, dot_product_scale=segmenter.dot_product_scale)
        self.mirrored = mirrored
        self.forwards, self.seed = 0, seed  # forwards: training forwards so far
        self._last_queries: tuple[Any, Tensor] | None = None  # with their image ids, for `statistics`

    def forward(
        self, images: Images, targets: Sequence[Targets], phase: Phase = lambda _: nullcontext()
    ) -> dict[str, Tensor]:
        """Weighted losses by name; `phase` is entered with the name of each phase, for timing."""
        original = self._forward_and_assign(images, targets, phase)
        supervised = [original]
        if self.equivariance:
            with phase("forward"):
                image_generators = self._image_generators(_VIEWS, targets, "cpu")
                transforms = self.equivariance.draw(images.sizes, self._generator(_VIEWS), image_generators)
                views = view_of(images, targets, transforms, self.mirrored)
            view = self._forward_and_assign(*views, phase)
            if self.equivariance.views == "paired":
                supervised.append(view)
        with phase("loss"):
            losses = _mean([self.segmenter.losses(p.outputs, p.targets, p.assignment) for p in supervised])
            if self.inter:
                losses["loss_inter"] = self._inter_scene(self.inter, supervised)
            if self.equivariance and self.equivariance.weight:
                losses["loss_equi"] = self._equivariance(self.equivariance, original, view, transforms)
        self.forwards += self.training
        return losses

    def _forward_and_assign(self, images: Images, targets: Sequence[Targets], phase: Phase) -> _Pass:
        with phase("forward"):
            outputs = self.segmenter(images)
        with phase("assign"):
            return _Pass(outputs, targets, self.segmenter.assign(outputs, targets))

    def _inter_scene(self, settings: InterSceneSettings, passes: Sequence[_Pass]) -> Tensor:
        """Eq. 5: push this step's pixels, then query the memory; pixels of a query's own image are left out."""
        targets = [target for one_pass in passes for target in one_pass.targets]
        if self.training:
            self.memory.push(self._sampled_pixels(settings, passes))
        stored = self._negatives(settings)
        layers = zip(*(self._layer_queries(settings, one_pass) for one_pass in passes), strict=True)
        losses = [self._layer_loss(settings, _concatenated(queries, passes), targets, stored) for queries in layers]
        ramp = min(1.0, (self.forwards + 1) / settings.ramp_steps) if settings.ramp_steps else 1.0
        return settings.weight * ramp * torch.stack(losses).mean()

    def _layer_queries(self, settings: InterSceneSettings, one_pass: _Pass) -> Sequence[Any]:
        if settings.layers == "all":
            return self.segmenter.layer_queries(one_pass.outputs, one_pass.assignment)
        return [self.segmenter.queries(one_pass.outputs, one_pass.assignment)]

    def _sampled_pixels(self, settings: InterSceneSettings, passes: Sequence[_Pass]) -> InstancePixels:
        per_pass = []
        for index, one_pass in enumerate(passes):
            pixels = one_pass.outputs.pixels
            generators = self._image_generators(_PIXELS, one_pass.targets, pixels.embeddings.device, index)
            per_pass.append(sample_pixels(pixels, one_pass.targets, settings.sampling, generators))
        sampled = InstancePixels.cat(per_pass)
        if settings.gather:
            names = [f.name for f in fields(sampled)]
            sampled = InstancePixels(*all_gather_rows([getattr(sampled, name) for name in names]))
        # The same order in memory, and so the same random part of it, independent of which process loaded an image.
        sampled = sampled[sampled.image_ids.argsort(stable=True)]
        if 0 < settings.capacity < len(sampled):
            kept = self._random_indices(len(sampled), settings.capacity, _KEPT)
            sampled = sampled[kept.to(sampled.image_ids.device)]
        return sampled

    def _layer_loss(
        self, settings: InterSceneSettings, queries: Any, targets: Sequence[Targets], stored: InstancePixels | None
    ) -> Tensor:
        if settings.queries == "matched":
            queries = _matched(queries)
        if settings.max_queries and len(queries) > settings.max_queries:
            kept = self._random_indices(len(queries), settings.max_queries, _QUERIES, get_rank())
            queries = queries[kept.to(queries.image.device)]
        ids = torch.tensor([t.image_id for t in targets], device=queries.image.device)[queries.image]
        self._last_queries = queries.detach(), ids
        loss: Tensor = self.inter_loss(queries, ids, stored, self.segmenter.similarity, _stuff_labels(queries, targets))
        return loss

    def _negatives(self, settings: InterSceneSettings) -> InstancePixels | None:
        stored = self.memory.read()
        if stored is None or settings.negatives_per_step is None or len(stored) <= settings.negatives_per_step:
            return stored
        kept = self._random_indices(len(stored), settings.negatives_per_step, _NEGATIVES)
        return stored[kept.to(stored.image_ids.device)]

    def _random_indices(self, total: int, count: int, *key: int) -> Tensor:
        return torch.randperm(total, generator=self._generator(*key))[:count]

    def _generator(self, *key: int, device: torch.device | str = "cpu") -> torch.Generator:
        return keyed_generator(self.seed, self.forwards, *key, device=device)

    def _image_generators(
        self, purpose: int, targets: Sequence[Targets], device: torch.device | str, pass_index: int = 0
    ) -> list[torch.Generator]:
        """A generator for each image; different keys for repeated images and for views."""
        occurrences: Counter[int] = Counter()
        generators = []
        for target in targets:
            key = (purpose, target.image_id, occurrences[target.image_id], pass_index)
            generators.append(self._generator(*key, device=device))
            occurrences[target.image_id] += 1
        return generators

    def _equivariance(
        self, settings: EquivarianceSettings, original: _Pass, view: _Pass, transforms: Sequence[Transform]
    ) -> Tensor:
        """Eq. 8 or 6."""
        pixels = original.outputs.pixels
        if settings.target == "features":
            return settings.weight * feature_equivariance(view.outputs.pixels, pixels, transforms)
        queries = _matched(self.segmenter.queries(view.outputs, view.assignment))
        loss = EquivarianceLoss(self.segmenter.decode, self.segmenter.mask_loss)
        return settings.weight * loss(queries, view.targets, pixels, transforms)

    @torch.no_grad()
    def statistics(self) -> dict[str, float]:
        """For the log: fill and age of the memory, and how strongly matched queries of the last step fire on it.

        If the response to stored pixels falls and `fresh_response`, that to pixels of the same step, does not, then
        queries and features have moved away from old embeddings together, and queries are no more unique than before.
        """
        stored, newest = self.memory.read(), self.memory.newest()
        if self._last_queries is None or stored is None or newest is None or not len(stored):
            return {}
        response, fresh = self._responses(stored), self._responses(newest)
        return {
            "memory_fill": float(len(self.memory)),
            "memory_age": self.memory.mean_age(),
            "cross_scene_response": response.mean().item() if len(response) else 0.0,
            "fresh_response": fresh.mean().item() if len(fresh) else 0.0,
            "hard_negatives": (response > 0.5).float().mean().item() if len(response) else 0.0,
        }

    def _responses(self, pixels: InstancePixels) -> Tensor:
        """(n,) probabilities of matched queries of the last step on pixels of other images, of some of both."""
        assert self._last_queries is not None
        queries, ids = self._last_queries
        matched = (queries.target >= 0).nonzero().flatten()
        matched = matched[:: max(1, len(matched) // _LOGGED_QUERIES)]
        pixels = pixels[:: max(1, len(pixels) // _LOGGED_PIXELS)]
        pixels = replace(pixels, embeddings=pixels.embeddings.float())
        logits: Tensor = self.segmenter.similarity(queries[matched], pixels)
        return logits.sigmoid()[pixels.of_other_images(ids[matched])]

    def algorithm_state(self) -> dict[str, Tensor]:
        """State of the method besides the segmenter's weights, for a training checkpoint."""
        return {
            "forwards": torch.tensor(self.forwards),
            **{f"memory/{k}": v for k, v in self.memory.state_dict().items()},
        }

    def load_algorithm_state(self, state: Mapping[str, Tensor], device: torch.device | str = "cpu") -> None:
        """Restores what `algorithm_state` returned."""
        self.forwards = int(state["forwards"])
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
    unmatched = labels[0].new_full((1,), -1)
    index = torch.where(queries.target >= 0, index_in_batch(targets, queries.image, queries.target), -1)
    return torch.cat([*labels, unmatched])[index]


def _concatenated(queries: Sequence[QueriesT], passes: Sequence[_Pass]) -> QueriesT:
    """The queries of all passes, as if their images were one batch."""
    if len(queries) == 1:
        return queries[0]
    starts = accumulate((len(one_pass.targets) for one_pass in passes), initial=0)
    return queries[0].cat([replace(q, image=q.image + start) for q, start in zip(queries, starts, strict=False)])


def _mean(losses: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of each loss over the passes."""
    return {name: torch.stack([pass_losses[name] for pass_losses in losses]).mean() for name in losses[0]}
