"""Query-based instance segmenters, trained with instance-unique, equivariant querying."""

__version__ = "0.1.0"
