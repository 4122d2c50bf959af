"""Pushing a model and loading it again, against a server on this machine."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load as load_tensors

import uniquery
from helpers.hub_server import hub_server
from helpers.small_runs import small_config
from uniquery.cli import main
from uniquery.errors import CheckpointError, UserError
from uniquery.hub.push import push_model, write_published_files
from uniquery.weights.hub import download_model
from uniquery.weights.model_file import MODEL_FILE, Thresholds, read_model_info, store_thresholds

constants = pytest.importorskip("huggingface_hub.constants")
REPOSITORY = "someone/cells"


@pytest.fixture(scope="module")
def trained(tmp_path_factory, scenes) -> Path:
    """A run with chosen thresholds."""
    folder = tmp_path_factory.mktemp("private place")
    uniquery.train(uniquery.load_config(small_config(folder, scenes)))
    run = folder / "runs" / "small"
    store_thresholds(run, Thresholds((0.25, 0.5, 0.75), 0.4, "best-f1"))
    return run


@pytest.fixture
def server(tmp_path, monkeypatch):
    """The server, in place of the real one, and an empty cache."""
    with hub_server() as state:
        monkeypatch.setattr(constants, "ENDPOINT", state.url)
        template = state.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        yield state


def test_push_then_load(trained, server, scenes, capsys):
    assert main(["push", str(trained), REPOSITORY]) == 0
    assert f"hf://{REPOSITORY}@" in capsys.readouterr().out
    own, shared = uniquery.load(trained), uniquery.load(f"hf://{REPOSITORY}")
    assert shared.info == own.info
    assert shared.thresholds == Thresholds((0.25, 0.5, 0.75), 0.4, "best-f1")
    weights = own.segmenter.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in shared.segmenter.state_dict().items())
    picture = next(scenes.images("val").iterdir())
    assert torch.equal(
        own.predict(picture, score_threshold=0).scores, shared.predict(picture, score_threshold=0).scores
    )


def test_the_command_line_takes_an_address(trained, server, scenes, tmp_path):
    push_model(trained, REPOSITORY)
    assert main(["predict", f"hf://{REPOSITORY}", str(scenes.images("val")), "-o", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "results.json").is_file()
    data = (str(scenes.annotations("val")), str(scenes.images("val")))
    assert main(["eval", f"hf://{REPOSITORY}", "--data", *data, "--workers", "0"]) == 0


def test_training_starts_from_an_address(trained, server, scenes, tmp_path):
    push_model(trained, REPOSITORY)
    overrides = [f"train.init_from=hf://{REPOSITORY}", "train.steps=1", "optim.lr=1e-12"]
    config = uniquery.load_config(small_config(tmp_path, scenes), overrides)
    weights = uniquery.load(trained / "best").segmenter.state_dict()
    started = uniquery.load(uniquery.train(config)).segmenter.state_dict()
    assert all(torch.allclose(started[name], weights[name], atol=1e-6) for name in weights if "bias" in name)


@pytest.mark.slow
def test_a_program_of_its_own(trained, server, tmp_path):
    """With the environment variables that users set, not with patched constants."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": server.url,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_XET": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    code = f"import uniquery.cli as c, uniquery; assert c.main(['push', {str(trained)!r}, '{REPOSITORY}']) == 0; "
    code += f"print(uniquery.load('hf://{REPOSITORY}').classes)"
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    asked = len(server.requests)
    offline = {**environment, "HF_HUB_OFFLINE": "1"}
    load = f"import uniquery; print(uniquery.load('hf://{REPOSITORY}@main').classes)"
    again = subprocess.run(
        [sys.executable, "-c", load], check=False, env=offline, capture_output=True, text=True, timeout=120
    )
    assert again.stdout.splitlines()[-1] == done.stdout.splitlines()[-1]
    assert len(server.requests) == asked


class TestWhatIsUploaded:
    @pytest.fixture
    def files(self, trained, server) -> dict[str, bytes]:
        push_model(trained, REPOSITORY)
        return server.files(REPOSITORY)

    def test_four_files(self, files):
        assert set(files) == {"README.md", MODEL_FILE, "checksums.json", "config.json"}
        assert load_tensors(files[MODEL_FILE])

    def test_no_local_path_leaves_the_machine(self, trained, server, files, scenes, tmp_path):
        everything = b"\n".join([*server.sent, *server.objects.values(), *files.values()])
        secrets = [Path.home(), trained, trained.parent, scenes.root, scenes.images("train"), Path.cwd(), tmp_path]
        for path in secrets:
            assert str(path).encode() not in everything
            assert str(path.resolve()).encode() not in everything
        assert b"private place" not in everything
        assert b"config.yaml" not in everything

    def test_the_settings_have_no_paths_and_are_a_configuration(self, files):
        config = json.loads(files["config.json"])
        assert {"name", "output"}.isdisjoint(config)
        assert (config["data"]["train"], config["data"]["val"], config["train"]["init_from"]) == (None, None, None)
        assert uniquery.load_config("demo", list(config.items())).train.steps == 4

    def test_the_page(self, trained, files):
        _, header, page = files["README.md"].decode().split("---\n", 2)
        header = yaml.safe_load(header)
        assert header["library_name"] == "uniquery"
        assert header["pipeline_tag"] == "image-segmentation"
        lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
        line = max((line for line in lines if line["kind"] == "eval"), key=lambda line: line["metrics"]["AP"])
        best, per_class = line["metrics"], line["per_class"]
        figures = {figure["type"]: figure["value"] for figure in header["model-index"][0]["results"][0]["metrics"]}
        assert figures["AP"] == round(best["AP"], 2)
        assert f"| AP | {best['AP']:.1f} |" in page
        names = [category.name for category in read_model_info(trained).categories]
        scores = (0.25, 0.5, 0.75)
        for label, (name, score) in enumerate(zip(names, scores, strict=True)):
            measured = "n/a" if per_class[name] is None else f"{per_class[name]:.1f}"
            assert f"| {label} | {name} | {label + 1} | {measured} | {score:.3f} |" in page
        assert "best-f1" in page
        checksums = json.loads((trained / "last" / "trainer.json").read_text())["data_checksums"]
        assert all(f"| {split} | `{checksum:08x}` |" in page for split, checksum in checksums.items())
        assert f'uniquery.load("hf://{REPOSITORY}")' in page

    def test_weight_files_lose_their_folder(self, trained, tmp_path):
        """And the model stays the same: norm and frozen stages depend on whether weights are random."""
        info, state = uniquery.weights.model_file.read_model_file(trained)
        backbone = info.backbone.model_copy(update={"weights": "/secret place/tiny.pth"})
        file = tmp_path / MODEL_FILE
        content = uniquery.weights.checksummed.TensorFile(state, replace(info, backbone=backbone).to_metadata())
        uniquery.weights.checksummed.write_checksummed(tmp_path, {MODEL_FILE: content})
        (tmp_path / "out").mkdir()
        write_published_files(file, REPOSITORY, tmp_path / "out")
        assert read_model_info(tmp_path / "out").backbone.weights == "tiny.pth"
        assert all(b"secret" not in written.read_bytes() for written in (tmp_path / "out").iterdir())
        assert "It was not evaluated." in (tmp_path / "out" / "README.md").read_text()

    def test_a_class_with_a_path_stops_it(self, trained, server, tmp_path, capsys):
        info, state = uniquery.weights.model_file.read_model_file(trained)
        first, *others = info.categories
        named = replace(info, categories=(replace(first, name=f"{Path.home()}/cats"), *others))
        content = uniquery.weights.checksummed.TensorFile(state, named.to_metadata())
        uniquery.weights.checksummed.write_checksummed(tmp_path, {MODEL_FILE: content})
        asked = len(server.requests)
        assert main(["push", str(tmp_path), REPOSITORY]) == 2
        assert f"would contain {Path.home()}, a path of this machine" in capsys.readouterr().err
        assert len(server.requests) == asked

    def test_strange_class_names_stay_inside_their_cell(self, trained, tmp_path):
        info, state = uniquery.weights.model_file.read_model_file(trained)
        first, *others = info.categories
        named = replace(info, categories=(replace(first, name="a|b\n<script>"), *others))
        content = uniquery.weights.checksummed.TensorFile(state, named.to_metadata())
        uniquery.weights.checksummed.write_checksummed(tmp_path, {MODEL_FILE: content})
        (tmp_path / "out").mkdir()
        write_published_files(tmp_path, REPOSITORY, tmp_path / "out")
        assert "| a\\|b &lt;script> |" in (tmp_path / "out" / "README.md").read_text()


class TestCache:
    def test_a_cached_model_asks_nothing(self, trained, server):
        address = push_model(trained, REPOSITORY)
        uniquery.load(f"hf://{REPOSITORY}")
        asked = len(server.requests)
        for again in (f"hf://{REPOSITORY}", address):
            uniquery.load(again)
        assert len(server.requests) == asked

    def test_offline_the_cache_is_all_there_is(self, trained, server, monkeypatch):
        push_model(trained, REPOSITORY)
        uniquery.load(f"hf://{REPOSITORY}")
        asked = len(server.requests)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        uniquery.load(f"hf://{REPOSITORY}")
        with pytest.raises(CheckpointError, match="hf://someone/other is not in the cache"):
            uniquery.load("hf://someone/other")
        assert len(server.requests) == asked

    def test_a_branch_is_looked_up_and_a_commit_stays(self, trained, server):
        first = push_model(trained, REPOSITORY)
        old = uniquery.load(f"hf://{REPOSITORY}")
        store_thresholds(trained, Thresholds((0.1, 0.1, 0.1), 0.5, "precision=0.9"))
        try:
            push_model(trained, REPOSITORY)
        finally:
            store_thresholds(trained, old.thresholds)
        assert uniquery.load(f"hf://{REPOSITORY}@main").thresholds.rule == "precision=0.9"
        assert uniquery.load(first).thresholds.rule == "best-f1"

    def test_only_the_model_is_downloaded(self, trained, server, tmp_path):
        push_model(trained, REPOSITORY)
        server.files(REPOSITORY)["evil.pkl"] = b"cos\nsystem\n(S'true'\ntR."
        folder = download_model(f"hf://{REPOSITORY}", MODEL_FILE).parent
        assert {file.name for file in folder.iterdir()} == {MODEL_FILE, "checksums.json"}

    def test_thresholds_are_not_stored_in_the_cache(self, trained, server):
        push_model(trained, REPOSITORY)
        with pytest.raises(CheckpointError, match="is shared: store thresholds in the model of your run"):
            store_thresholds(f"hf://{REPOSITORY}", Thresholds((0.1,) * 3, 0.5, "x"))


class TestMistakes:
    @pytest.mark.parametrize("name", ["cells", "a/b/c", "../x", "user/", "", "a b/c", "user/name@main"])
    def test_names_of_repositories(self, trained, server, name):
        with pytest.raises(UserError, match="write user/name"):
            push_model(trained, name)
        assert not server.requests

    @pytest.mark.parametrize(
        "address", ["hf://", "hf://cells", "hf://a/b/c", "hf://../..", "hf://a/b@", "hf:///etc/passwd"]
    )
    def test_addresses(self, server, address):
        with pytest.raises(CheckpointError, match="names no model: write hf://user/name"):
            uniquery.load(address)
        assert not server.requests

    def test_what_does_not_exist(self, trained, server):
        push_model(trained, REPOSITORY)
        with pytest.raises(CheckpointError, match="There is no hf://someone/else, or it is private"):
            uniquery.load("hf://someone/else")
        with pytest.raises(CheckpointError, match="There is no such revision: hf://someone/cells@v9"):
            uniquery.load(f"hf://{REPOSITORY}@v9")

    def test_a_model_of_another_library(self, server):
        server.commits["someone/bert"] = [{"config.json": b"{}", "pytorch_model.bin": b"\x80\x04."}]
        with pytest.raises(CheckpointError, match=r"hf://someone/bert has no model\.safetensors"):
            uniquery.load("hf://someone/bert")

    def test_a_pickle_under_our_name_is_not_read(self, server):
        server.commits["someone/evil"] = [{MODEL_FILE: b"\x80\x04\x95" + b"cos\nsystem\n(S'true'\ntR."}]
        with pytest.raises(CheckpointError, match="damaged or not a safetensors file"):
            uniquery.load("hf://someone/evil")

    def test_a_damaged_file_is_found(self, trained, server):
        push_model(trained, REPOSITORY)
        files = server.files(REPOSITORY)
        files[MODEL_FILE] = files[MODEL_FILE][:-1] + bytes([files[MODEL_FILE][-1] ^ 1])
        with pytest.raises(CheckpointError, match="its checksum does not match"):
            uniquery.load(f"hf://{REPOSITORY}")

    @pytest.mark.parametrize("status", [401, 403])
    def test_no_right_to_write(self, trained, server, status, capsys):
        server.refuse = status
        assert main(["push", str(trained), REPOSITORY]) == 2
        error = capsys.readouterr().err
        assert "hf auth login" in error
        assert error.count("\n") == 1

    def test_no_server(self, trained, server, monkeypatch, capsys):
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        assert main(["push", str(trained), REPOSITORY]) == 2
        assert "error: Cannot transfer hf://someone/cells: [Errno 111] Connection refused." in capsys.readouterr().err
        with pytest.raises(CheckpointError, match="cannot be reached"):
            uniquery.load("hf://someone/other")

    def test_without_the_package(self, trained, monkeypatch):
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
        for use in (lambda: uniquery.load("hf://a/b"), lambda: push_model(trained, "a/b")):
            with pytest.raises(UserError, match=r"pip install 'uniquery\[hub\]'"):
                use()
