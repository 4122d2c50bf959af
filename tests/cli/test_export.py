"""`uniquery export` and `uniquery predict --tile` as a user meets them."""

import json

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import save_file

from helpers.exported import info_of, small_onnx
from helpers.small_segmenters import small
from uniquery.cli import main, predict
from uniquery.evaluation.tiles import Tiling
from uniquery.export import onnx_file, proof
from uniquery.model import Model


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    """A small untrained model as a file."""
    model = small("sparseinst")
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    save_file(model.state_dict(), path, info_of(model).to_metadata())
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A COCO data set of two images for its classes."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    images, annotations = [], []
    for i in (1, 2):
        Image.fromarray(rng.integers(0, 256, (70, 90, 3), dtype=np.uint8)).save(folder / f"{i}.png")
        images.append({"id": i, "file_name": f"{i}.png", "width": 90, "height": 70})
        square = [10, 10, 50, 10, 50, 50, 10, 50]
        row = {"id": i, "image_id": i, "category_id": 9 + i, "segmentation": [square], "bbox": [10, 10, 40, 40]}
        annotations.append({**row, "area": 1600, "iscrowd": 0})
    categories = [{"id": 10 + i, "name": f"class {i}"} for i in range(3)]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (folder / "val.json").write_text(json.dumps(content))
    return folder


def fails(capsys, *arguments) -> str:
    capsys.readouterr()
    assert main([str(a) for a in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "Traceback" not in error
    return error


class TestExport:
    @pytest.fixture(autouse=True)
    def _needs_onnx(self):
        for package in ("onnx", "onnxscript", "onnxruntime"):
            pytest.importorskip(package)

    def test_writes_the_file_after_its_proof(self, model_file, data, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr(onnx_file, "to_onnx", lambda *_: small_onnx("sparseinst")[1])  # of the same weights
        target = tmp_path / "model.onnx"
        assert main(["export", str(model_file), str(target), "--data", str(data / "val.json"), str(data)]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert "mask AP on 2 images: torch" in out
        assert "difference 0.000" in out
        assert "largest difference of a score" in out
        assert "times as fast" in out
        assert f"written to {target}" in out
        assert target.stat().st_size > 10_000

    def test_a_model_that_differs_leaves_no_file(self, model_file, data, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr(onnx_file, "to_onnx", lambda *_: b"content")
        monkeypatch.setattr("uniquery.export.runtimes.open_exported", lambda *_: None)
        different = proof.Proof(2, 30.0, 29.8, 0.5, 0.1, 3, 0.1, 0.1)
        monkeypatch.setattr(proof, "compare_models", lambda *_, **__: different)
        (tmp_path / "old.onnx").write_bytes(b"old")
        for name in ("model.onnx", "old.onnx"):
            error = fails(capsys, "export", model_file, tmp_path / name, "--data", data / "val.json", data)
            assert "is not written: with onnxruntime, the AP differs by 0.20" in error
        assert [p.name for p in tmp_path.iterdir()] == ["old.onnx"]
        assert (tmp_path / "old.onnx").read_bytes() == b"old"

    def test_bad_input(self, model_file, data, tmp_path, capsys):
        assert "no folder" in fails(capsys, "export", model_file, tmp_path / "no" / "m.onnx")
        assert "no validation data" in fails(capsys, "export", model_file, tmp_path / "m.onnx")
        assert "No checkpoint at" in fails(capsys, "export", tmp_path / "none", tmp_path / "m.onnx")

    def test_a_missing_package_is_named(self, model_file, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
        error = fails(capsys, "export", model_file, tmp_path / "m.onnx", "--check-with", "openvino")
        assert "(openvino): pip install 'uniquery[openvino]'" in error


@pytest.mark.parametrize(("native", "exported", "is_equal"), [(30.0, 30.09, True), (30, 30.2, False), (30, 0.0, False)])
def test_a_proof_allows_a_tenth_of_a_point(native, exported, is_equal):
    assert proof.Proof(1, native, exported, 0, 1, 0, 1, 1).is_equal == is_equal


def test_a_proof_without_annotations():
    nan = float("nan")
    assert proof.Proof(1, nan, nan, 0, 1, 0, 1, 1).is_equal
    assert not proof.Proof(1, 1.0, nan, 0, 1, 0, 1, 1).is_equal


class TestTiles:
    def test_predict_writes_everything_and_the_seam_error(self, model_file, data, tmp_path, capsys):
        arguments = ["--tile", "64", "--score", "0", "--seam-check", "-o", str(tmp_path)]
        assert main(["predict", str(model_file), str(data / "1.png"), *arguments]) == 0
        assert "seam error" in capsys.readouterr().out
        results = json.loads((tmp_path / "results.json").read_text())
        assert results
        assert all(row["segmentation"]["size"] == [70, 90] for row in results)
        assert {"1.labels.png", "1.overlay.png"} <= {p.name for p in tmp_path.iterdir()}

    def test_seam_errors_too_leave_the_thresholds_to_the_model(self, model_file, data, tmp_path, monkeypatch):
        given, real = [], Model.predict_tiles

        def predict_tiles(*args, **options):
            given.append(options["score_threshold"])
            return real(*args, **options)

        monkeypatch.setattr(Model, "predict_tiles", predict_tiles)
        arguments = ["--tile", "64", "--seam-check", "-o", str(tmp_path)]
        assert main(["predict", str(model_file), str(data / "1.png"), *arguments]) == 0
        assert given == [None, None, None]

    def test_a_large_image_gets_json_only(self, model_file, data, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr("uniquery.report.predictions.MAX_PIXELS", 1000)
        arguments = ["--tile", "64", "--score", "0", "-o", str(tmp_path)]
        assert main(["predict", str(model_file), str(data / "1.png"), *arguments]) == 0
        assert "too large for pictures" in capsys.readouterr().err
        assert sorted(p.name for p in tmp_path.iterdir()) == ["images.json", "results.json"]

    def test_options_that_do_not_fit(self, model_file, data, tmp_path, capsys):
        image, output = data / "1.png", ("-o", tmp_path)
        assert "add --tile" in fails(capsys, "predict", model_file, image, "--overlap", 0.3, *output)
        assert "add --tile" in fails(capsys, "predict", model_file, image, "--seam-check", *output)
        assert "--panoptic" in fails(capsys, "predict", model_file, image, "--tile", 64, "--panoptic", *output)
        assert "at least 32" in fails(capsys, "predict", model_file, image, "--tile", 8, *output)
        assert "at most 0.5" in fails(capsys, "predict", model_file, image, "--tile", 64, "--overlap", 0.9, *output)

    def test_the_default_overlap_is_that_of_python(self):
        assert Tiling(64).overlap == predict.OVERLAP
