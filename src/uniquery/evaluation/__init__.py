"""How good the predicted instances are."""

from uniquery.evaluation.coco import Metrics, class_table, evaluate, load_results, table

__all__ = ["Metrics", "class_table", "evaluate", "load_results", "table"]
