"""docs/own_data.md as a user follows it: every command runs, in order, on small data in the formats it speaks of."""

import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.doc_blocks import lines_to_run
from helpers.foreign_sets import (
    Picture,
    of_coco,
    write_cvat,
    write_id_masks,
    write_images,
    write_label_studio,
    write_voc,
    write_yolo,
)
from uniquery.cli import main
from uniquery.data.coco import CocoData

PAGE = "docs/own_data.md"
# Makes the training of the page a matter of seconds; the commands are otherwise as they stand there.
SMALL = [
    "backbone={name: tiny, weights: random}",
    "model={name: condinst, channels: 32, head_convs: 1, mask_channels: 32, mask_convs: 1, mask_norm: group}",
    "train={steps: 2, batch_size: 2, eval_every: 1}",
    "data.test_size={short: 64, longest: 64}",
    "data.workers=0",
]

pytestmark = pytest.mark.slow


def commands() -> list[list[str]]:
    return [shlex.split(line)[1:] for line in lines_to_run(PAGE)]


def patients(scenes) -> list[Picture]:
    """Scenes with the two classes that the writers know, named after patients."""
    given = of_coco(CocoData(scenes.annotations("train"), scenes.images("train")), 6)
    return [
        replace(
            picture,
            name=f"patient{number // 2}_{number}.png",
            objects=[(("person", "dog")[n % 2], mask) for n, (_, mask) in enumerate(picture.objects)],
        )
        for number, picture in enumerate(given)
    ]


@pytest.fixture
def folder(tmp_path, scenes, monkeypatch) -> Path:
    """The annotations and images that the page imports, in the working folder."""
    given = patients(scenes)
    write_id_masks(tmp_path, given)
    write_images(tmp_path / "photos", given)
    write_voc(tmp_path / "VOCdevkit" / "VOC2012", given, {"train": [Path(p.name).stem for p in given]})
    write_cvat(tmp_path, given)
    write_label_studio(tmp_path, given)
    write_yolo(tmp_path / "yolo", {"a": ["0 0.1 0.2 0.5 0.2 0.5 0.75"]}, ["cell"])
    (tmp_path / "data.yaml").write_text("path: yolo\ntrain: images/train\nnames: [cell]\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_command_of_the_page_runs(folder, capsys):
    ran = []
    for command in commands():
        if command[:2] == ["data", "import"]:  # the page shows one output folder for several formats
            shutil.rmtree(command[command.index("--output") + 1], ignore_errors=True)
        extra = [word for setting in SMALL for word in ("--set", setting)] if command[0] == "train" else []
        assert main([*command, *extra]) == 0, (command, capsys.readouterr())
        ran.append(" ".join(command[:2]))
    assert {"data import", "data check", "data split", "data preview", "train condinst_lite0"} <= set(ran)
    files = {path.name for path in (folder / "predictions").iterdir()}
    assert {"results.json", "labels", "labelme", "geojson"} <= files
