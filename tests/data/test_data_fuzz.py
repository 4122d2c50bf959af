"""Whatever happens to a data set, it is accepted whole or refused in one sentence."""

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coco_files import Content, sound, write_json, write_set
from uniquery.data.check import check_data
from uniquery.data.coco import CocoData
from uniquery.errors import DataError


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
            assert report.is_sound or any(p.fatal for p in report.problems)
            for problem in report.problems:
                self.one_line(problem.text)
        except DataError as error:
            self.one_line(error)
            report = None
        try:
            data = CocoData(path, images)
            for index in range(len(data)):
                _, masks, labels = data.load(index)
                assert len(masks) == len(labels) == int(data.instances_per_image()[index])
                assert masks.flatten(1).any(1).all()
        except DataError as error:
            self.one_line(error)
            return False
        assert report is not None
        assert report.is_sound
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
