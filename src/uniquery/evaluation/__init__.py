"""How good the predicted instances are."""

from uniquery.evaluation.coco import Metrics, describe_metric
from uniquery.evaluation.entries import load_results
from uniquery.evaluation.protocol import evaluate
from uniquery.evaluation.tables import class_table, table

__all__ = ["Metrics", "class_table", "describe_metric", "evaluate", "load_results", "table"]
