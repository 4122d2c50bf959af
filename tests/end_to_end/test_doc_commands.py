"""The commands of README.md and docs/ as a user types them: those of a file run in order, on small data.

A comment above a block names what is not run (helpers/doc_blocks.py). docs/own_data.md has a test of its own.
"""

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

import uniquery
from helpers.doc_blocks import FILES, ROOT, blocks, lines_to_run
from helpers.hub_server import hub_server
from helpers.small_runs import small_config
from uniquery.cli import main

# Makes trainings a matter of seconds; the commands are otherwise as they stand there.
SMALL = [
    "backbone={name: tiny, weights: random}",
    "model={name: condinst, channels: 32, head_convs: 1, mask_channels: 32, mask_convs: 1, mask_norm: group}",
    "train.steps=2",
    "train.epochs=null",
    "train.batch_size=2",
    "data.augment=[]",
    "data.test_size={short: 64, longest: 96}",
    "data.workers=0",
]
RUNS = ("cells", "other", "table3-both", "table1-solov2-r50")
PAGES = [name for name in FILES if name != "docs/own_data.md" and lines_to_run(name)]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, scenes) -> Path:
    """Runs, data and pictures under the names that the files use."""
    root = tmp_path_factory.mktemp("docs")
    config = small_config(root, scenes)
    for name in RUNS:
        uniquery.train(uniquery.load_config(config, [f"name={name}", "model.score_threshold=0"]))
    for split in ("train", "val"):
        for annotations, images in (("", "images"), ("annotations", f"images/{split}"), ("data/cells", "")):
            (root / annotations).mkdir(parents=True, exist_ok=True)
            shutil.copy(scenes.annotations(split), root / annotations / f"{split}.json")
            shutil.copytree(scenes.images(split), root / (images or "data/cells/images"), dirs_exist_ok=True)
    for folder in ("photos", "more", "data/coco/test2017"):
        shutil.copytree(scenes.images("val"), root / folder)
    picture = Image.open(next((root / "photos").iterdir())).convert("RGB")
    for name in ("photo.jpg", "photo.png", "slide.tif", "more/one.jpg"):
        picture.save(root / name)
    (root / "data/coco/annotations").mkdir()
    without_instances(root / "val.json", root / "data/coco/annotations/image_info_test-dev2017.json")
    (root / "jitter.yaml").write_text(blocks("docs/studies.md", "yaml")[0]["code"])
    return root


def without_instances(source: Path, target: Path) -> None:
    content = json.loads(source.read_text())
    content.pop("annotations")
    target.write_text(json.dumps(content))


@pytest.fixture
def folder(prepared, tmp_path, monkeypatch) -> Path:
    """A copy to work in."""
    root = tmp_path / "work"
    shutil.copytree(prepared, root)
    monkeypatch.chdir(root)
    return root


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Iterator[None]:
    """A server on this machine in place of the Hugging Face Hub."""
    constants = pytest.importorskip("huggingface_hub.constants")
    with hub_server() as state:
        monkeypatch.setattr(constants, "ENDPOINT", state.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", state.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        yield


def run(line: str) -> None:
    """Runs a command; trainings are small, and may replace a run that is there."""
    program, *words = shlex.split(line)
    if program == "python":
        subprocess.run([sys.executable, ROOT / words[0], *words[1:]], check=True, timeout=300)
        return
    if words[0] in ("train", "study"):
        words += [word for setting in SMALL for word in ("--set", setting)]
    if words[0] == "train" and "--name" in words:
        shutil.rmtree(Path("runs") / words[words.index("--name") + 1], ignore_errors=True)
    assert main(words) == 0, line


@pytest.mark.parametrize("name", PAGES)
def test_every_command_runs(name, folder, hub, capsys):
    pytest.importorskip("onnxscript")
    for line in lines_to_run(name):
        run(line)
    assert capsys.readouterr().out


def test_they_are_many():
    assert sum(len(lines_to_run(name)) for name in PAGES) >= 20
