"""Files from strangers: nothing in them is run, and nothing outside their place is read or written."""

import json
import pickle
import shutil
import struct
import zlib
from pathlib import Path

import pytest
import torch

from helpers.small_runs import small_config
from uniquery.cli import main


class Trap:
    """Unpickled by a careless reader, creates a file."""

    def __init__(self, witness: Path):
        self.witness = witness

    def __reduce__(self):
        return Path.touch, (self.witness,)


@pytest.fixture
def witness(tmp_path):
    """What must not come to be."""
    return tmp_path / "executed"


@pytest.fixture
def traps(tmp_path, witness) -> list[Path]:
    """Pickles that run code, raw and in torch's archive, under every name that a reader of weights may look at."""
    raw, zipped = tmp_path / "raw.pth", tmp_path / "zipped.pt"
    raw.write_bytes(pickle.dumps({"model": Trap(witness)}, protocol=2))
    torch.save({"model": {"head.classes.weight": Trap(witness)}}, zipped)
    pickle.loads(raw.read_bytes())
    assert witness.exists()  # the trap works
    witness.unlink()
    return [raw, zipped]


def refused(capsys, *arguments) -> str:
    capsys.readouterr()
    assert main([str(a) for a in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "Traceback" not in error
    return error


@pytest.mark.parametrize("key", ["train.init_from", "backbone.weights"])
def test_weights_that_are_programs(scenes, tmp_path, capsys, traps, witness, key):
    for trap in traps:
        refused(capsys, "train", small_config(tmp_path, scenes), "--set", f"{key}={trap}")
    assert not witness.exists()


def test_checkpoints_that_are_programs(scenes, tmp_path, capsys, traps, witness):
    config = small_config(tmp_path, scenes)
    assert main(["train", str(config), "--set", "train.steps=1"]) == 0
    run = tmp_path / "runs" / "small"
    photo = next(scenes.images("val").iterdir())
    for trap in traps:
        for name in ("model.safetensors", "trainer.safetensors", "trainer.json"):
            shutil.copy(trap, run / "last" / name)
            (run / "last" / "checksums.json").unlink(missing_ok=True)
            assert "intact" in refused(capsys, "train", config, "--set", "train.steps=1", "--resume")
        for place in (trap, run / "last", run / "last" / "model.safetensors"):
            refused(capsys, "predict", place, photo, "-o", tmp_path / "out")
    assert not witness.exists()


def test_a_configuration_that_is_a_program(tmp_path, capsys, witness):
    file = tmp_path / "evil.yaml"
    file.write_text(
        f"name: !!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path ['{witness}']]"
    )
    assert "not valid yaml" in refused(capsys, "config", "show", file)
    assert not witness.exists()


@pytest.mark.parametrize("name", ["..", "../up", "a/b", "/abs", ".", "", "a\nb"])
def test_a_run_stays_in_its_output_folder(scenes, tmp_path, capsys, name):
    config = small_config(tmp_path, scenes, name=name)
    assert "name" in refused(capsys, "train", config)


@pytest.mark.parametrize("name", ["../secret.png", "sub/../../secret.png", "{root}/secret.png"])
def test_annotations_that_reach_out_of_the_image_folder(scenes, tmp_path, capsys, name):
    images = tmp_path / "images"
    shutil.copytree(scenes.images("train"), images)
    shutil.copy(next(images.iterdir()), tmp_path / "secret.png")
    content = json.loads(scenes.annotations("train").read_text())
    content["images"][0]["file_name"] = name.format(root=tmp_path)
    (tmp_path / "evil.json").write_text(json.dumps(content))
    error = refused(capsys, "train", small_config(tmp_path, scenes), "--train", tmp_path / "evil.json", images)
    assert "does not name a file inside the image folder" in error


def test_an_image_that_claims_an_absurd_size_is_not_decoded(scenes, tmp_path, capsys):
    images = tmp_path / "images"
    shutil.copytree(scenes.images("train"), images)
    for file in images.iterdir():
        file.write_bytes(png_header(100_000, 100_000))
    config = small_config(tmp_path, scenes)
    error = refused(capsys, "train", config, "--train", scenes.annotations("train"), images)
    assert "claims to have more than 178,956,970 pixels: refused" in error
    file = next(images.iterdir())
    assert main(["train", str(config), "--name", "sound", "--set", "train.steps=1"]) == 0
    assert "refused" in refused(capsys, "predict", tmp_path / "runs" / "sound", file, "-o", tmp_path / "out")


def png_header(width: int, height: int) -> bytes:
    """A PNG file that is nothing but its claim."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
