"""Exported models, run on a CPU by ONNX Runtime or OpenVINO."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from uniquery.errors import UserError
from uniquery.export.metadata import INPUTS, KEY, OUTPUTS, ExportInfo
from uniquery.export.onnx_file import check_installed
from uniquery.export.pasting import paste_outputs
from uniquery.structures import Images, Instances

Array = npt.NDArray[Any]
RuntimeName = Literal["onnxruntime", "openvino"]


@dataclass(frozen=True)
class ExportedModel:
    """An exported model that predicts like the segmenter it was made from.

    Attributes:
        run: images and sizes, as arrays, to the arrays of `OUTPUTS`.
        info: what its file says about it.
    """

    run: Callable[[Array, Array], Sequence[Array]]
    info: ExportInfo

    def predict(self, images: Images, sizes: Sequence[tuple[int, int]]) -> list[Instances]:
        """Instances of each image of a padded batch, with masks at the given (height, width)."""
        arrays = self.run(images.pixels.numpy(), np.array(images.sizes, dtype=np.int64))
        scores, labels, boxes, masks = (torch.from_numpy(np.array(array)) for array in arrays)
        return [
            paste_outputs((scores, labels, boxes, masks), i, self.info.masks, valid, size, self.info.mask_threshold)
            for i, (valid, size) in enumerate(zip(images.sizes, sizes, strict=True))
        ]


def open_exported(content: bytes, runtime: RuntimeName = "onnxruntime") -> ExportedModel:
    """A model from the bytes of its ONNX file; it uses as many threads as torch.

    Raises:
        UserError: a package is missing, or the file was not written by `uniquery export`.
    """
    check_installed("onnx", extra="export")
    check_installed(runtime, extra="export" if runtime == "onnxruntime" else "openvino")
    import onnx

    try:
        properties = onnx.load_from_string(content).metadata_props
    except Exception:  # the parser's own error says nothing to a user
        raise UserError("The file is not a readable ONNX model.") from None
    described = {entry.key: entry.value for entry in properties}
    if KEY not in described:
        raise UserError("The ONNX file was not written by uniquery: its metadata has no description of the model.")
    run = _onnxruntime(content) if runtime == "onnxruntime" else _openvino(content)
    return ExportedModel(run, ExportInfo.from_json(described[KEY]))


def _onnxruntime(content: bytes) -> Callable[[Array, Array], Sequence[Array]]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors only
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    return lambda *arrays: session.run(OUTPUTS, dict(zip(INPUTS, arrays, strict=True)))


def _openvino(content: bytes) -> Callable[[Array, Array], Sequence[Array]]:
    import openvino

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        file.write_bytes(content)
        network = openvino.Core().read_model(file)
    threads = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(network, "CPU", threads)

    def run(*arrays: Array) -> Sequence[Array]:
        results = compiled(dict(zip(INPUTS, arrays, strict=True)))
        return [results[name] for name in OUTPUTS]

    return run
