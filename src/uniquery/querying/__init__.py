"""The paper: instance-unique, equivariant querying. Knows torch and the structures only."""

from uniquery.querying.contract import Segmenter

__all__ = ["Segmenter"]
