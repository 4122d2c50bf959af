"""The paper: instance-unique, equivariant querying. Independent of any segmenter, data set or trainer."""

from uniquery.querying.contract import Segmenter
from uniquery.querying.equivariance import Equivariance, EquivarianceLoss, feature_equivariance, view_of
from uniquery.querying.inter_scene import InterScene, InterSceneLoss, PairLoss
from uniquery.querying.memory import PixelMemory, StoredPixels
from uniquery.querying.objective import QueryingSettings, UniqueQuerying
from uniquery.querying.sampling import PixelSampling, sample_pixels
from uniquery.querying.transforms import Transform, TransformGroup

__all__ = [
    "Equivariance",
    "EquivarianceLoss",
    "InterScene",
    "InterSceneLoss",
    "PairLoss",
    "PixelMemory",
    "PixelSampling",
    "QueryingSettings",
    "Segmenter",
    "StoredPixels",
    "Transform",
    "TransformGroup",
    "UniqueQuerying",
    "feature_equivariance",
    "sample_pixels",
    "view_of",
]
