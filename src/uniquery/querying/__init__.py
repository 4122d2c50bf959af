"""The paper: instance-unique, equivariant querying. Independent of any segmenter, data set or trainer."""

from uniquery.querying.contract import Segmenter
from uniquery.querying.equivariance import EquivarianceLoss, EquivarianceSettings, feature_equivariance, view_of
from uniquery.querying.inter_scene import InterSceneLoss, InterSceneSettings
from uniquery.querying.memory import InstancePixels, PixelMemory
from uniquery.querying.objective import UniqueQuerying
from uniquery.querying.pair_loss import PairLoss
from uniquery.querying.sampling import PixelSampling, sample_pixels
from uniquery.querying.settings import PRESETS, QueryingSettings
from uniquery.querying.transforms import RandomTransform, Transform

__all__ = [
    "PRESETS",
    "EquivarianceLoss",
    "EquivarianceSettings",
    "InstancePixels",
    "InterSceneLoss",
    "InterSceneSettings",
    "PairLoss",
    "PixelMemory",
    "PixelSampling",
    "QueryingSettings",
    "RandomTransform",
    "Segmenter",
    "Transform",
    "UniqueQuerying",
    "feature_equivariance",
    "sample_pixels",
    "view_of",
]
