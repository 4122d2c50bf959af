"""The code and the commands of README.md and docs/ work.

The Python blocks of one file run one after another, as one program, in a folder that holds what they speak of:
`runs/cells`, `photo.jpg`, `photos/`, `images/`, `train.json`, `val.json`. A block that cannot run has a comment
in the line above it: `<!-- not run: reason -->`.
"""

import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
from PIL import Image

import uniquery
from helpers.small_runs import small_config
from helpers.small_segmenters import drawn
from uniquery.cli import build_parser
from uniquery.structures import Outputs

ROOT = Path(__file__).parents[1]
FILES = {
    str(path.relative_to(ROOT)): path.read_text() for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
}
BLOCK = re.compile(r"(?:<!-- not run:(?P<reason>.*?)-->\n)?```python\n(?P<code>.*?)```", re.DOTALL)
SHELL_BLOCK = re.compile(r"```(?:bash|sh)\n(.*?)```", re.DOTALL)


def blocks(name: str) -> list[re.Match[str]]:
    return list(BLOCK.finditer(FILES[name]))


def commands() -> list[str]:
    """Every command line of a shell block, and those inside the README's sentences."""
    lines = [
        line
        for text in FILES.values()
        for block in SHELL_BLOCK.findall(text)
        for line in block.replace("\\\n", " ").splitlines()
    ]
    found = [match[1] for line in lines if (match := re.search(r"(?:^|-m )(uniquery .*)", line)) and "…" not in line]
    return found + re.findall(r"`(uniquery [^`]*)`", FILES["README.md"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory, scenes) -> Path:
    """What the blocks and the commands speak of."""
    root = tmp_path_factory.mktemp("docs")
    config = uniquery.load_config(
        small_config(root, scenes), ["name=cells", f"output={root / 'runs'}", "model.score_threshold=0"]
    )
    uniquery.train(config)
    shutil.copytree(scenes.images("train"), root / "images")
    for split in ("train", "val"):
        shutil.copy(scenes.annotations(split), root / f"{split}.json")
        shutil.copytree(scenes.images(split), root / "images", dirs_exist_ok=True)
    shutil.copytree(scenes.images("val"), root / "photos")
    Image.open(next((root / "photos").iterdir())).save(root / "photo.jpg")
    return root


def hugging_face(monkeypatch) -> dict[str, object]:
    """A small model in place of a download, and a batch for it."""
    transformers = pytest.importorskip("transformers")
    stages = {"embed_dim": 8, "depths": [1] * 4, "num_heads": [1] * 4, "window_size": 4}
    backbone = transformers.SwinConfig(**stages, out_features=["stage1", "stage2", "stage3", "stage4"])
    sizes = {"feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32, "num_queries": 20, "train_num_points": 64}
    layers = {"encoder_layers": 1, "encoder_feedforward_dim": 32, "decoder_layers": 2, "dim_feedforward": 32}

    def from_pretrained(name: str, *, num_labels: int, **_: object) -> object:
        heads = {"num_attention_heads": 4, "num_labels": num_labels}
        config = transformers.Mask2FormerConfig(backbone_config=backbone, **sizes, **layers, **heads)
        return transformers.Mask2FormerForUniversalSegmentation(config)

    monkeypatch.setattr(transformers.Mask2FormerForUniversalSegmentation, "from_pretrained", from_pretrained)
    images, targets = drawn([(64, 96), (96, 64)], [2, 1])
    batch = {
        "pixel_values": images.pixels / 255.0,
        "mask_labels": [target.masks.float() for target in targets],
        "class_labels": [target.labels for target in targets],
    }
    return {"images": images, "targets": targets, "batch": batch, "image_ids": [0, 1]}


# The names that a file's blocks take as given.
SETUPS = {
    "docs/huggingface.md": hugging_face,
    "docs/add_a_segmenter.md": lambda _: {"dataclass": dataclass, "Outputs": Outputs, "Tensor": torch.Tensor},
}


def test_there_is_something_to_check():
    assert len(commands()) >= 8
    assert blocks("README.md")
    assert set(SETUPS) <= {name for name in FILES if blocks(name)}


@pytest.mark.parametrize("command", commands())
def test_commands_parse(command):
    build_parser().parse_args(shlex.split(command)[1:])


@pytest.mark.parametrize("name", [name for name in FILES if blocks(name)])
def test_python_blocks_run(name, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    namespace = SETUPS[name](monkeypatch) if name in SETUPS else {}
    namespace["__name__"] = name  # dataclasses look their module up
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for block in blocks(name):
        if block["reason"] is None:
            line = FILES[name].count("\n", 0, block.start("code"))
            exec(compile("\n" * line + block["code"], name, "exec"), namespace)
    assert capsys.readouterr().out or name != "README.md"


@pytest.mark.parametrize("name", [name for name in FILES if blocks(name)])
def test_blocks_that_do_not_run_say_why(name):
    assert all(block["reason"] is None or block["reason"].strip() for block in blocks(name))
