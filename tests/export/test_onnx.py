"""Exported files predict what the segmenters predict, for any batch and size, and say how to use them."""

import json
import logging
from dataclasses import replace

import numpy as np
import pytest
import torch

from helpers.exported import THRESHOLDS, assert_same, info_of, small_onnx
from helpers.small_segmenters import SMALL, drawn, small
from uniquery.errors import UserError
from uniquery.export.metadata import ExportInfo

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

from uniquery.export import onnx_file  # noqa: E402
from uniquery.export.onnx_file import to_onnx  # noqa: E402
from uniquery.export.runtimes import open_exported  # noqa: E402

FAST = "sparseinst"  # one segmenter is exported in every test run
BATCHES = ([(90, 120), (64, 100)], [(256, 200)], [(33, 40), (96, 64), (40, 40)])


@pytest.fixture(scope="module")
def exported():
    return small_onnx(FAST)


def check(model, content, runtime="onnxruntime"):
    opened = open_exported(content, runtime)
    for sizes in BATCHES:
        images, _ = drawn(sizes, [4] * len(sizes))
        with torch.inference_mode():
            native = model.predict(model(images), sizes)
        for ours, theirs in zip(opened.predict(images, sizes), native, strict=True):
            assert_same(ours, theirs)


def test_an_exported_model_predicts_the_same(exported):
    check(*exported)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SMALL if name != FAST])
def test_every_segmenter_can_be_exported(name):
    check(*small_onnx(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_openvino_reads_the_same_file(name):
    pytest.importorskip("openvino")
    check(*small_onnx(name), "openvino")


def test_names_and_dynamic_axes(exported):
    graph = onnx.load_from_string(exported[1]).graph
    assert [one.name for one in graph.input] == ["images", "sizes"]
    assert [one.name for one in graph.output] == ["scores", "labels", "boxes", "masks"]
    pixels = graph.input[0].type.tensor_type
    assert pixels.elem_type == onnx.TensorProto.UINT8
    assert [dim.dim_value for dim in pixels.shape.dim] == [0, 3, 0, 0]
    onnx.checker.check_model(onnx.load_from_string(exported[1]))


def test_the_file_describes_itself(exported):
    model, content = exported
    entries = {entry.key: entry.value for entry in onnx.load_from_string(content).metadata_props}
    described, info = json.loads(entries["uniquery"]), open_exported(content).info
    assert described["format"] == "uniquery-onnx/1"
    assert described["classes"] == ["class 0", "class 1", "class 2"]
    assert described["category_ids"] == [10, 11, 12]
    assert (described["short"], described["longest"]) == (64, 96)
    assert described["mask_threshold"] == model.config.mask_threshold == THRESHOLDS.mask
    assert described["score_thresholds"] == list(THRESHOLDS.scores)
    without = ExportInfo.of_model(replace(info_of(model), thresholds=None, model=SMALL[FAST]), info.masks)
    assert (without.mask_threshold, without.score_thresholds) == (SMALL[FAST].mask_threshold, (0.5, 0.5, 0.5))
    assert ExportInfo.from_json(info.to_json()) == info
    assert str(tuple(info.masks.__dict__)) in str(tuple(described["masks"]))


def test_no_local_path_is_in_the_file(exported):
    assert b"/uniquery/" not in exported[1]
    assert str(np.__path__[0]).split("/site-packages")[0].encode() not in exported[1]


def test_a_file_of_another_program_is_refused(exported):
    with pytest.raises(UserError, match="not a readable ONNX model"):
        open_exported(b"\xff\xff no model")
    other = onnx.load_from_string(exported[1])
    del other.metadata_props[:]
    with pytest.raises(UserError, match="not written by uniquery"):
        open_exported(other.SerializeToString())


def test_a_model_beyond_the_limit_of_the_format_is_refused(monkeypatch):
    monkeypatch.setattr(onnx_file, "MAX_BYTES", 1000)
    monkeypatch.setattr(torch.onnx, "export", lambda *_, **__: type("P", (), {"model_proto": large_proto()})())
    with pytest.raises(UserError, match="an ONNX file can hold 2 GB"):
        to_onnx(small(FAST).eval(), info_of(small(FAST)))


def large_proto():
    proto = onnx.ModelProto()
    proto.doc_string = "x" * 2000
    return proto


def test_logs_of_the_exporter_are_not_shown():
    optimizer = logging.getLogger("onnxscript.optimizer")
    before = optimizer.getEffectiveLevel()
    with onnx_file._quiet():
        assert not optimizer.isEnabledFor(logging.WARNING)
    assert optimizer.getEffectiveLevel() == before
