"""The example of a deployed model: without torch and without uniquery, and the same instances as `Model.predict`."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.exported import info_of, small_onnx
from helpers.small_segmenters import SMALL
from uniquery.masks import rle
from uniquery.model import Model

EXAMPLE = Path(__file__).parents[2] / "examples" / "run_onnx.py"
# The script runs in a process that cannot import torch, nor uniquery.
WITHOUT_TORCH = """
import runpy, sys
sys.modules["torch"] = sys.modules["uniquery"] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def check(name, folder, width, height):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    segmenter, content = small_onnx(name)
    model = Model(segmenter, info_of(segmenter))
    (folder / "model.onnx").write_bytes(content)
    pixels = np.random.default_rng(0).integers(0, 256, (80, 110, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC).save(folder / "image.png")
    arguments = ["--score", "0.0", "--json", folder / "out.json", "--output", folder / "out.png"]
    command = [sys.executable, "-c", WITHOUT_TORCH, EXAMPLE, folder / "model.onnx", folder / "image.png", *arguments]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    native = model.predict(folder / "image.png", score_threshold=0.0)
    native = native[torch.tensor([rle.area(mask) > 0 for mask in native.rles])]
    ours = json.loads((folder / "out.json").read_text())
    assert len(done.stdout.splitlines()) == len(ours) == len(native) > 0
    assert Image.open(folder / "out.png").size == (width, height)
    return native, ours


def compare(native, ours):
    found = sorted((one["category_id"], round(one["score"], 2)) for one in ours)
    expected = [(native.category_ids[label], score) for label, score in zip(native.labels, native.scores, strict=True)]
    assert [one[0] for one in found] == sorted(int(category) for category, _ in expected)
    np.testing.assert_allclose(
        sorted(one["score"] for one in ours), sorted(native.scores.tolist()), atol=5e-3
    )  # pillow rounds resized pixels differently from torch, by one
    best, mask = ours[0], rle.decode(native.rles[0]) > 0
    drawn = rle.decode(rle.from_segmentation(best["mask"], *native.size)) > 0
    assert (drawn & mask).sum() >= 0.97 * (drawn | mask).sum()
    np.testing.assert_allclose(best["box"], native.boxes[0].tolist(), atol=2.0)


def test_the_example_needs_no_torch_and_finds_the_same(tmp_path):
    compare(*check("sparseinst", tmp_path, 330, 240))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SMALL if name != "sparseinst"])
def test_the_example_runs_every_segmenter(name, tmp_path):
    """At the size of the model: scores of untrained classes are so close that a rounded pixel can swap two of them."""
    compare(*check(name, tmp_path, 88, 64))
