"""The code and the commands of README.md and docs/ work.

The Python blocks of one file run one after another, as one program, in a folder that holds what they speak of:
`runs/cells`, `photo.jpg`, `photos/`, `images/`, `train.json`, `val.json`. Of shell blocks, every command is one that
exists, with options that it has; end_to_end/test_doc_commands.py runs them. What is not run has a comment that says why
(helpers/doc_blocks.py). Blocks of the kind `text` are no code.
"""

import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml
from PIL import Image

import uniquery
from helpers.doc_blocks import FILES, ROOT, SHELL, blocks, left_out, lines_to_run, shell_lines
from helpers.small_runs import small_config
from helpers.small_segmenters import drawn
from uniquery.cli import build_parser
from uniquery.settings_reference import list_settings
from uniquery.structures import Outputs
from uniquery.training.config import Config

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def commands() -> list[str]:
    """Every command line of a shell block, and those inside the README's sentences."""
    lines = [line for name in FILES for block in blocks(name, *SHELL) for line in shell_lines(block)]
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


def disc_model() -> dict[str, object]:
    """The model and the data of the example that the page explains."""
    example = runpy.run_path(str(ROOT / "examples" / "plug_in_your_model.py"))
    torch.manual_seed(0)
    images, targets = example["discs"](range(4))
    names = ("decode", "mask_loss")
    return {"model": example["Toy"](), "images": images, "targets": targets} | {name: example[name] for name in names}


def shared_model(monkeypatch) -> dict[str, object]:
    """The run in place of a download."""
    monkeypatch.setattr("uniquery.weights.model_file.download_model", lambda _, file: Path("runs/cells/best") / file)
    return {}


# The names that a file's blocks take as given.
SETUPS = {
    "docs/huggingface.md": hugging_face,
    "docs/add_a_segmenter.md": lambda _: {"dataclass": dataclass, "Outputs": Outputs, "Tensor": torch.Tensor},
    "docs/share.md": shared_model,
    "docs/plug_in.md": lambda _: disc_model(),
}


def test_there_is_something_to_check():
    assert len(commands()) >= 8
    assert blocks("README.md")
    assert set(SETUPS) <= {name for name in FILES if blocks(name, "python")}
    assert all(FILES[name].count("```") == 2 * len(blocks(name)) for name in FILES)  # no block is overlooked


@pytest.mark.parametrize("command", commands())
def test_commands_parse(command):
    build_parser().parse_args(shlex.split(command)[1:])


@pytest.mark.parametrize("name", [name for name in FILES if blocks(name, "python")])
def test_python_blocks_run(name, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    namespace = SETUPS[name](monkeypatch) if name in SETUPS else {}
    namespace["__name__"] = name  # dataclasses look their module up
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for block in blocks(name, "python"):
        if block["reason"] is None:
            line = FILES[name].count("\n", 0, block.start("code"))
            exec(compile("\n" * line + block["code"], name, "exec"), namespace)
    assert capsys.readouterr().out or name != "README.md"


def exists(command: str) -> bool:
    """Whether a command that is not ours names targets, scripts, extras and files of this repository."""
    program, *words = shlex.split(command)
    if program == "make":
        return all(re.search(rf"^{word}:", (ROOT / "Makefile").read_text(), re.MULTILINE) for word in words)
    if program == "python":
        return (ROOT / words[0]).is_file()
    if program == "pip":
        extras = [extra for word in words for found in re.findall(r"\[(.*)\]", word) for extra in found.split(",")]
        return words[0] == "install" and set(extras) <= set(PROJECT["optional-dependencies"])
    files = [words[i + 1] for i, word in enumerate(words) if program == "docker" and word in ("-f", "--file")]
    return all((ROOT / file).is_file() for file in files)


@pytest.mark.parametrize("name", FILES)
def test_every_block_is_run_or_marked(name):
    for block in blocks(name):
        if block["reason"] is not None:
            assert block["reason"].strip()
        if block["kind"] == "yaml":
            assert yaml.safe_load(block["code"])
        elif block["kind"] in SHELL:
            lines = shell_lines(block)
            assert not [line for line in lines if not exists(line)]
            assert all(any(line.startswith(part) for line in lines) for part in left_out(block)), "a mark names nothing"
        else:
            assert block["kind"] in ("python", "text")
    assert all(line.startswith(("uniquery ", "python examples/")) for line in lines_to_run(name))  # what the test runs
    indented = re.sub(r"```.*?```", "", FILES[name], flags=re.DOTALL)
    assert not re.search(
        r"^    (?:uniquery|python|pip|make|docker) ", indented, re.MULTILINE
    )  # a block without a fence


@pytest.mark.parametrize("name", FILES)
def test_links_lead_somewhere(name):
    """On GitHub too, where the page of all settings does not exist."""
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", FILES[name]):
        assert (ROOT / name).parent.joinpath(target).exists() or target == "settings.md", target


def test_the_page_of_settings_has_every_key():
    page = runpy.run_path(str(ROOT / "docs" / "mkdocs_hooks.py"))["settings_page"]()
    for setting in list_settings(Config):
        is_section = setting.is_table and "." not in setting.key
        assert (f"## {setting.key}\n" if is_section else f"| `{setting.key}` |") in page
    assert "| `optim.lr` | float, above 0 | `0.01` | learning rate after the warm-up |" in page
    assert "### model: solov2" in page
    assert all(line.count("|") - line.count("\\|") == 5 for line in page.splitlines() if line.startswith("|"))


def test_the_tables_of_the_evidence_are_those_of_the_results():
    script = runpy.run_path(str(ROOT / "benchmarks" / "evidence.py"))
    page = FILES["docs/evidence.md"]
    assert page.count("<!-- results: ") >= 2
    assert script["with_tables"](page) == page


def test_links_into_the_repository_become_text_on_the_site():
    hook = runpy.run_path(str(ROOT / "docs" / "mkdocs_hooks.py"))["on_page_markdown"]
    assert hook("see [the example](../examples/run.py), [errors](errors.md)", page=None) == (
        "see the example, [errors](errors.md)"
    )


def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(build, check=False, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    pages = {page.name for page in (tmp_path / "site").glob("*.html")}
    loaded = re.findall(
        r'<(?:script|link)[^>]*(?:src|href)="https?://[^"]*', (tmp_path / "site/index.html").read_text()
    )
    assert not loaded  # nothing from other servers
    assert pages >= {Path(name).with_suffix(".html").name for name in FILES if name.startswith("docs/")} | {
        "settings.html"
    }
