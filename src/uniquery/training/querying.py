"""Settings of the algorithm, and what they build. The defaults are the paper's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from uniquery.querying import (
    Equivariance,
    InterScene,
    PairLoss,
    Segmenter,
    TransformGroup,
    UniqueQuerying,
    dense,
    instance_balanced,
    sparse,
)
from uniquery.querying.sampling import Sampler
from uniquery.settings import Settings

Fraction = Annotated[float, Field(gt=0, le=1)]


class SamplingConfig(Settings):
    """Which pixels of an image enter the memory."""

    name: Literal["instance_balanced", "sparse", "dense"] = "instance_balanced"
    count: int | None = Field(
        None, gt=0, description="pixels of each instance (None: 50), or of each image if sparse (None: 500)"
    )

    @model_validator(mode="after")
    def _dense_counts_nothing(self) -> SamplingConfig:
        if self.name == "dense" and self.count is not None:
            raise ValueError("dense sampling takes every pixel: leave count out")
        return self

    def build(self) -> Sampler:
        """The sampler."""
        if self.name == "dense":
            return dense()
        return sparse(self.count or 500) if self.name == "sparse" else instance_balanced(self.count or 50)


class InterSceneConfig(Settings):
    """L_inter (Eq. 5): queries must not fire on the instances of other images."""

    weight: float = Field(1.0, ge=0)
    ramp_steps: int = Field(0, ge=0, description="training forwards over which the weight grows from 0")
    loss: Literal["focal", "cross_entropy", "l1", "l2"] = "focal"
    alpha: float = Field(0.1, ge=0, lt=1, description="focal: weight of positives")
    gamma: float = Field(2.5, ge=0, description="focal: how strongly easy pairs are discounted")
    sampling: SamplingConfig = SamplingConfig()
    capacity: int = Field(100_000, ge=0, description="pixels in memory; 0: the other images of the same forward")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="of the stored embeddings")
    negatives_per_step: int | None = Field(None, gt=0, description="read a random part of the memory; None: all")
    max_queries: int | None = Field(None, gt=0, description="cap on the queries that take part; None: all")
    queries: Literal["all", "matched"] = Field("all", description="matched: only queries that own an instance")
    layers: Literal["last", "all"] = Field("last", description="decoder layers whose queries take part")
    gather: bool = Field(True, description="every process's memory gets the pixels of all; false: one each")

    def build(self) -> InterScene:
        """The part."""
        return InterScene(
            weight=self.weight,
            ramp_steps=self.ramp_steps,
            loss=PairLoss(self.loss, self.alpha, self.gamma),
            sampler=self.sampling.build(),
            capacity=self.capacity,
            dtype=self.dtype,
            negatives_per_step=self.negatives_per_step,
            max_queries=self.max_queries,
            queries=self.queries,
            layers=self.layers,
            gather=self.gather,
        )


class EquivarianceConfig(Settings):
    """L_equi (Eq. 6–8): queries and features must follow geometric transformations."""

    weight: float = Field(3.0, ge=0, description="λ; 0 with paired views leaves plain augmentation (Eq. 7)")
    views: Literal["paired", "extra"] = Field("paired", description="paired: views are half of the batch")
    target: Literal["masks", "features"] = Field("masks", description="masks: Eq. 8; features: Eq. 6")
    flip: float = Field(0.5, ge=0, le=1, description="probability of mirroring")
    crop: tuple[Fraction, Fraction] | None = Field((0.6, 1.0), description="fractions of each side that are kept")
    rotate: tuple[float, float] | None = Field(None, description="angles in degrees")
    scale: tuple[float, float] | None = Field(None, description="factors")
    combine: Literal["compose", "choose"] = Field("compose", description="all of them, or one for each image")

    @model_validator(mode="after")
    def _possible(self) -> EquivarianceConfig:
        self.build()
        return self

    def build(self) -> Equivariance:
        """The part."""
        group = TransformGroup(self.flip, self.crop, self.rotate, self.scale, self.combine)
        return Equivariance(self.weight, group, self.views, self.target)


class QueryingConfig(Settings):
    """The two parts of the algorithm; a part that is left out is off."""

    inter: InterSceneConfig | None = None
    equivariance: EquivarianceConfig | None = None

    @property
    def forwards_per_scene(self) -> int:
        """How many images of a batch come from one loaded scene."""
        return 2 if self.equivariance and self.equivariance.views == "paired" else 1

    def build(self, segmenter: Segmenter[Any, Any, Any], seed: int = 0) -> UniqueQuerying:
        """The objective."""
        return UniqueQuerying(
            segmenter,
            inter=self.inter.build() if self.inter else None,
            equivariance=self.equivariance.build() if self.equivariance else None,
            seed=seed,
        )
