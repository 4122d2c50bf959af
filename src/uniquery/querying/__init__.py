"""The paper: instance-unique, equivariant querying. Knows torch and the structures only."""

from uniquery.querying.contract import Segmenter
from uniquery.querying.objective import BaseObjective

__all__ = ["BaseObjective", "Segmenter"]
