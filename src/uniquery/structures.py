"""The data structures of the project: frozen, typed, and indexable where they hold a set.

Letters: B images, K ground-truth instances of one image, N predictions of one image, Q queries, P pixels,
D channels of a pixel embedding, d channels of a query, H × W the padded batch, h × w a map.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from uniquery.errors import UserError
from uniquery.masks import rle

if TYPE_CHECKING:
    from uniquery.data.image_input import ImageInput


SIZE_DIVISIBILITY = 32
"""Images are padded to multiples of it, and crop windows lie on its grid: whole cells of every map up to stride 32."""


class _Moves:
    """`to` for a frozen dataclass: moves every tensor, and every structure inside."""

    def to(self, device: torch.device | str) -> Self:
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def detach(self) -> Self:
        return self._map(Tensor.detach)

    def pin_memory(self) -> Self:
        return self._map(Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Self:
        values = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        changed = {name: change(value) for name, value in values.items() if isinstance(value, Tensor)}
        inner = {name: value._map(change) for name, value in values.items() if isinstance(value, _Moves)}
        return replace(self, **changed, **inner)  # type: ignore[type-var]


class _Indexable(_Moves):
    """A set whose fields are all tensors: indexing filters each along its first axis, `cat` concatenates sets."""

    def __getitem__(self, index: Tensor | slice) -> Self:
        return self._map(lambda tensor: tensor[index])

    @classmethod
    def cat(cls, sets: Sequence[Self]) -> Self:
        """The concatenation of several sets, in order."""
        names = [f.name for f in fields(sets[0])]  # type: ignore[arg-type]
        return type(sets[0])(**{name: torch.cat([getattr(s, name) for s in sets]) for name in names})


@dataclass(frozen=True)
class Images(_Moves):
    """A batch of images, padded at the bottom and the right to multiples of 32.

    Attributes:
        pixels: (B, 3, H, W) RGB in 0..255, uint8 or float; the segmenter normalizes.
        sizes: the valid (height, width) of each image inside the padding.
    """

    pixels: Tensor
    sizes: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        return len(self.sizes)


@dataclass(frozen=True)
class Targets(_Moves):
    """Ground truth of one image: its K non-crowd instances.

    Attributes:
        labels: (K,) int64, contiguous from 0.
        boxes: (K, 4) float, x0 y0 x1 y1 in pixels, the far edge exclusive.
        masks: (K, H, W) bool, padded like the batch.
        image_id: the image's id in its data set.
        valid: (H, W) bool, false in ignore regions (crowds, void); None means valid everywhere.
        things: (K,) bool, false for stuff; None means that all are things.
        negative_classes: (M,) int64, the classes, besides those of the instances, whose absence is taught; None: all.
        not_exhaustive_classes: (M,) int64, classes of which some instances are not labeled; None: there is none.
    """

    labels: Tensor
    boxes: Tensor
    masks: Tensor
    image_id: int = -1
    valid: Tensor | None = None
    things: Tensor | None = None
    negative_classes: Tensor | None = None
    not_exhaustive_classes: Tensor | None = None

    def __getitem__(self, index: Tensor | slice) -> Targets:
        things = None if self.things is None else self.things[index]
        return replace(self, labels=self.labels[index], boxes=self.boxes[index], masks=self.masks[index], things=things)

    def __len__(self) -> int:
        return len(self.labels)

    def with_labels(self, labels: Tensor) -> Targets:
        """The same instances and classes with other labels: (C,) the new one of each."""
        labels = labels.to(self.labels.device)
        negative, partial = (
            None if classes is None else labels[classes]
            for classes in (self.negative_classes, self.not_exhaustive_classes)
        )
        return replace(self, labels=labels[self.labels], negative_classes=negative, not_exhaustive_classes=partial)


@dataclass(frozen=True)
class PixelMap(_Moves):
    """Dense pixel embeddings **I** = f(I).

    Attributes:
        embeddings: (B, D, h, w).
        stride: how many input pixels one cell spans.
    """

    embeddings: Tensor
    stride: int

    def locations(self) -> Tensor:
        """(h · w, 2): the x, y of each cell's center in input pixels, row by row."""
        height, width = self.embeddings.shape[-2:]
        return grid_locations(height, width, self.stride, self.embeddings.device)

    def of_image(self, index: int) -> Pixels:
        """All pixels of one image as a set."""
        return Pixels(self.embeddings[index].flatten(1).T, self.locations())


@dataclass(frozen=True)
class Pixels(_Indexable):
    """Any set of pixel embeddings.

    Attributes:
        embeddings: (P, D).
        locations: (P, 2) x, y in pixels of the image each came from.
    """

    embeddings: Tensor
    locations: Tensor

    def __len__(self) -> int:
        return len(self.embeddings)


@dataclass(frozen=True)
class Queries(_Indexable):
    """Q instance-aware embeddings q_n. A segmenter that needs more per query extends this class.

    Attributes:
        embeddings: (Q, d).
        image: (Q,) index in the batch of the image each query was made from.
        target: (Q,) index in that image's `Targets` of the instance it owns (is matched or assigned to), −1 for none.
    """

    embeddings: Tensor
    image: Tensor
    target: Tensor

    def __len__(self) -> int:
        return len(self.embeddings)


@dataclass(frozen=True)
class Assignment(_Indexable):
    """σ: which query owns which instance. A segmenter that derives more from it extends this class.

    Attributes:
        query: (Q,) index of the query in the order of the segmenter.
        image: (Q,) index in the batch.
        target: (Q,) index in that image's `Targets`.
        has_query: (Q,) bool, whether the pair's query decodes a mask in this step, by default all; a segmenter's
            `max_queries` caps how many do.
    """

    query: Tensor
    image: Tensor
    target: Tensor
    has_query: Tensor = field(default=None, kw_only=True)  # type: ignore[assignment]  # replaced below

    def __post_init__(self) -> None:
        if self.has_query is None:
            object.__setattr__(self, "has_query", torch.ones_like(self.query, dtype=torch.bool))

    def __len__(self) -> int:
        return len(self.query)


@dataclass(frozen=True)
class Outputs(_Moves):
    """What one forward gives. Each segmenter adds its own fields; the method needs `pixels` only."""

    pixels: PixelMap


@dataclass(frozen=True)
class Instances:
    """Predictions of one image, best first, at the size of the image.

    Masks are kept run-length encoded: a hundred masks of a large image take kilobytes instead of gigabytes.
    Indexing by a number, a slice, a bool mask or a tensor of indices gives `Instances` again, and iterating gives one
    instance at a time.

    Attributes:
        scores: (N,) in 0..1.
        labels: (N,) int64, contiguous from 0.
        boxes: (N, 4) x0 y0 x1 y1 in pixels.
        rles: N compressed COCO run-length masks.
        size: (height, width) of the masks.
        classes: the class name of each label, if known.
        category_ids: the COCO category id of each label, if known.

    >>> mask = rle.encode(np.eye(2, dtype=np.uint8))
    >>> boxes = torch.tensor([[0.0, 0.0, 2.0, 2.0]])
    >>> dog = Instances(torch.tensor([0.5]), torch.tensor([1]), boxes, [mask], (2, 2), classes=("cat", "dog"))
    >>> dog.names, dog.masks.shape, dog.to_coco(image_id=7, category_ids=[17, 18])[0]["category_id"]
    (['dog'], torch.Size([1, 2, 2]), 18)
    """

    scores: Tensor
    labels: Tensor
    boxes: Tensor
    rles: Sequence[dict[str, Any]]
    size: tuple[int, int]
    classes: tuple[str, ...] | None = None
    category_ids: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.scores)

    def __getitem__(self, index: int | slice | Tensor) -> Instances:
        kept = torch.arange(len(self), device=self.scores.device)[index].reshape(-1)
        return replace(
            self,
            scores=self.scores[kept],
            labels=self.labels[kept],
            boxes=self.boxes[kept],
            rles=[self.rles[i] for i in kept.tolist()],
        )

    def __iter__(self) -> Iterator[Instances]:
        return (self[i] for i in range(len(self)))

    @property
    def masks(self) -> Tensor:
        """(N, H, W) bool, decoded on each access."""
        if not len(self):
            return torch.zeros(0, *self.size, dtype=torch.bool)
        return torch.stack([torch.from_numpy(rle.decode(mask)).bool() for mask in self.rles])

    @property
    def names(self) -> list[str]:
        """N class names; the labels as text if `classes` is not known.

        Raises:
            UserError: `classes` has no name for a label.
        """
        labels = self.labels.tolist()
        if self.classes is None:
            return [str(label) for label in labels]
        if labels and max(labels) >= len(self.classes):
            raise UserError(f"classes has {len(self.classes)} names, but an instance has the label {max(labels)}.")
        return [self.classes[label] for label in labels]

    def to_coco(self, image_id: int, category_ids: Sequence[int | None] | None = None) -> list[dict[str, Any]]:
        """COCO results: one dict for each instance, ready for json.

        Args:
            image_id: the id of the image in its data set.
            category_ids: label → category id, by default `self.category_ids`; None leaves out a class that the data
                set does not have.

        Raises:
            UserError: neither is given.
        """
        ids = self.category_ids if category_ids is None else category_ids
        if ids is None:
            raise UserError("to_coco() needs category_ids, the COCO category id of each label.")
        boxes = self.boxes.clone()
        boxes[:, 2:] -= boxes[:, :2]
        rows = zip(self.labels.tolist(), self.scores.tolist(), boxes.tolist(), self.rles, strict=True)
        return [
            {
                "image_id": image_id,
                "category_id": ids[label],
                "segmentation": mask,
                "bbox": [round(side, 2) for side in box],
                "score": score,
            }
            for label, score, box, mask in rows
            if ids[label] is not None
        ]

    def to_supervision(self) -> Any:
        """`supervision.Detections`, with the class names as `data["class_name"]`.

        Raises:
            UserError: the package is not installed.
        """
        try:
            from supervision import Detections
        except ImportError:
            raise UserError("to_supervision() needs a package that is missing: pip install supervision.") from None
        return Detections(
            xyxy=self.boxes.cpu().numpy(),
            mask=self.masks.numpy(),
            confidence=self.scores.cpu().numpy(),
            class_id=self.labels.cpu().numpy(),
            data={"class_name": np.array(self.names, dtype=str)},
        )

    def draw(self, image: ImageInput, classes: Sequence[str] | None = None) -> npt.NDArray[np.uint8]:
        """The image with masks, outlines, class names and scores drawn over it.

        Args:
            image: the image that was predicted, in any form that `Model.predict` takes.
            classes: the class name of each label, by default `self.classes`.

        Returns:
            (H, W, 3) uint8.

        Raises:
            UserError: the image is not readable, not of the masks' size, or a class has no name.
        """
        from uniquery.report.drawings import draw_instances  # pictures are not needed to train

        return draw_instances(image, self if classes is None else replace(self, classes=tuple(classes)))


def index_in_batch(targets: Sequence[Targets], image: Tensor, target: Tensor) -> Tensor:
    """Index of each instance, given by its image and its index there, in the concatenation of all images' instances."""
    starts = torch.tensor([0, *(len(t) for t in targets)][:-1], device=image.device).cumsum(0)
    return starts[image] + target


def rows_by_image(image: Tensor, images: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The order that sorts (Q,) image indices, and the indices of each image's rows.

    >>> [rows.tolist() for rows in rows_by_image(torch.tensor([1, 0, 1]), 2)[1]]
    [[1], [0, 2]]
    """
    order = image.argsort(stable=True)
    return order, order.split(torch.bincount(image, minlength=images).tolist())


def at_least_float32(tensor: Tensor) -> Tensor:
    """The tensor in float32 or wider: sums over a whole image lose too much in half precision."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def grid_locations(height: int, width: int, stride: int, device: torch.device | None = None) -> Tensor:
    """(height · width, 2): x, y of each cell's center in input pixels, row by row.

    >>> grid_locations(1, 2, 8).tolist()
    [[4.0, 4.0], [12.0, 4.0]]
    """
    ys = torch.arange(height, device=device, dtype=torch.float32) * stride + stride // 2
    xs = torch.arange(width, device=device, dtype=torch.float32) * stride + stride // 2
    y, x = torch.meshgrid(ys, xs, indexing="ij")
    return torch.stack([x.flatten(), y.flatten()], dim=1)
