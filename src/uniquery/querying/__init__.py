"""The paper: instance-unique, equivariant querying. Knows torch and the structures only."""

from uniquery.querying.contract import Segmenter
from uniquery.querying.equivariance import EquivarianceLoss, feature_equivariance, view_of
from uniquery.querying.inter_scene import InterSceneLoss, PairLoss
from uniquery.querying.memory import PixelMemory, StoredPixels
from uniquery.querying.objective import Equivariance, InterScene, UniqueQuerying
from uniquery.querying.sampling import dense, instance_balanced, sample_pixels, sparse
from uniquery.querying.transforms import Transform, TransformGroup

__all__ = [
    "Equivariance",
    "EquivarianceLoss",
    "InterScene",
    "InterSceneLoss",
    "PairLoss",
    "PixelMemory",
    "Segmenter",
    "StoredPixels",
    "Transform",
    "TransformGroup",
    "UniqueQuerying",
    "dense",
    "feature_equivariance",
    "instance_balanced",
    "sample_pixels",
    "sparse",
    "view_of",
]
