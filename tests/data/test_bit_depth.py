"""`data.bit_depth`: images of 16 bits whose values use fewer."""

import shutil

import numpy as np
import pytest
from PIL import Image

import uniquery
from helpers.small_runs import small_config
from uniquery.cli import main
from uniquery.data.image_input import as_rgb_array
from uniquery.data.images import read_image, unused_bits
from uniquery.errors import ConfigError
from uniquery.training import loop
from uniquery.training.config import load_config
from uniquery.training.model_and_data import open_model_and_data
from uniquery.weights.model_file import read_model_info


def save(path, values, dtype=np.uint16):
    Image.fromarray(np.asarray([values], dtype)).save(path)
    return path


class TestReading:
    @pytest.mark.parametrize("dtype", [np.uint16, np.int32])
    def test_the_range_is_stretched_and_cut(self, tmp_path, dtype):
        path = save(tmp_path / "a.tif", [0, 8, 2048, 4087, 4095, 4096, 60000], dtype)
        assert read_image(path, 12)[0, :, 0].tolist() == [0, 0, 128, 255, 255, 255, 255]
        assert read_image(path, 16)[0, :, 0].tolist() == [0, 0, 8, 16, 16, 16, 233]
        assert np.array_equal(as_rgb_array(Image.open(path), 12), read_image(path, 12))

    def test_dark_images_stay_dark(self, tmp_path):
        """Without a bit depth, an image whose values fit 8 bits is taken as it is."""
        path = save(tmp_path / "a.png", [0, 100, 200])
        assert read_image(path)[0, :, 0].tolist() == [0, 100, 200]
        assert read_image(path, 12)[0, :, 0].tolist() == [0, 6, 12]

    def test_images_of_8_bits_do_not_change(self, tmp_path):
        path = save(tmp_path / "a.png", [0, 100, 200], np.uint8)
        assert np.array_equal(read_image(path), read_image(path, 12))

    def test_the_advice_is_the_smallest_depth_that_fits(self):
        for largest, depth in ((300, 9), (1023, 10), (4095, 12), (4096, 13)):
            assert f"data.bit_depth={depth}" in unused_bits([largest])
            assert unused_bits([largest], depth) == ""
            assert depth == 9 or "raise it" in unused_bits([largest], depth - 1)


@pytest.mark.parametrize("depth", [8, 17, 0, "twelve"])
def test_bad_settings(depth):
    with pytest.raises(ConfigError, match="bit_depth"):
        load_config("condinst_lite0", [("data.bit_depth", depth)])


def test_a_run_keeps_it_for_evaluation_and_prediction(scenes, tmp_path, capsys):
    """Trained on 12 of 16 bits, a model sees what one trained on the same 8 bits sees, and so do its users."""
    config, folders = small_config(tmp_path, scenes), {}
    for bits in (8, 16):
        folders[bits] = {
            split: shutil.copytree(scenes.images(split), tmp_path / str(bits) / split) for split in ("train", "val")
        }
        for file in (file for folder in folders[bits].values() for file in folder.iterdir()):
            gray = np.asarray(Image.open(file).convert("L"))
            Image.fromarray(gray if bits == 8 else np.rint(gray * (4095 / 255)).astype(np.uint16)).save(file)
    runs = {}
    for bits, depth in ((8, "null"), (16, "12")):
        data = [(f"data.{split}.images", str(folder)) for split, folder in folders[bits].items()]
        runs[bits] = loop.train(load_config(config, [*data, f"name=bits{bits}", f"data.bit_depth={depth}"]))
    assert "nearly black" not in capsys.readouterr().out
    assert read_model_info(runs[16]).bit_depth == 12
    assert read_model_info(runs[8]).bit_depth is None
    models = {bits: uniquery.load(run) for bits, run in runs.items()}
    for name in (file.name for file in folders[8]["val"].iterdir()):
        found = [models[bits].predict(folders[bits]["val"] / name, score_threshold=0) for bits in (8, 16)]
        assert found[0].rles == found[1].rles
        assert found[0].scores.tolist() == found[1].scores.tolist()
    opened = open_model_and_data(runs[16])
    assert np.array_equal(opened.data.read(0), open_model_and_data(runs[8]).data.read(0))
    assert main(["predict", str(runs[16]), str(folders[16]["val"]), "-o", str(tmp_path / "out"), "--score", "0"]) == 0
    overlays = sorted((tmp_path / "out").glob("*.overlay.png"))
    assert max(np.asarray(Image.open(file)).max() for file in overlays) > 100
