"""Drawn scenes in panoptic form."""

import json

import numpy as np
import pytest
from PIL import Image

from uniquery.cli import main
from uniquery.data.check import check_data
from uniquery.data.drawing import CLASS_NAMES, STUFF_NAMES
from uniquery.data.open import open_data
from uniquery.data.scenes import SPLITS, Scene, ScenesConfig, draw_scene, make_scenes
from uniquery.errors import DataError

CONFIG = ScenesConfig(train_images=3, val_images=2, size=64, crowding=4, panoptic=True)


def drawn(count: int) -> list[Scene]:
    return [draw_scene(np.random.default_rng(seed), CONFIG) for seed in range(count)]


class TestDrawing:
    def test_every_pixel_is_an_object_stuff_or_void(self):
        for scene in drawn(10):
            assert scene.stuff is not None
            assert not (scene.masks.any(0) & (scene.stuff >= 0)).any()
            areas = np.bincount(scene.stuff[scene.stuff >= 0], minlength=len(STUFF_NAMES))
            assert not ((areas > 0) & (areas < 0.01 * 64 * 64)).any()

    def test_all_stuff_and_some_void_occur(self):
        scenes = drawn(30)
        assert set(np.unique(np.stack([scene.stuff for scene in scenes]))) == {-1, 0, 1, 2, 3}
        void = [((scene.stuff < 0) & ~scene.masks.any(0)).mean() for scene in scenes]
        assert 0.02 < np.mean(void) < 0.4
        assert min(void) == 0

    def test_stuff_of_a_kind_looks_alike(self):
        """The mean color of a kind differs more between kinds than from scene to scene."""
        colors: dict[int, list[np.ndarray]] = {}
        for scene in drawn(30):
            for kind in np.unique(scene.stuff[scene.stuff >= 0]).tolist():
                color = scene.image[scene.stuff == kind].mean(0)
                colors.setdefault(kind, []).append(color / color.sum())
        means = np.stack([np.mean(colors[kind], axis=0) for kind in range(4)])
        for kind, values in colors.items():
            nearest = np.abs(np.stack(values)[:, None] - means).sum(2).argmin(1)
            assert (nearest == kind).mean() > 0.7

    def test_other_scenes_have_no_stuff(self):
        plain = CONFIG.model_copy(update={"panoptic": False})
        assert draw_scene(np.random.default_rng(0), plain).stuff is None


class TestFiles:
    def test_what_is_read_is_what_was_drawn(self, tmp_path):
        files = make_scenes(tmp_path / "scenes", CONFIG)
        for number, split in enumerate(SPLITS):
            data = open_data(files.annotations(split), files.images(split))
            assert data.classes == [*CLASS_NAMES[:6], *STUFF_NAMES]
            assert [c.is_thing for c in data.categories] == [True] * 6 + [False] * 4
            for index, image in enumerate(data.image_ids.tolist()):
                key = np.random.SeedSequence([0, number, image])
                scene = draw_scene(np.random.Generator(np.random.PCG64(key)), CONFIG)
                sample = data.load(index)
                things = int(sample.things.sum())
                assert np.array_equal(sample.masks[:things].numpy(), scene.masks)
                assert sample.labels[:things].tolist() == scene.labels.tolist()
                for label, mask in zip(sample.labels[things:].tolist(), sample.masks[things:], strict=True):
                    assert np.array_equal(mask.numpy(), scene.stuff == label - 6)
                void = (scene.stuff < 0) & ~scene.masks.any(0)
                valid = np.ones((64, 64)) if sample.valid is None else sample.valid.numpy()
                assert np.array_equal(valid == 0, void)
            assert check_data(files.annotations(split), files.images(split)).problems == ()

    def test_the_command(self, tmp_path, capsys):
        settings = ("panoptic=true", "train_images=2", "val_images=1", "size=64")
        sets = [part for setting in settings for part in ("--set", setting)]
        assert main(["data", "make-scenes", str(tmp_path / "scenes"), *sets]) == 0
        content = json.loads((tmp_path / "scenes" / "annotations" / "train.json").read_text())
        segments = content["annotations"][0]["segments_info"]
        ids = np.asarray(Image.open(tmp_path / "scenes" / "annotations" / "train" / "000001.png")).astype(int)
        assert {s["id"] for s in segments} == set(np.unique(ids @ [1, 256, 65536])) - {0}
        assert max(s["id"] for s in segments) > 65536

    def test_the_same_scenes_are_reused_and_lost_files_noticed(self, tmp_path):
        def refuse(done: int, total: int) -> None:
            raise AssertionError("drawn again")

        files = make_scenes(tmp_path / "scenes", CONFIG)
        make_scenes(files.root, CONFIG, refuse)
        with pytest.raises(DataError, match="panoptic is True, not False"):
            make_scenes(files.root, CONFIG.model_copy(update={"panoptic": False}))
        (files.pngs("val") / "000002.png").unlink()
        with pytest.raises(DataError, match="PNG files of annotations/val are missing"):
            make_scenes(files.root, CONFIG)

    def test_annotations_have_one_form(self, tmp_path, capsys):
        sets = ["--set", "panoptic=true", "--set", "lvis=true"]
        assert main(["data", "make-scenes", str(tmp_path / "scenes"), *sets]) == 2
        assert "lvis and panoptic are two forms" in capsys.readouterr().err

    def test_scenes_without_stuff_are_not_taken_for_panoptic_ones(self, tmp_path):
        plain = CONFIG.model_copy(update={"panoptic": False})
        files = make_scenes(tmp_path / "scenes", plain)
        assert "panoptic" not in json.loads(files.annotations("val").read_text())["info"]["config"]
        assert make_scenes(files.root, plain) == files
        with pytest.raises(DataError, match="panoptic is False, not True"):
            make_scenes(files.root, CONFIG)
