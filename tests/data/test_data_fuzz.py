"""Whatever happens to a data set, it is accepted whole or refused in one sentence."""

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from helpers.coco_files import Content, assert_one_sentence, sound, write_json, write_set
from helpers.small_runs import CONFIG
from uniquery.data.check import check_data
from uniquery.data.coco import CocoData
from uniquery.errors import DataError, UserError
from uniquery.training import loop
from uniquery.training.config import parse_config


@pytest.fixture
def files(tmp_path) -> tuple[Path, Path]:
    return write_set(tmp_path)


JUNK = [
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        5,
        2**31,
        2**63,
        10**9,
        -(10**30),
        10**400,
        0.5,
        -0.0,
        1e308,
        float("nan"),
        float("inf"),
    ),
    *("", "x", "0", "a.png", "../a.png", "\0", "\ud800", "a" * 300, "é", "i0", "oooo", "\n"),
    *([], {}, [[]], [{}], [None], [[None]], {"a": 1}, [0] * 6, [[0] * 6], [[1, 2, 3, 4, 5, 6, 7]], [[9e99] * 8]),
    *({"size": [24, 32], "counts": [768]}, {"size": [24, 32], "counts": "0"}, {"size": [], "counts": []}),
]


def places(node: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every value below a node."""
    items = list(node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ())
    return [place for key, value in items for place in ((node, key), *places(value))]


def mutate(content: Content, rng: random.Random) -> None:
    spots = places(content)
    shallow = [spot for spot in spots if isinstance(spot[0], dict)]  # else most mutations would hit a run length
    container, key = rng.choice(spots if rng.random() < 0.3 else shallow)
    action = rng.choice(["remove", "replace", "replace", "replace", "exchange", "wrap"])
    if action == "remove":
        del container[key]
    elif action == "replace":
        container[key] = copy.deepcopy(rng.choice(JUNK))
    elif action == "wrap":
        container[key] = rng.choice([[container[key]], {"id": container[key]}, str(container[key])])
    else:
        other, other_key = rng.choice(spots)
        container[key] = copy.deepcopy(other[other_key])


class TestFuzz:
    def one_line(self, message: object) -> None:
        assert "\n" not in str(message)

    def outcome(self, path: Path, images: Path) -> bool:
        """Whether the set was accepted; anything but a DataError is a failure."""
        try:
            report = check_data(path, images, read_pixels=False)
            assert report.is_valid or any(p.fatal for p in report.problems)
            for problem in report.problems:
                self.one_line(problem.text)
        except DataError as error:
            self.one_line(error)
            report = None
        try:
            data = CocoData(path, images)
            for index in range(len(data)):
                sample = data.load(index)
                assert len(sample.masks) == len(sample.labels) == int(data.instances_per_image()[index])
                assert sample.masks.flatten(1).any(1).all()
        except DataError as error:
            self.one_line(error)
            return False
        assert report is not None
        assert report.is_valid
        return True

    def test_changed_values(self, files):
        accepted = []
        for seed in range(400):
            rng, content = random.Random(seed), sound()
            for _ in range(rng.choice([1, 1, 1, 2, 3])):
                mutate(content, rng)
            try:
                accepted.append(self.outcome(write_json(files[0].parent, content), files[1]))
            except Exception as error:
                pytest.fail(f"seed {seed}: {error!r}")
        assert 0.1 < np.mean(accepted) < 0.9

    def test_changed_bytes(self, files):
        whole = files[0].read_bytes()
        for seed in range(150):
            rng, damaged = random.Random(seed), bytearray(whole)
            for _ in range(rng.randint(1, 3)):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            files[0].write_bytes(damaged[: rng.choice([None, None, rng.randrange(len(damaged))])])
            try:
                self.outcome(*files)
            except Exception as error:
                pytest.fail(f"seed {seed}: {error!r}")

    def test_a_sound_set_is_accepted(self, files):
        assert self.outcome(*files)


def reshape(content: Content, root: Path, rng: random.Random) -> None:
    """Gives an image another shape, an extreme one, and one instance that fills it."""
    row = rng.choice(content["images"])
    row["height"], row["width"] = rng.choice([(1, 600), (600, 1), (1, 1), (2, 300), (33, 31)])
    others = [a for a in content["annotations"] if a["image_id"] != row["id"]]
    filled = {"size": [row["height"], row["width"]], "counts": [0, row["height"] * row["width"]]}
    whole = {"id": 77, "image_id": row["id"], "category_id": 5, "segmentation": filled, "iscrowd": 0}
    content["annotations"] = [*others, whole]
    Image.new("RGB", (row["width"], row["height"]), (9, 99, 199)).save(root / row["file_name"])


def deepen(content: Content, root: Path, rng: random.Random) -> None:
    """Gives an image pixels of another kind."""
    row = rng.choice(content["images"])
    kind = rng.choice([np.uint16, np.uint16, np.int32, np.float32])
    values = np.random.default_rng(0).integers(0, 2**16, (row["height"], row["width"])).astype(kind)
    Image.fromarray(values).save(root / row["file_name"], format="TIFF")


def damage(content: Content, root: Path, rng: random.Random) -> None:
    """Empties an image file, cuts it off, or takes it away."""
    path = root / rng.choice(content["images"])["file_name"]
    whole = path.read_bytes()
    path.write_bytes(whole[: rng.choice([0, 20, len(whole) // 2])])
    if rng.random() < 0.2:
        path.unlink()


def confuse(content: Content, _: Path, rng: random.Random) -> None:
    """Changes the json, often in what only evaluation reads."""
    if rng.random() < 0.3:
        row = rng.choice(content["annotations"])
        row.update({rng.choice(["area", "bbox", "iscrowd"]): copy.deepcopy(rng.choice(JUNK))})
    else:
        mutate(content, rng)


class TestTrainingFuzz:
    def outcome(self, annotations: Path, images: Path, output: Path) -> str:
        """What two steps and an evaluation end with, which must be what the data check has foretold."""
        split = {"annotations": str(annotations), "images": str(images)}
        data = {**CONFIG["data"], "train": split, "val": split}
        train = {"steps": 2, "batch_size": 2}
        config = parse_config({**CONFIG, "output": str(output), "data": data, "train": train}, where="here")
        try:
            is_valid = check_data(annotations, images).is_valid
        except DataError:
            is_valid = False
        try:
            loop.train(config, console=Console(quiet=True))
        except UserError as error:
            assert_one_sentence(error)
            ends_well = False
        else:
            ends_well = True
        assert ends_well == is_valid
        return "trained" if ends_well else "refused"

    def test_damaged_sets(self, tmp_path):
        outcomes = []
        for seed in range(36):
            rng, content, folder = random.Random(seed), sound(), tmp_path / str(seed)
            folder.mkdir()
            _, images = write_set(folder, content)
            change = (reshape, deepen, damage, confuse)[seed % 4]
            change(content, images, rng)
            try:
                outcomes.append(self.outcome(write_json(folder, content), images, folder / "runs"))
            except Exception as error:
                pytest.fail(f"seed {seed}: {error!r}")
        assert set(outcomes[::4]) == {"trained"}
        assert set(outcomes[2::4]) == {"refused"}
        assert set(outcomes[1::4]) == set(outcomes[3::4]) == {"refused", "trained"}
