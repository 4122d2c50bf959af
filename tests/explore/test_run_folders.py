"""Run folders that change, break, disappear or are not there yet while the page is open."""

import shutil
import signal
import sys
import urllib.request

import pytest

from uniquery.cli import main
from uniquery.errors import UserError
from uniquery.explore.exploration import open_exploration
from uniquery.explore.runs import open_runs

from .conftest import query, serve, work
from .in_browser import Server


def test_new_predictions_are_seen(runs):
    served = serve([runs / "base"])
    work(served.exploration)
    before = served.json("api/state")["runs"][0]
    (runs / "base" / "predictions.json").write_text("[]")
    work(served.exploration)
    after = served.json("api/state")["runs"][0]
    assert after["version"] > before["version"]
    assert set(served.json("api/runs/0/analysis")["ap"]) <= {0.0, None}


@pytest.mark.parametrize("name", ["predictions.json", "metrics.jsonl", "config.yaml", "best/model.safetensors"])
def test_half_written_files(runs, name):
    served = serve([runs / "base", runs / "ours"])
    work(served.exploration)
    file = runs / "ours" / name
    half = file.read_bytes()[: file.stat().st_size // 2]
    file.write_bytes(half + b"\nmodel: {name:" if name == "config.yaml" else half)  # half of a yaml can be a valid yaml
    work(served.exploration)
    answers = [served.get(path) for path in ("api/start", "api/state", "api/runs/1/training", "api/runs/1/analysis")]
    assert {answer.status_code for answer in answers} <= {200, 422}
    assert served.json("api/state")["runs"][0]["message"] == ""
    sentences = [served.json("api/state")["runs"][1]["message"]]
    sentences += [answer.json()["error"] for answer in answers if answer.status_code == 422]
    assert all("Traceback" not in sentence and "terminal" not in sentence for sentence in sentences)
    is_told = any(name.rpartition("/")[2] in sentence for sentence in sentences)
    assert is_told or name == "metrics.jsonl"  # its last line may be cut off: a run is writing it


def test_a_deleted_run(runs):
    served = serve([runs / "base", runs / "ours"])
    work(served.exploration)
    shutil.rmtree(runs / "ours")
    work(served.exploration)
    state = served.json("api/state")["runs"]
    assert state[0]["message"] == ""
    assert "is gone" in state[1]["message"]
    image_id = int(served.exploration.data.image_ids[0])
    assert served.json(f"api/masks?images={image_id}")[str(image_id)]["runs"][1]["predictions"]  # read before
    assert query(served, run=1)["searched"] == 3
    assert served.json("api/runs/1/training") is None


def test_a_deleted_image(runs, scenes, tmp_path):
    images = shutil.copytree(scenes.images("val"), tmp_path / "images")
    served = serve([runs / "base"], (scenes.annotations("val"), images))
    served.exploration.data.path(0).unlink()
    work(served.exploration)
    image_id = int(served.exploration.data.image_ids[0])
    assert "not found" in served.error(f"api/images/{image_id}", 422)
    assert "not found" in served.error(f"api/query?run=0&image={image_id}&instance=0", 422)


def test_a_run_that_has_just_begun(runs):
    for name in ("best", "last"):
        shutil.rmtree(runs / "base" / name)
    (runs / "base" / "predictions.json").unlink()
    served = serve([runs / "base"])
    work(served.exploration)
    state = served.json("api/state")["runs"][0]
    assert (state["message"], state["has_model"], state["predicted"]) == ("", False, 0)
    assert served.json("api/runs/0/training")["step"] == 2
    assert "No checkpoint" in served.error(
        f"api/query?run=0&image={int(served.exploration.data.image_ids[0])}&instance=0", 422
    )


def test_nothing_to_show(tmp_path, runs):
    with pytest.raises(UserError, match="No checkpoint"):
        open_runs([tmp_path / "nowhere"], "cpu")
    with pytest.raises(UserError, match="no data to show"):
        open_exploration([])
    shutil.copytree(runs / "base" / "best", tmp_path / "best")
    with pytest.raises(UserError, match="no data to show"):
        open_exploration(open_runs([tmp_path / "best"], "cpu"))


def test_runs_of_the_same_name(runs, tmp_path):
    other = shutil.copytree(runs / "base", tmp_path / "elsewhere" / "base")
    assert [run.name for run in open_runs([runs / "base", other], "cpu")] == [str(runs / "base"), str(other)]


def test_packages_that_are_missing(runs, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "uniquery.explore.server", raising=False)
    assert main(["explore", str(runs / "base")]) == 2
    assert "pip install 'uniquery[explore]'" in capsys.readouterr().err


def test_the_command_without_anything(capsys):
    assert main(["explore"]) == 2
    assert "nothing to show" in capsys.readouterr().err


def test_ctrl_c_ends_the_server_while_it_computes(runs, scenes):
    server = Server(runs / "base", "--data", scenes.annotations("train"), scenes.images("train"))
    with urllib.request.urlopen(server.address + "api/state") as answer:
        assert answer.status == 200
    server.process.send_signal(signal.SIGINT)
    rest, _ = server.process.communicate(timeout=30)
    assert (server.process.returncode, rest) == (0, "Stopped.\n")
