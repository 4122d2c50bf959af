"""Runs in two processes, as torchrun starts them, against one process on as many images."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from helpers.killed_runs import children
from helpers.small_runs import small_config, small_scenes
from helpers.small_segmenters import SMALL
from uniquery.training.distributed import restart_safe_store
from uniquery.training.loop import Trainer

pytestmark = pytest.mark.distributed
RANDOM_LOSSES = {"mask2former"}

# Crops of one size, as padding to the largest of a batch would differ; enough instances for every process.
SETTINGS = [
    "data.augment=[{op: flip, p: 0.5}, {op: scale_jitter, range: [1.0, 1.3], size: 64}]",
    "querying.inter={capacity: 5000, sampling: {count: 5}, negatives_per_step: 200}",
    "querying.equivariance={}",
    "optim={name: sgd, lr: 0.01}",
    "train.ema=null",
    "train.steps=20",
    "train.eval_every=10",
    "train.save_every=5",
]


def command(config: Path, processes: int, *settings: str, options: tuple[str, ...] = ()) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), *options]
    sets = [part for setting in (*SETTINGS, *settings) for part in ("--set", setting)]
    return [sys.executable, *(launcher if processes > 1 else []), "-m", "uniquery", "train", str(config), *sets]


def run(config: Path, processes: int, *settings: str, arguments: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    whole = [*command(config, processes, *settings), *arguments]
    return subprocess.run(whole, env=environment, capture_output=True, text=True, timeout=240, check=False)


def lines(folder: Path, kind: str) -> list[dict]:
    every = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in every if line["kind"] == kind]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "last" / "model.safetensors")


def wait_for_lines(folder: Path, count: int) -> None:
    log, end = folder / "metrics.jsonl", time.monotonic() + 90
    while not (log.exists() and len(log.read_text().splitlines()) >= count):
        assert time.monotonic() < end, f"{log} does not grow"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distributed")
    config = small_config(folder, small_scenes(folder))
    results = {
        "one": run(config, 1, "name=one", "train.batch_size=4"),
        "two": run(config, 2, "name=two", "train.batch_size=2"),
    }
    for name, result in results.items():
        assert result.returncode == 0, f"{name}: {result.stdout}{result.stderr}"
    return config, folder / "runs", results


def test_two_processes_learn_what_one_does(runs):
    _, folder, _ = runs
    one, two = (lines(folder / name, "train") for name in ("one", "two"))
    assert [line["step"] for line in one] == [line["step"] for line in two] == list(range(1, 21))
    assert [line["images"] for line in one] == [line["images"] for line in two]
    assert {"loss_inter", "loss_equi"} <= set(one[0]["losses"])
    assert two[0]["losses"] == pytest.approx(one[0]["losses"], rel=1e-5)
    for a, b in zip(one, two, strict=True):  # single small terms gather more rounding as the steps go by
        assert sum(b["losses"].values()) == pytest.approx(sum(a["losses"].values()), rel=1e-5), f"step {a['step']}"
    before, after = weights(folder / "one"), weights(folder / "two")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=1e-4, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("name", sorted(set(SMALL) - {"condinst"}))  # which the other tests train
def test_every_segmenter_learns_in_two_processes_what_it_does_in_one(name, tmp_path):
    model = SMALL[name].model_dump(mode="json")
    model |= {"dropout": 0} if "dropout" in model else {}  # each process draws its own
    config = small_config(tmp_path, small_scenes(tmp_path), model=model)
    for run_name, processes in (("one", 1), ("two", 2)):
        settings = (f"name={run_name}", f"train.batch_size={4 // processes}", "train.steps=3", "train.eval_every=3")
        result = run(config, processes, *settings)
        assert result.returncode == 0, result.stdout + result.stderr
    one, two = (lines(tmp_path / "runs" / run_name, "train") for run_name in ("one", "two"))
    assert len(one) == len(two) == 3
    assert [line["images"] for line in one] == [line["images"] for line in two]
    for a, b in zip(one, two, strict=True):
        assert a["losses"].keys() == b["losses"].keys()
        # Each process draws its own points, where a segmenter draws points.
        exact = name not in RANDOM_LOSSES
        assert b["losses"] == pytest.approx(a["losses"], rel=1e-4 if exact else 0.3), f"step {a['step']}"


def test_every_image_is_evaluated_once(runs):
    _, folder, _ = runs
    one, two = (json.loads((folder / name / "predictions.json").read_text()) for name in ("one", "two"))
    assert {r["image_id"] for r in two} == {r["image_id"] for r in one}
    assert len(two) == pytest.approx(len(one), rel=0.1)
    assert len(lines(folder / "two", "eval")) == 2


def test_the_first_process_talks(runs):
    _, _, results = runs
    assert results["two"].stdout.count("steps of 2 × 1 × 2 processes = 4 images") == 1
    assert results["two"].stdout.count("Everything is in") == 1


def test_a_run_moves_from_two_processes_to_one(runs):
    config, _, _ = runs
    half = run(config, 2, "name=moved", "train.batch_size=2", "train.steps=10")
    assert half.returncode == 0, half.stderr
    assert run(config, 1, "name=moved", "train.batch_size=2", "train.steps=10", arguments=("--resume",)).returncode == 2
    whole = run(config, 1, "name=moved", "train.batch_size=4", "train.steps=10", arguments=("--resume",))
    assert whole.returncode == 0, whole.stderr


def test_a_process_that_fails_ends_all(runs, tmp_path):
    config, folder, _ = runs
    broken = tmp_path / "broken.yaml"
    broken.write_text(config.read_text().replace("images/train", "images/nowhere"))
    began = time.monotonic()
    result = run(broken, 2, "name=broken")
    assert result.returncode != 0
    assert "nowhere" in result.stderr
    assert time.monotonic() - began < 60
    assert not (folder / "broken" / "last").exists()


def run_differently(script: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Two processes whose arguments name their rank."""
    script.write_text(
        "import os, sys\n"
        "from uniquery.cli import main\n"
        "sys.exit(main([a.replace('RANK', os.environ['RANK']) for a in sys.argv[1:]]))\n"
    )
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    sets = [part for setting in (*SETTINGS, "train.batch_size=2") for part in ("--set", setting)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    whole = [sys.executable, *launcher, "train", *arguments, *sets]
    return subprocess.run(whole, env=environment, capture_output=True, text=True, timeout=240, check=False)


def test_one_process_that_fails_says_why(runs, tmp_path):
    config, _, _ = runs
    for rank, images in enumerate(("train", "nowhere")):
        (tmp_path / f"{rank}.yaml").write_text(config.read_text().replace("images/train", f"images/{images}"))
    result = run_differently(tmp_path / "start.py", str(tmp_path / "RANK.yaml"), "--name", "one-fails")
    assert result.returncode != 0
    assert "error in process 1: " in result.stderr
    assert "nowhere" in result.stderr
    assert "by peer" not in result.stderr  # what the other one meets with is not the cause


def test_processes_that_see_different_folders(runs, tmp_path):
    config, folder, _ = runs
    for rank in range(2):
        (tmp_path / f"{rank}.yaml").write_text(config.read_text())
    shutil.copytree(folder / "two", tmp_path / "runs0" / "two")
    arguments = ["--output", str(tmp_path / "runsRANK"), "--name", "two", "--resume", "auto"]
    result = run_differently(tmp_path / "start.py", str(tmp_path / "RANK.yaml"), *arguments)
    assert result.returncode != 0
    assert "error in process 1: Another process found a checkpoint" in result.stderr


def test_processes_that_see_different_checkpoints(runs, tmp_path):
    config, folder, _ = runs
    for rank in range(2):
        (tmp_path / f"{rank}.yaml").write_text(config.read_text())
        shutil.copytree(folder / "two", tmp_path / f"runs{rank}" / "two")
    shutil.rmtree(tmp_path / "runs1" / "two" / "last")  # an older one is left
    arguments = ["--output", str(tmp_path / "runsRANK"), "--name", "two", "--resume", "auto"]
    result = run_differently(tmp_path / "start.py", str(tmp_path / "RANK.yaml"), *arguments)
    assert result.returncode != 0
    assert "Process 1 starts from step 15 and process 0 from step 20" in result.stderr


def test_a_stop_is_agreed_and_a_restart_goes_on(runs):
    """SIGTERM to the launcher reaches the processes at different moments; both stop after the same step."""
    config, folder, _ = runs
    arguments = [*command(config, 2, "name=stopped", "train.batch_size=2", "train.steps=400", "train.eval_every=400")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for_lines(folder / "stopped", 3)
    process.send_signal(signal.SIGTERM)
    message = process.communicate(timeout=60)[0]
    assert "Stopped by SIGTERM at step" in message
    step = json.loads((folder / "stopped" / "last" / "trainer.json").read_text())["step"]
    assert step == lines(folder / "stopped", "train")[-1]["step"] < 400


class _LateStop:
    """Asked to stop right after this process has told the others that it was not."""

    def __init__(self):
        self.asked = 0

    def __bool__(self):
        self.asked += 1
        return self.asked > 1


def test_a_signal_after_the_agreement_waits_for_the_next():
    trainer = SimpleNamespace(stop=_LateStop(), run=SimpleNamespace(device=torch.device("cpu")))
    assert not Trainer.is_stopped(trainer)


def test_restarted_processes_meet_under_a_new_name():
    """What those before them left in the store, their addresses too, is not what they find."""
    store = dist.HashStore()
    for attempt in ("first", "restarted"):
        with ThreadPoolExecutor(3) as pool:
            later = [pool.submit(restart_safe_store, store, rank, 3) for rank in (1, 2)]
            time.sleep(0.05)  # they come first, and find the name of the attempt before
            places = [restart_safe_store(store, 0, 3), *(place.result(timeout=20) for place in later)]
        assert not any(place.check(["address"]) for place in places)
        places[0].set("address", attempt)
        assert [place.get("address").decode() for place in places] == [attempt] * 3


def test_a_killed_process_is_restarted_and_nothing_changes(runs):
    config, folder, _ = runs
    whole = command(config, 2, "name=restarted", "train.batch_size=2", options=("--max-restarts", "2"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*whole, "--resume", "auto"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    wait_for_lines(folder / "restarted", 7)
    worker = next(pid for pid in children(process.pid) if b"uniquery" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(int(worker), signal.SIGKILL)
    message = process.communicate(timeout=180)[0]
    assert process.returncode == 0, message
    assert "Resuming" in message
    expected = weights(folder / "two")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(folder / "restarted").items())
