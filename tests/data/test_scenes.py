"""Drawn scenes: the same everywhere, true masks, knobs that act, files that are whole or absent."""

from __future__ import annotations

import hashlib
import json
from itertools import combinations
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image
from pycocotools.coco import COCO
from pydantic import ValidationError
from scipy import ndimage

from uniquery.data import scenes
from uniquery.data.scenes import CLASS_NAMES, Scene, ScenesConfig, draw_scene, make_scenes
from uniquery.errors import DataError

SMALL = ScenesConfig(train_images=2, val_images=1, size=64, crowding=4)


def drawn(count: int, **knobs: float) -> list[Scene]:
    config = ScenesConfig(**knobs)
    return [draw_scene(np.random.Generator(np.random.PCG64(number)), config) for number in range(count)]


def digest(array: npt.NDArray[np.generic]) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def contents(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def compactness(mask: npt.NDArray[np.bool_]) -> float:
    """Area over 4π√det(cov): 1 for every ellipse, unchanged by rotation and stretching."""
    return float(mask.sum() / (4 * np.pi * np.sqrt(np.linalg.det(np.cov(np.nonzero(mask))))))


def mean_colors(scene: Scene) -> npt.NDArray[np.float64]:
    return np.stack([scene.image[mask].mean(0) for mask in scene.masks])


class TestDrawing:
    def test_the_same_pixels_on_every_machine(self) -> None:
        (scene,) = drawn(1, size=96, classes=8, crowding=12)
        assert digest(scene.image) == "642a87c1362c1d2732396a69588cdef55a48d0997c7c5d957d26634ee1077b14"
        assert digest(scene.masks) == "0d0741c9b3185927ddda1d00fc07a60a4affcb53a4be82f373e223772a87eecd"
        assert scene.labels.tolist() == [0, 3, 4, 0, 0, 6]

    def test_other_seeds_draw_other_scenes(self) -> None:
        assert len({digest(scene.image) for scene in drawn(5, size=64)}) == 5

    def test_masks_are_disjoint_and_seen(self) -> None:
        for scene in drawn(10):
            assert scene.image.shape == (192, 192, 3)
            assert scene.image.dtype == np.uint8
            assert scene.masks.shape == (len(scene.labels), 192, 192)
            assert scene.masks.sum(0).max() == 1
            assert scene.masks.sum((1, 2)).min() >= 20

    def test_a_mask_has_the_shape_of_its_class(self) -> None:
        found: dict[str, list[float]] = {name: [] for name in CLASS_NAMES}
        for scene in drawn(60, occlusion=0, classes=8, crowding=6):
            for label, mask in zip(scene.labels, scene.masks, strict=True):
                cut_off = mask[0].any() or mask[-1].any() or mask[:, 0].any() or mask[:, -1].any()
                if not cut_off and mask.sum() > 400:
                    filled = ndimage.binary_fill_holes(mask)
                    assert (filled.sum() > mask.sum()) == (CLASS_NAMES[label] == "ring")
                    found[CLASS_NAMES[label]].append(compactness(filled))
        middle = {name: float(np.median(values)) for name, values in found.items()}
        assert middle["disc"] == pytest.approx(1, abs=0.01)
        assert middle["ring"] == pytest.approx(1, abs=0.01)  # filled
        assert middle["box"] == pytest.approx(3 / np.pi, abs=0.03)  # rounded corners lie between square and disc
        assert middle["triangle"] == pytest.approx(np.sqrt(108) / (4 * np.pi), abs=0.02)
        assert max(middle[name] for name in ("star", "crescent", "cross", "blob")) < middle["box"]

    def test_sizes_run_from_small_to_large(self) -> None:
        areas = np.concatenate([scene.masks.sum((1, 2)) for scene in drawn(60)])
        small, large = (areas < 32**2).mean(), (areas >= 96**2).mean()
        assert 0.25 < small < 0.6
        assert 0.005 < large < 0.1

    def test_things_stand_out_from_the_ground(self) -> None:
        # a ring of ground around each thing has another color than the thing itself
        contrast = []
        for scene in drawn(10, occlusion=0):
            ground = ~scene.masks.any(0)
            for mask, color in zip(scene.masks, mean_colors(scene), strict=True):
                around = ndimage.binary_dilation(mask, iterations=6) & ground
                contrast.append(np.abs(scene.image[around].mean(0) - color).max())
        assert np.median(contrast) > 40


class TestKnobs:
    def test_crowding_is_the_average_number_of_things(self) -> None:
        for crowding in (2, 10):
            counts = [len(scene.labels) for scene in drawn(80, size=96, crowding=crowding)]
            assert np.mean(counts) == pytest.approx(crowding, rel=0.15)

    def test_classes_bound_the_labels(self) -> None:
        for classes in (1, 3, 8):
            labels = np.concatenate([scene.labels for scene in drawn(20, size=64, classes=classes)])
            assert set(labels.tolist()) == set(range(classes))

    def test_no_lookalikes_no_shared_looks(self) -> None:
        for scene in drawn(20, size=64, lookalikes=0):
            assert len(set(scene.appearances.tolist())) == len(scene.appearances)
            assert len(np.unique(mean_colors(scene).round(1), axis=0)) == len(scene.appearances)

    def test_lookalikes_share_class_and_color(self) -> None:
        alike, unlike = [], []
        for scene in drawn(30, lookalikes=0.5):
            colors = mean_colors(scene)
            for i, j in combinations(range(len(colors)), 2):
                same = scene.appearances[i] == scene.appearances[j]
                (alike if same else unlike).append(float(np.abs(colors[i] - colors[j]).max()))
                assert not same or scene.labels[i] == scene.labels[j]
        assert np.median(alike) < np.median(unlike) / 3

    def test_lookalikes_of_one_copy_a_single_thing(self) -> None:
        assert all(len(set(scene.appearances.tolist())) == 1 for scene in drawn(5, lookalikes=1))

    @pytest.mark.parametrize("occlusion", [0.0, 0.5, 1.0])
    def test_occlusion_bounds_what_is_hidden(self, occlusion: float, monkeypatch: pytest.MonkeyPatch) -> None:
        painted: list[int] = []
        original = scenes.paint

        def counting_paint(under, thing, parts, light, lattice):  # type: ignore[no-untyped-def]
            painted.append(int((parts[0] < 0).sum()))
            return original(under, thing, parts, light, lattice)

        monkeypatch.setattr(scenes, "paint", counting_paint)
        visible = np.concatenate([scene.masks.sum((1, 2)) for scene in drawn(20, occlusion=occlusion)])
        assert len(visible) == len(painted)  # whatever was painted has a mask
        shares = visible / np.array(painted)
        assert 1 - 0.75 * occlusion <= shares.min() <= 1 - 0.6 * occlusion

    def test_crowds_touch_even_without_occlusion(self) -> None:
        touching = []
        for scene in drawn(20, occlusion=0):
            for mask in scene.masks:
                others = scene.masks.any(0) & ~mask
                touching.append(bool((ndimage.binary_dilation(mask, iterations=2) & others).any()))
        assert np.mean(touching) > 0.4

    @pytest.mark.parametrize(
        "wrong",
        [
            {"classes": 0},
            {"classes": 9},
            {"lookalikes": 1.1},
            {"occlusion": -0.1},
            {"size": 32},
            {"crowding": 0},
            {"seed": -1},
            {"train_images": 0},
            {"crowd": 3},
        ],
    )
    def test_a_wrong_knob_is_refused(self, wrong: dict[str, float]) -> None:
        with pytest.raises(ValidationError, match=next(iter(wrong))):
            ScenesConfig(**wrong)


class TestFiles:
    def test_coco_reads_what_was_drawn(self, tmp_path: Path) -> None:
        files = make_scenes(tmp_path / "scenes", SMALL)
        for split, count in ((0, 2), (1, 1)):
            coco = COCO(str(files.annotations(scenes.SPLITS[split])))
            assert [category["name"] for category in coco.loadCats(coco.getCatIds())] == list(CLASS_NAMES[:6])
            assert len(coco.imgs) == count
            for number, image in coco.imgs.items():
                scene = draw_scene(
                    np.random.Generator(np.random.PCG64(np.random.SeedSequence([0, split, number]))), SMALL
                )
                pixels = np.asarray(Image.open(files.images(scenes.SPLITS[split]) / image["file_name"]))
                assert np.array_equal(pixels, scene.image)
                annotations = coco.loadAnns(coco.getAnnIds(number))
                assert [a["category_id"] - 1 for a in annotations] == scene.labels.tolist()
                for annotation, mask in zip(annotations, scene.masks, strict=True):
                    assert np.array_equal(coco.annToMask(annotation), mask)
                    assert annotation["area"] == mask.sum()
                    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
                    x, y, width, height = annotation["bbox"]
                    assert (x, y) == (columns[0], rows[0])
                    assert (x + width, y + height) == (columns[-1] + 1, rows[-1] + 1)
                    assert annotation["iscrowd"] == 0

    def test_the_same_seed_writes_the_same_bytes(self, tmp_path: Path) -> None:
        first, second = (contents(make_scenes(tmp_path / name, SMALL).root) for name in ("a", "b"))
        assert first == second
        assert len(first) == 5

    def test_another_seed_writes_other_images(self, tmp_path: Path) -> None:
        first = contents(make_scenes(tmp_path / "a", SMALL).root)
        second = contents(make_scenes(tmp_path / "b", SMALL.model_copy(update={"seed": 1})).root)
        assert not {first[name] for name in first} & {second[name] for name in second}

    def test_more_images_leave_the_earlier_ones_as_they_are(self, tmp_path: Path) -> None:
        few = contents(make_scenes(tmp_path / "few", SMALL).root)
        more = contents(make_scenes(tmp_path / "more", SMALL.model_copy(update={"train_images": 3})).root)
        pictures = [name for name in few if name.endswith(".png")]
        assert len(pictures) == 3
        assert [few[name] for name in pictures] == [more[name] for name in pictures]

    def test_splits_differ(self, tmp_path: Path) -> None:
        files = contents(make_scenes(tmp_path / "scenes", SMALL).root)
        assert files["images/train/000001.png"] != files["images/val/000001.png"]

    def test_progress_counts_to_the_total(self, tmp_path: Path) -> None:
        calls: list[tuple[int, int]] = []
        make_scenes(tmp_path / "scenes", SMALL, lambda done, total: calls.append((done, total)))
        assert calls == [(1, 3), (2, 3), (3, 3)]

    def test_the_same_data_are_reused(self, tmp_path: Path) -> None:
        def refuse(done: int, total: int) -> None:
            raise AssertionError("drawn again")

        files = make_scenes(tmp_path / "scenes", SMALL)
        stamps = {path: path.stat().st_mtime_ns for path in files.root.rglob("*")}
        assert make_scenes(files.root, SMALL, refuse) == files
        assert {path: path.stat().st_mtime_ns for path in files.root.rglob("*")} == stamps

    def test_an_empty_folder_is_filled(self, tmp_path: Path) -> None:
        assert make_scenes(tmp_path, SMALL).annotations("val").exists()

    def test_other_knobs_are_refused_and_named(self, tmp_path: Path) -> None:
        make_scenes(tmp_path / "scenes", SMALL)
        before = contents(tmp_path)
        with pytest.raises(DataError, match=r"crowding is 4\.0, not 5\.0"):
            make_scenes(tmp_path / "scenes", SMALL.model_copy(update={"crowding": 5.0}))
        assert contents(tmp_path) == before

    def test_drawings_of_other_code_are_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        make_scenes(tmp_path / "scenes", SMALL)
        monkeypatch.setattr(scenes, "_VERSION", 10**6)
        with pytest.raises(DataError, match="another version"):
            make_scenes(tmp_path / "scenes", SMALL)

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"info": 3, "images": []}', '{"info": {}, "images": [1]}'])
    def test_foreign_annotations_are_refused(self, tmp_path: Path, text: str) -> None:
        files = make_scenes(tmp_path / "scenes", SMALL)
        files.annotations("train").write_text(text)
        with pytest.raises(DataError, match="does not hold these scenes"):
            make_scenes(files.root, SMALL)

    @pytest.mark.parametrize("emptied", [True, False])
    def test_lost_images_are_noticed(self, tmp_path: Path, emptied: bool) -> None:
        files = make_scenes(tmp_path / "scenes", SMALL)
        victim = files.images("train") / "000002.png"
        victim.write_bytes(b"") if emptied else victim.unlink()
        with pytest.raises(DataError, match="images/train are missing"):
            make_scenes(files.root, SMALL)

    def test_somebody_elses_folder_or_file_is_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.txt").write_text("years of work")
        for root in (tmp_path, tmp_path / "thesis.txt"):
            with pytest.raises(DataError, match="remove it or choose another"):
                make_scenes(root, SMALL)
        assert contents(tmp_path).keys() == {"thesis.txt"}

    def test_a_place_that_cannot_be_written_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(DataError, match=r"Cannot write scenes to .*file/scenes"):
            make_scenes(tmp_path / "file" / "scenes", SMALL)

    def test_an_interruption_leaves_nothing_behind(self, tmp_path: Path) -> None:
        def interrupt(done: int, total: int) -> None:
            if done == 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            make_scenes(tmp_path / "scenes", SMALL, interrupt)
        assert list(tmp_path.iterdir()) == []

    def test_two_makers_at_once_agree(self, tmp_path: Path) -> None:
        def overtake(done: int, total: int) -> None:
            if done == total:
                make_scenes(tmp_path / "scenes", SMALL)

        files = make_scenes(tmp_path / "scenes", SMALL, overtake)
        assert json.loads(files.annotations("val").read_text())["info"]["config"] == SMALL.model_dump(
            exclude={"lvis", "panoptic"}
        )
        assert [path.name for path in tmp_path.iterdir()] == ["scenes"]

    def test_a_rival_with_other_knobs_is_not_overwritten(self, tmp_path: Path) -> None:
        rival = SMALL.model_copy(update={"seed": 9})

        def overtake(done: int, total: int) -> None:
            if done == total:
                make_scenes(tmp_path / "scenes", rival)

        with pytest.raises(DataError, match="Cannot write"):
            make_scenes(tmp_path / "scenes", SMALL, overtake)
        assert make_scenes(tmp_path / "scenes", rival).root.exists()
