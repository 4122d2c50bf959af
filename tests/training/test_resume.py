"""A run that was killed, stopped, moved or damaged resumes and ends with the same bits."""

import json
import os
import shutil
import signal
import time

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from helpers.killed_runs import (
    ALGORITHM,
    arguments,
    children,
    run_content,
    start,
    train_to_the_end,
    train_with_kills,
    wait_for,
)
from helpers.small_runs import small_config
from uniquery.cli import main
from uniquery.errors import CheckpointError, ConfigError
from uniquery.evaluation import inference
from uniquery.segmenters import build_segmenter
from uniquery.signals import ignore_signals, stop_requests
from uniquery.training import loop
from uniquery.training.checkpoint import load_trainer_state
from uniquery.training.config import load_config

STEADY = ["train.accumulate=2", "train.log_every=4", "train.eval_every=5", "train.save_every=1", *ALGORITHM]


SPLITS = ("train", "val")


class Killed(BaseException):
    """Stands for a kill."""


def dies_in_step(monkeypatch, config, step: int, resume=False) -> None:
    """Trains until a step begins, and no further."""
    real = loop.Trainer.step

    def dying(trainer, batches):
        if trainer.run.step + 1 == step:
            raise Killed
        real(trainer, batches)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "step", dying)
        with pytest.raises(Killed):
            loop.train(config, resume=resume)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("algorithm", [[], ALGORITHM], ids=["base", "algorithm"])
def test_a_resumed_run_is_bit_identical(scenes, tmp_path, monkeypatch, accumulate, algorithm):
    changes = [f"train.accumulate={accumulate}", "train.steps=6", "model.max_queries=2", "train.log_every=4"]
    whole = load_config(small_config(tmp_path, scenes), [*changes, *algorithm, "name=whole"])
    loop.train(whole)
    broken = load_config(small_config(tmp_path, scenes), [*changes, *algorithm, "name=broken"])
    dies_in_step(monkeypatch, broken, 4)
    loop.train(broken, resume=True)
    assert run_content(broken.folder) == run_content(whole.folder)


def test_a_run_without_averaged_weights_resumes_too(scenes, tmp_path, monkeypatch):
    changes = ["train.ema=null", "train.steps=4", "optim.name=sgd", "querying.inter={capacity: 0}"]
    whole = load_config(small_config(tmp_path, scenes), [*changes, "name=whole"])
    loop.train(whole)
    broken = load_config(small_config(tmp_path, scenes), [*changes, "name=broken"])
    dies_in_step(monkeypatch, broken, 4)
    loop.train(broken, resume="auto")
    assert run_content(broken.folder) == run_content(whole.folder)


@pytest.mark.parametrize(
    ("kills", "steps"), [(3, 15), pytest.param(25, 100, marks=pytest.mark.slow)], ids=["3 kills", "25 kills"]
)
def test_kills_at_random_moments_change_nothing(scenes, tmp_path, kills, steps):
    config, runs = small_config(tmp_path, scenes), tmp_path / "runs"
    settings = [*STEADY, f"train.steps={steps}"]
    train_to_the_end(config, *settings, "name=whole")
    train_with_kills(config, runs / "killed", kills, *settings, "name=killed")
    assert run_content(runs / "killed") == run_content(runs / "whole")


def test_killed_after_the_first_best_model_whose_checkpoint_was_lost(scenes, tmp_path, monkeypatch):
    changes = ["train.save_every=100", "train.steps=4"]
    whole = load_config(small_config(tmp_path, scenes), [*changes, "name=whole"])
    loop.train(whole)
    broken = load_config(small_config(tmp_path, scenes), [*changes, "name=broken"])
    dies_in_step(monkeypatch, broken, 3)
    assert (broken.folder / "best").is_dir()
    shutil.rmtree(broken.folder / "last")
    other = load_config(small_config(tmp_path, scenes), [*changes, "name=broken", "optim.lr=0.5"])
    with pytest.raises(ConfigError, match=r"optim\.lr"):
        loop.train(other, resume="auto")
    loop.train(broken, resume="auto")
    assert run_content(broken.folder) == run_content(whole.folder)


def test_how_often_is_saved_and_how_many_work_changes_nothing(scenes, tmp_path):
    ends = []
    for name, every, workers in (("a", 1, 0), ("b", 3, 2)):
        changes = [f"name={name}", "train.steps=3", f"train.save_every={every}", f"data.workers={workers}", *ALGORITHM]
        config = load_config(small_config(tmp_path, scenes), [*changes, "train.log_every=2"])
        loop.train(config)
        ends.append(run_content(config.folder))
    assert ends[0] == ends[1]


def test_an_evaluation_does_not_move_the_random_numbers_of_training(scenes, tmp_path):
    states = []
    for name, every in (("a", 1), ("b", 4)):
        config = load_config(small_config(tmp_path, scenes), [f"name={name}", f"train.eval_every={every}"])
        loop.train(config)
        states.append(load_file(config.folder / "last" / "model.safetensors"))
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


class TestDamage:
    @pytest.fixture
    def finished(self, scenes, tmp_path):
        config = load_config(small_config(tmp_path, scenes), ["train.steps=4", "train.save_every=2"])
        loop.train(config)
        return config

    @pytest.mark.parametrize("name", ["model.safetensors", "trainer.safetensors", "trainer.json", "checksums.json"])
    @pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
    def test_a_damaged_last_falls_back_and_says_so(self, finished, name, damage, capsys):
        before = run_content(finished.folder)
        file = finished.folder / "last" / name
        content = bytearray(file.read_bytes())
        if damage == "gone":
            file.unlink()
        elif damage == "cut":
            file.write_bytes(content[: len(content) // 2])
        else:
            content[len(content) // 2] ^= 1
            file.write_bytes(content)
        capsys.readouterr()
        loop.train(finished, resume="auto", console=Console(width=1000))
        out = capsys.readouterr().out
        assert run_content(finished.folder) == before
        if (name, damage) == ("checksums.json", "gone"):  # nothing to compare with
            assert "from step 4" in out
        else:
            assert name in out or name == "checksums.json"
            assert "is damaged" in out or "is missing" in out
            assert f"Using {finished.folder / 'last.1'} of step 2 instead." in out
            assert "from step 2" in out

    def test_nothing_whole_is_no_reason_to_start_over(self, finished):
        for name in ("last", "last.1"):
            (finished.folder / name / "trainer.safetensors").write_bytes(b"123")
        with pytest.raises(CheckpointError, match=r"No checkpoint of .* is intact.*last.*last\.1"):
            loop.train(finished, resume="auto")

    def test_a_lost_last_is_replaced_by_the_one_before(self, finished):
        before = run_content(finished.folder)
        shutil.rmtree(finished.folder / "last")
        loop.train(finished, resume="auto")
        assert run_content(finished.folder) == before


class TestMoved:
    def test_a_run_and_its_data_may_move(self, scenes, tmp_path, monkeypatch):
        whole = load_config(small_config(tmp_path, scenes), ["name=whole"])
        loop.train(whole)
        config = load_config(small_config(tmp_path, scenes), [])
        dies_in_step(monkeypatch, config, 3)
        shutil.move(tmp_path / "runs", tmp_path / "elsewhere")
        shutil.copytree(scenes.annotations("train").parents[1], tmp_path / "data")
        moved = [
            (f"data.{split}.{key}", str(tmp_path / "data" / path.relative_to(scenes.annotations("train").parents[1])))
            for split in ("train", "val")
            for key, path in (("annotations", scenes.annotations(split)), ("images", scenes.images(split)))
        ]
        again = load_config(small_config(tmp_path, scenes), [("output", str(tmp_path / "elsewhere")), *moved])
        loop.train(again, resume=True)
        assert run_content(again.folder) == run_content(tmp_path / "elsewhere" / "whole")
        assert str(tmp_path / "data") in (again.folder / "config.yaml").read_text()

    def remove_an_instance(self, raw):
        del raw["annotations"][0]

    def move_a_polygon(self, raw):
        raw["annotations"][0]["segmentation"] = [[1, 1, 9, 1, 9, 9, 1, 9]]

    def exchange_two_images(self, raw):
        first, second = raw["images"][:2]
        first["file_name"], second["file_name"] = second["file_name"], first["file_name"]

    @pytest.mark.parametrize("split", ["train", "val"])
    @pytest.mark.parametrize("change", [remove_an_instance, move_a_polygon, exchange_two_images])
    def test_other_data_is_refused(self, scenes, tmp_path, split, change):
        config = load_config(small_config(tmp_path, scenes), ["train.steps=2"])
        loop.train(config)
        raw = json.loads(scenes.annotations(split).read_text())
        change(self, raw)
        (tmp_path / "other.json").write_text(json.dumps(raw))
        changes = ["train.steps=2", (f"data.{split}.annotations", str(tmp_path / "other.json"))]
        with pytest.raises(CheckpointError, match=f"data.{split} are not those"):
            loop.train(load_config(small_config(tmp_path, scenes), changes), resume=True)


class TestSignals:
    @pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
    @pytest.mark.parametrize("workers", [0, 2])
    def test_a_signal_saves_and_the_run_goes_on_from_there(self, scenes, tmp_path, number, code, workers):
        config = small_config(tmp_path, scenes)
        settings = ["train.steps=400", "train.save_every=1000", "train.eval_every=1000", f"data.workers={workers}"]
        output = tmp_path / "out.txt"
        process = start(arguments(config, *settings), output)
        wait_for(lambda: "step 3/" in output.read_text(), output)
        os.kill(process.pid, number)
        process.join(30)
        message = " ".join(output.read_text().split())
        assert process.exitcode == code, message
        step = json.loads((tmp_path / "runs" / "small" / "last" / "trainer.json").read_text())["step"]
        assert step >= 3
        name = "SIGTERM" if number == signal.SIGTERM else "Ctrl-C"
        assert f"Stopped by {name} at step {step} of 400" in message
        assert "--resume auto" in message
        assert "Traceback" not in message

    def test_a_signal_to_all_processes_does_not_end_the_data_workers_first(self, scenes, tmp_path):
        config = small_config(tmp_path, scenes)
        settings = ["train.steps=400", "train.accumulate=3", "train.save_every=1000", "train.eval_every=1000"]
        output = tmp_path / "out.txt"
        process = start(arguments(config, *settings, "data.workers=2"), output)
        wait_for(lambda: "step 2/" in output.read_text(), output)
        workers = [int(pid) for pid in children(process.pid)]
        assert len(workers) == 2
        for pid in (*workers, process.pid):
            os.kill(pid, signal.SIGTERM)
        process.join(30)
        assert process.exitcode == 143, output.read_text()
        assert "Traceback" not in output.read_text()
        assert (tmp_path / "runs" / "small" / "last").is_dir()

    def test_an_interrupted_step_or_evaluation_changes_nothing(self, scenes, tmp_path, monkeypatch):
        changes = ["train.steps=4", "train.save_every=100", "train.log_every=3"]
        whole = load_config(small_config(tmp_path, scenes), [*changes, "name=whole"])
        loop.train(whole)
        broken = load_config(small_config(tmp_path, scenes), [*changes, "name=broken"])
        real_step, real_predict = loop.Trainer.step, inference.predict_samples

        def signaled_step(trainer, batches):
            real_step(trainer, batches)
            if trainer.run.step == 1:
                os.kill(os.getpid(), signal.SIGTERM)

        def signaled_predict(*arguments, **more):
            for n, result in enumerate(real_predict(*arguments, **more)):
                if n == 1:
                    os.kill(os.getpid(), signal.SIGINT)
                yield result

        with monkeypatch.context() as patch:
            patch.setattr(loop.Trainer, "step", signaled_step)
            with pytest.raises(SystemExit, match="143"):
                loop.train(broken)
        for _ in range(2):  # at step 2, and again when it goes on with the evaluation
            with monkeypatch.context() as patch:
                patch.setattr(inference, "predict_samples", signaled_predict)
                with pytest.raises(KeyboardInterrupt):
                    loop.train(broken, resume=True)
            values = json.loads((broken.folder / "last" / "trainer.json").read_text())
            assert (values["step"], values["eval_step"]) == (2, 0)
        loop.train(broken, resume=True)
        assert run_content(broken.folder) == run_content(whole.folder)

    @pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
    def test_a_second_ctrl_c_ends_at_once_and_a_second_term_does_not(self, first):
        child = os.fork()
        if child == 0:
            with stop_requests() as stop:
                signal.raise_signal(first)
                signal.raise_signal(signal.SIGTERM)
                signal.raise_signal(signal.SIGTERM)
                if stop:
                    signal.raise_signal(signal.SIGINT)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGINT

    def test_a_stop_that_another_process_asked_for_leaves_one_signal_to_come(self):
        """torchrun sends its signal to all: what comes after the agreement must not end a process that saves."""
        with stop_requests() as stop:
            stop.request()
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.signal == signal.SIGTERM

    def test_handlers_are_put_back(self):
        before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        with stop_requests():
            assert signal.getsignal(signal.SIGINT) is not before[0]
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before

    def test_a_worker_outlives_signals_for_a_while(self, monkeypatch):
        monkeypatch.setattr("uniquery.signals.WORKER_GRACE_SECONDS", 1)
        heard, alive = os.pipe()
        child = os.fork()
        if child == 0:
            ignore_signals()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM):
                signal.raise_signal(number)
            time.sleep(0.1)
            os.write(alive, b"yes")
            time.sleep(5)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGALRM
        assert os.read(heard, 3) == b"yes"


def test_resume_notices_that_a_part_was_switched_off(scenes, tmp_path):
    with_parts = load_config(small_config(tmp_path, scenes), [*ALGORITHM, "train.steps=2"])
    loop.train(with_parts)
    without = load_config(small_config(tmp_path, scenes), ["train.steps=2"])
    with pytest.raises(ConfigError, match=r"querying\.inter"):
        loop.train(without, resume=True)


def test_resume_needs_no_pretrained_weights(scenes, tmp_path, monkeypatch):
    config = load_config(small_config(tmp_path, scenes), ["train.steps=2"])
    loop.train(config)
    asked = []
    monkeypatch.setattr(
        "uniquery.training.run.build_segmenter",
        lambda *a, pretrained, **k: asked.append(pretrained) or build_segmenter(*a, pretrained=pretrained, **k),
    )
    loop.train(config, resume=True)
    assert asked == [False]


def test_resume_with_other_classes(scenes, tmp_path):
    config = load_config(small_config(tmp_path, scenes), ["train.steps=2"])
    loop.train(config)
    for split in ("train", "val"):
        raw = json.loads(scenes.annotations(split).read_text())
        raw["categories"][0]["name"] = "zebra"
        (tmp_path / f"{split}.json").write_text(json.dumps(raw))
    other = load_config(
        small_config(tmp_path, scenes),
        ["train.steps=2", *(("data." + s + ".annotations", str(tmp_path / f"{s}.json")) for s in ("train", "val"))],
    )
    with pytest.raises(CheckpointError, match="zebra"):
        loop.train(other, resume=True)


class TestRunFolder:
    """`uniquery train runs/x --resume`, from anywhere, to the end and further."""

    @pytest.fixture
    def stopped(self, scenes, tmp_path, monkeypatch):
        config = load_config(small_config(tmp_path, scenes), ["train.steps=6", "train.save_every=1"])
        dies_in_step(monkeypatch, config, 4)
        return config.folder

    def test_a_run_folder_is_enough(self, stopped, scenes, tmp_path, capsys):
        whole = load_config(small_config(tmp_path, scenes), ["train.steps=6", "train.save_every=1", "name=whole"])
        loop.train(whole)
        capsys.readouterr()
        assert main(["train", str(stopped), "--resume"]) == 0
        assert "from step 3" in capsys.readouterr().out
        assert run_content(stopped) == run_content(whole.folder)

    def test_also_where_it_was_moved_to_and_from_inside_it(self, stopped, tmp_path, monkeypatch):
        moved = stopped.rename(tmp_path / "elsewhere")
        monkeypatch.chdir(moved)
        assert main(["train", ".", "--resume", "auto"]) == 0
        assert load_trainer_state(moved / "last").values["step"] == 6
        assert not stopped.exists()

    def test_it_must_be_asked_for(self, stopped, capsys):
        assert main(["train", str(stopped)]) == 2
        assert "is a run: continue it with --resume" in capsys.readouterr().err

    def test_a_finished_run_is_said_to_be_complete(self, stopped, capsys):
        main(["train", str(stopped), "--resume"])
        content = run_content(stopped)
        assert "already complete" not in capsys.readouterr().out
        assert main(["train", str(stopped), "--resume"]) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert "from step 6: it is already complete. To train on, raise train.steps" in text
        assert run_content(stopped) == content

    @pytest.mark.parametrize("setting", ["train.steps=8", "train.epochs=2.6"])  # 2.6 epochs of 6 images, 2 a step
    def test_the_steps_can_be_raised(self, stopped, capsys, setting):
        main(["train", str(stopped), "--resume"])
        capsys.readouterr()
        assert main(["train", str(stopped), "--resume", "--set", setting]) == 0
        assert "The run has 8 steps instead of 6" in " ".join(capsys.readouterr().out.split())
        assert load_trainer_state(stopped / "last").values["step"] == 8
        steps = [json.loads(line)["step"] for line in (stopped / "metrics.jsonl").read_text().splitlines()]
        assert sorted(set(steps)) == list(range(1, 9))
        assert main(["train", str(stopped), "--resume"]) == 0  # the longer run is now that of the folder
        assert "already complete" in capsys.readouterr().out

    def test_and_not_lowered(self, stopped, capsys):
        assert main(["train", str(stopped), "--resume", "--set", "train.steps=5"]) == 2
        assert "with 5 steps, but it was started with 6" in capsys.readouterr().err
        assert "steps: 6" in (stopped / "config.yaml").read_text()

    def test_a_run_with_relative_data_can_be_used_from_any_folder(self, scenes, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        shutil.copytree(scenes.root, "data")
        files = {
            s: [str(f.relative_to(scenes.root)) for f in (scenes.annotations(s), scenes.images(s))] for s in SPLITS
        }
        options = [part for s in SPLITS for part in (f"--{s}", *(f"data/{file}" for file in files[s]))]
        config = small_config(tmp_path, scenes)
        assert main(["train", str(config), *options, "--output", "runs", "--set", "train.steps=1"]) == 0
        (tmp_path / "other").mkdir()
        monkeypatch.chdir("other")
        assert main(["eval", "../runs/small", "--workers", "0"]) == 0
        assert main(["train", "../runs/small", "--resume", "--set", "train.steps=2"]) == 0
        shutil.move(tmp_path / "data", tmp_path / "moved")
        capsys.readouterr()
        assert main(["eval", "../runs/small", "--workers", "0"]) == 2
        assert "Say where the data is with --data ANNOTATIONS IMAGES." in capsys.readouterr().err
        assert main(["train", "../runs/small", "--resume"]) == 2
        assert "Say where the data is with --train ANNOTATIONS IMAGES." in capsys.readouterr().err
        moved = [part for s in SPLITS for part in (f"--{s}", *(f"../moved/{file}" for file in files[s]))]
        assert main(["train", "../runs/small", "--resume", *moved]) == 0
        val = [f"../moved/{file}" for file in files["val"]]
        assert main(["eval", "../runs/small", "--data", *val, "--workers", "0"]) == 0
