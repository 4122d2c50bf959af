"""A segmenter as the bytes of an ONNX file."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from uniquery.errors import UserError
from uniquery.export.graphs import build_graph
from uniquery.export.metadata import INPUTS, KEY, OUTPUTS, ExportInfo
from uniquery.export.selection import onnx_translations
from uniquery.querying.contract import Segmenter
from uniquery.structures import SIZE_DIVISIBILITY
from uniquery.weights.model_file import ModelInfo

OPSET = 18
MAX_BYTES = 2**31 - 1  # of one protocol buffer
_MAX_SIDE = 8192  # in multiples of SIZE_DIVISIBILITY; the tracer asks for a bound


def to_onnx(model: Segmenter[Any, Any, Any], info: ModelInfo) -> bytes:
    """The ONNX file of a trained segmenter on a CPU: from pixels to instances, for any batch and image size.

    Args:
        model: the segmenter, in evaluation mode; from here on it cuts masks at the threshold of `info.thresholds`.
        info: its settings, classes and test size, which become the metadata.

    Raises:
        UserError: packages are missing, or the model is too large for one file.
    """
    check_installed("onnx", "onnxscript", extra="export")
    if info.thresholds is not None:
        config: Any = model.config
        model.config = config.model_copy(update={"mask_threshold": info.thresholds.mask})
    graph = build_graph(model)
    height, width = (torch.export.Dim(name, min=1, max=_MAX_SIDE) for name in ("height", "width"))
    batch = torch.export.Dim("batch", min=1)
    shapes = {
        "images": {0: batch, 2: SIZE_DIVISIBILITY * height, 3: SIZE_DIVISIBILITY * width},
        "sizes": {0: batch},
    }
    # Two images with two sides of several cells: the tracer takes a length of 1 for a constant.
    pixels = torch.randint(0, 256, (2, 3, 256, 320), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    sizes = torch.tensor([[256, 320], [250, 300]])
    with torch.no_grad(), _quiet():
        program = torch.onnx.export(
            graph,
            (pixels, sizes),
            dynamo=True,
            opset_version=OPSET,
            dynamic_shapes=shapes,
            input_names=list(INPUTS),
            output_names=list(OUTPUTS),
            custom_translation_table=onnx_translations(),
            verbose=False,
        )
    assert program is not None
    content = program.model_proto
    _strip(content)
    prop = content.metadata_props.add()
    prop.key, prop.value = KEY, ExportInfo.of_model(info, graph.frame).to_json()
    if content.ByteSize() > MAX_BYTES:
        raise UserError(f"The model takes {content.ByteSize() / 1e9:.1f} GB, but an ONNX file can hold 2 GB.")
    return bytes(content.SerializeToString())


def _strip(model: Any) -> None:
    """Removes what the exporter notes about the source code: with it go the paths of this machine."""
    graphs = [model.graph, *model.functions]
    while graphs:
        graph = graphs.pop()
        entries = [*graph.node, *graph.value_info]
        if hasattr(graph, "initializer"):
            entries += [*graph.initializer, *graph.input, *graph.output]
        for entry in (graph, *entries):
            del entry.metadata_props[:]
            entry.doc_string = ""
        graphs += [attribute.g for node in graph.node for attribute in node.attribute if attribute.HasField("g")]


def check_installed(*packages: str, extra: str) -> None:
    """Raises unless packages can be imported.

    Raises:
        UserError: says which extra to install.
    """
    from importlib.util import find_spec

    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise UserError(
            f"This needs packages that are missing ({', '.join(missing)}): pip install 'uniquery[{extra}]'."
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the logs of the exporter and its optimizer, which are about their internals."""
    levels = {logger: logger.level for logger in map(logging.getLogger, ("torch.onnx", "onnxscript"))}
    try:
        for logger in levels:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings(action="ignore"), contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
