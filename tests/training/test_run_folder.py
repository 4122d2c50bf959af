"""The folder of a run: one place for all its names, and files that are written and read back."""

import ast
import json
from pathlib import Path

import pytest

import uniquery
from uniquery.errors import ConfigError, DataError, UserError
from uniquery.segmenters import SEGMENTERS
from uniquery.training.config import load_config
from uniquery.training.run_folder import RunFolder

SOURCE = Path(uniquery.__file__).parent


@pytest.fixture
def folder(tmp_path):
    run = RunFolder(tmp_path / "runs" / "mine")
    run.create(load_config("demo"), {"torch": "2.6"})
    return run


def test_what_is_written_is_read(folder):
    assert folder.read_config() == load_config("demo")
    assert folder.config_tables()["name"] == "demo"
    assert folder.read_environment() == {"torch": "2.6"}
    folder.write_predictions([{"image_id": 1}])
    assert folder.read_predictions() == [{"image_id": 1}]
    folder.write_diagnosis({"images": 4})
    assert folder.read_diagnosis() == {"images": 4}


def test_a_resumed_run_keeps_its_environment(folder):
    folder.create(load_config("demo", ["seed=3"]), None)
    assert folder.read_config().seed == 3
    assert folder.read_environment() == {"torch": "2.6"}


def test_an_empty_folder(tmp_path):
    run = RunFolder(tmp_path)
    assert not run.is_run()
    assert run.checkpoints() == []
    assert (run.config_text(), run.config_tables(), run.read_environment(), run.read_diagnosis()) == ("", {}, {}, {})
    with pytest.raises(ConfigError, match=r"config\.yaml cannot be read"):
        run.read_config()
    with pytest.raises(DataError, match=r"predictions\.json cannot be read"):
        run.read_predictions()
    with pytest.raises(UserError, match=r"metrics\.jsonl: no such file"):
        run.read_metrics()


def test_the_run_of_a_model(folder):
    folder.metrics_file.write_text("")
    for path in (folder.path, folder.best, folder.last / "model.safetensors"):
        assert RunFolder.of_model(path) == folder
    assert RunFolder.of_model(folder.path.parent) is None
    folder.metrics_file.unlink()
    assert RunFolder.of_model(folder.path) is None


def test_checkpoints_newest_first(folder):
    for name in ("last.2", "last", "last.1", "last.damaged", "best"):
        (folder.path / name).mkdir()
    assert [p.name for p in folder.checkpoints()] == ["last", "last.1", "last.2"]
    folder.last.rename(folder.path / ".last.old")  # killed between the two renames of a save
    assert folder.checkpoints()[0] == folder.last


def test_each_process_has_a_folder_for_its_non_finite_step(folder):
    assert [folder.non_finite_step(rank).name for rank in (0, 1)] == ["non_finite_step", "non_finite_step-1"]


def test_broken_files_are_named(folder):
    for file, read in (
        (folder.environment_file, folder.read_environment),
        (folder.diagnosis_file, folder.read_diagnosis),
        (folder.predictions_file, folder.read_predictions),
        (folder.config_file, folder.read_config),
        (folder.config_file, folder.config_tables),
    ):
        file.write_text("[1")
        with pytest.raises(UserError, match=file.name):
            read()


def texts(module: Path) -> set[str]:
    """All string literals of a module, without docstrings."""
    tree = ast.parse(module.read_text())
    documentation = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and isinstance(node.body[0], ast.Expr)
    }
    constants = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return {node.value for node in constants if id(node) not in documentation}


def test_no_other_module_spells_the_names_of_the_files():
    run = RunFolder(Path("run"))
    files = {run.config_file, run.environment_file, run.metrics_file, run.predictions_file, run.report_file}
    files |= {run.diagnosis_file, run.response_file, run.non_finite_step(0)}
    names = {file.name for file in files}
    spelled = {module.name: texts(module) & names for module in SOURCE.rglob("*.py") if module.name != "run_folder.py"}
    assert not {module: found for module, found in spelled.items() if found}


def test_training_names_no_segmenter():
    for module in (SOURCE / "training").glob("*.py"):
        text = module.read_text().lower()
        assert not [name for name in SEGMENTERS if name in text], module.name


def test_a_run_writes_lines_that_its_folder_reads(folder):
    lines = [
        {"kind": "train", "step": 1, "images": 2, "losses": {"loss_mask": 0.5}, "lr": 0.1},
        {"kind": "skipped", "step": 2, "losses": {"loss_mask": "nan"}, "grad_norm": "inf", "image_ids": [3]},
        {"kind": "eval", "step": 2, "weights": "ema", "metrics": {"AP": None}},
    ]
    folder.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [line.kind for line in folder.read_metrics()] == ["train", "skipped", "eval"]
