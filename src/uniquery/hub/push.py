"""Uploads a model with its page: `uniquery push`."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from uniquery import __version__
from uniquery.errors import UserError
from uniquery.hub.card import CardContent, model_card
from uniquery.report.runs import load_run
from uniquery.training.checkpoint import VALUES_FILE
from uniquery.training.config import Config
from uniquery.training.log import EvalLine
from uniquery.training.run_folder import RunFolder
from uniquery.weights.checksummed import TensorFile, read_json, write_checksummed
from uniquery.weights.hub import explain_hub_errors, import_hub, is_repository
from uniquery.weights.model_file import BEST, MODEL_FILE, find_model_file, read_model_file

CARD_FILE, CONFIG_FILE = "README.md", "config.json"
_PLACES = ("name", "output")  # of a run: they say where it is, not what it is


def push_model(path: Path, repository: str) -> str:
    """Uploads a model to the Hub, in one commit; the repository is made if there is none.

    Args:
        path: a run folder (its best model), a checkpoint folder or a model file.
        repository: `user/name`.

    Returns:
        The address of this version, `hf://user/name@commit`.

    Raises:
        CheckpointError: there is no model, or the Hub refuses it.
        UserError: the name is wrong, a file would tell a local path, or `huggingface_hub` is not installed.
    """
    if not is_repository(repository):
        raise UserError(f"'{repository}' is not the name of a repository: write user/name.")
    hub = import_hub()
    with TemporaryDirectory() as folder:
        write_published_files(path, repository, Path(folder))
        with explain_hub_errors(f"hf://{repository}"):
            api = hub.HfApi(library_name="uniquery", library_version=__version__)
            api.create_repo(repository, exist_ok=True)
            commit = api.upload_folder(
                repo_id=repository, folder_path=folder, commit_message=f"Model of uniquery {__version__}"
            )
    return f"hf://{repository}@{commit.oid}"


def write_published_files(path: Path, repository: str, folder: Path) -> None:
    """Writes all that is uploaded: the model, its checksums, its settings and its page, without local paths.

    Raises:
        CheckpointError: there is no model.
        UserError: a file would tell a local path.
    """
    file = find_model_file(path)
    info, state = read_model_file(file)
    info = replace(info, backbone=info.backbone.model_copy(update={"weights": _file_name(info.backbone.weights)}))
    run = RunFolder.of_model(file)
    config = run.read_config() if run else None
    public = _public_settings(config) if config else {}
    checksums = _data_checksums(run) if run else {}
    content = CardContent(repository, info, _evaluation(run, file), public, checksums, __version__)
    texts = {CARD_FILE: model_card(content), CONFIG_FILE: json.dumps(public, indent=2, ensure_ascii=False)}
    for name, text in (*texts.items(), (MODEL_FILE, "\n".join(info.to_metadata().values()))):
        _check_no_path(name, text, _local_paths(file, run, config))
    write_checksummed(folder, {MODEL_FILE: TensorFile(state, info.to_metadata())})
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def _evaluation(run: RunFolder | None, file: Path) -> EvalLine | None:
    """The evaluation of this model file."""
    if run is None:
        return None
    record = load_run(run.path)
    return record.best if file.parent.name == BEST else record.final


def _data_checksums(run: RunFolder) -> dict[str, int]:
    """As the run's last checkpoint has them; empty if there is none."""
    file = run.last / VALUES_FILE
    return dict(read_json(file)["data_checksums"]) if file.is_file() else {}


def _public_settings(config: Config) -> dict[str, Any]:
    """The settings without paths and without the place of the run."""
    backbone = config.backbone.model_copy(update={"weights": _file_name(config.backbone.weights)})
    data = config.data.model_copy(update={"train": None, "val": None})
    train = config.train.model_copy(update={"init_from": None})
    public = config.model_copy(update={"backbone": backbone, "data": data, "train": train})
    return public.model_dump(mode="json", exclude=set(_PLACES))


def _file_name(weights: str | None) -> str | None:
    """The name of a weight file without its folder; `imagenet` and `random` as they are."""
    return weights and re.split(r"[/\\]", weights)[-1]


def _local_paths(file: Path, run: RunFolder | None, config: Config | None) -> set[str]:
    """The folders of this machine that nothing published may name."""
    paths = [Path.home(), file.parent, *([run.path] if run else [])]
    if config:
        splits = [split for split in (config.data.train, config.data.val) if split is not None]
        paths += [path for split in splits for _, path in split if path is not None]
        paths += [Path(text) for text in (config.train.init_from, config.output) if text is not None]
    return {str(one) for path in paths for one in (path.absolute(), path.resolve()) if len(one.parts) > 1}


def _check_no_path(name: str, text: str, paths: set[str]) -> None:
    for path in sorted(paths, key=len, reverse=True):
        if re.search(rf"(?<![\w/.:-]){re.escape(path)}(?![\w-])", text):
            raise UserError(
                f"{name} would contain {path}, a path of this machine, perhaps as a class name: nothing was uploaded."
            )
