"""Checkpoints: what is written is read back, also after a kill during a save or on a full disk."""

import json
import os
import resource
import signal
import sys
import zlib
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from helpers.small_runs import small_config
from uniquery.errors import CheckpointError, UserError
from uniquery.files import folder_versions, replace_folder
from uniquery.training import checkpoint, loop
from uniquery.training.checkpoint import TrainerState, save_checkpoint
from uniquery.training.config import load_config
from uniquery.training.log import MetricsLog, TrainLine
from uniquery.weights.checksummed import TensorFile, read_checksummed, read_json, read_safetensors, write_checksummed
from uniquery.weights.model_file import load_model, read_model_file

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)


class TestChecksummed:
    def test_tensors_come_back_and_safetensors_reads_them(self, tmp_path):
        tensors = {f"t{i}": (torch.arange(5) * 1.5).to(dtype) for i, dtype in enumerate(DTYPES)}
        tensors |= {"flags": torch.tensor([[True], [False]]), "scalar": torch.tensor(7), "none": torch.zeros(0, 3)}
        tensors |= {
            "turned": torch.arange(6.0).view(2, 3).T,
            "tied": tensors["t1"],
            "grown": torch.ones(2).requires_grad_(),
        }
        write_checksummed(tmp_path, {"a.safetensors": TensorFile(tensors, {"format": "x"}), "b.json": '{"é": 1}'})
        for loaded in (read_safetensors(tmp_path / "a.safetensors"), load_file(tmp_path / "a.safetensors")):
            assert set(loaded) == set(tensors)
            for name, tensor in tensors.items():
                assert loaded[name].dtype == tensor.dtype
                assert torch.equal(loaded[name], tensor)
        with safe_open(tmp_path / "a.safetensors", "pt") as file:
            assert file.metadata() == {"format": "x"}
        assert read_json(tmp_path / "b.json") == {"é": 1}

    def test_checksums_are_those_of_the_files(self, tmp_path):
        write_checksummed(tmp_path, {"a.safetensors": TensorFile({"x": torch.randn(3_000_000)}), "b.json": "{}"})
        for name, checksum in json.loads((tmp_path / "checksums.json").read_text()).items():
            content = (tmp_path / name).read_bytes()
            assert checksum == {"bytes": len(content), "crc32": zlib.crc32(content)}

    @pytest.mark.parametrize("place", [0, 8, 40, -1])
    def test_one_bit_is_noticed(self, tmp_path, place):
        write_checksummed(tmp_path, {"a.safetensors": TensorFile({"x": torch.zeros(100)})})
        content = bytearray((tmp_path / "a.safetensors").read_bytes())
        content[place] ^= 16
        (tmp_path / "a.safetensors").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"a\.safetensors is damaged"):
            read_checksummed(tmp_path / "a.safetensors")

    @pytest.mark.parametrize("content", ["", "{", "[]", "\0", '"x"'])
    def test_broken_tables(self, tmp_path, content):
        (tmp_path / "a.json").write_text(content)
        with pytest.raises(CheckpointError, match="damaged"):
            read_json(tmp_path / "a.json")
        (tmp_path / "a.json").write_text("{}")
        (tmp_path / "checksums.json").write_text(content)
        with pytest.raises(CheckpointError, match="damaged"):
            read_json(tmp_path / "a.json")

    def test_missing_files_and_files_that_are_something_else(self, tmp_path):
        with pytest.raises(CheckpointError, match="is missing"):
            read_safetensors(tmp_path / "a.safetensors")
        (tmp_path / "a.safetensors").write_bytes(b"no tensors at all")
        with pytest.raises(CheckpointError, match="not a safetensors file"):
            read_safetensors(tmp_path / "a.safetensors")


class TestKept:
    def write(self, folder: Path, word: str, keep: int = 2) -> None:
        with replace_folder(folder, keep=keep) as temporary:
            (temporary / "word").write_text(word)

    def words(self, folder: Path) -> list[str]:
        """Of the whole ones: the oldest may be half removed."""
        return [(kept / "word").read_text() for kept in folder_versions(folder) if (kept / "word").exists()]

    def test_predecessors_stay_beside_it_newest_first(self, tmp_path):
        for n in range(5):
            self.write(tmp_path / "last", str(n))
        assert self.words(tmp_path / "last") == ["4", "3", "2"]
        assert sorted(p.name for p in tmp_path.iterdir()) == ["last", "last.1", "last.2"]

    def test_others_are_left_alone(self, tmp_path):
        for name in ("last.mine", "last.2024", "last.10"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "word").write_text(name)
        for n in range(3):
            self.write(tmp_path / "last", str(n), keep=1)
        assert self.words(tmp_path / "last") == ["2", "1", "last.10", "last.2024"]
        assert (tmp_path / "last.mine").is_dir()

    @pytest.mark.parametrize("keep", [0, 1, 2])
    def test_a_writer_that_dies_at_any_operation_leaves_a_whole_folder(self, tmp_path, keep):
        """A child process is killed at its n-th call that opens, renames or removes anything, for every n."""
        folder = tmp_path / "last"
        newest, call = 0, 0
        for word in range(keep + 2):
            self.write(folder, str(word), keep)
            newest = word
        while True:
            call += 1
            if not self.dies_while_writing(folder, str(newest + 1), keep, call):
                break
            words = self.words(folder)
            assert words[0] in (str(newest), str(newest + 1)), (call, words)
            assert words == sorted(words, key=int, reverse=True), (call, words)
            assert len(words) > min(keep, 1), (call, words)
            newest = int(words[0])
        assert call > 10
        assert self.words(folder)[0] == str(newest + 1)

    def dies_while_writing(self, folder: Path, word: str, keep: int, call: int) -> bool:
        child = os.fork()
        if child == 0:
            calls = 0

            def hook(event, _):
                nonlocal calls
                if event in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"):
                    calls += 1
                    if calls == call:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(hook)
            try:
                self.write(folder, word, keep)
            finally:
                os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


class TestFullDisk:
    def test_a_disk_that_fills_up_while_saving_keeps_the_old_checkpoint(self, scenes, tmp_path):
        """A real limit on the size of a file, in a child process: the write stops in the middle."""
        config = load_config(small_config(tmp_path, scenes), ["train.steps=2"])
        loop.train(config)
        before = {p: p.read_bytes() for p in (config.folder / "last").iterdir()}
        info, state = read_model_file(config.folder)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
            try:
                save_checkpoint(config.folder / "last", state, info)
            except UserError as error:
                os.write(writer, str(error).encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        os.close(writer)
        assert os.read(reader, 1000).decode() == f"Cannot write {config.folder / 'last'}: File too large."
        assert {p: p.read_bytes() for p in (config.folder / "last").iterdir()} == before
        assert not (config.folder / ".last.new").exists()
        load_model(config.folder / "last")

    def test_training_stops_and_says_what_is_left(self, scenes, tmp_path, monkeypatch):
        config = load_config(
            small_config(tmp_path, scenes), ["train.steps=4", "train.save_every=2", "train.eval_every=4"]
        )
        real, folders = checkpoint.save_checkpoint, []

        def full_the_second_time(folder, *rest, **more):
            folders.append(folder)
            if len(folders) == 2:
                monkeypatch.setattr("uniquery.training.checkpoint.write_checksummed", full_disk)
            real(folder, *rest, **more)

        def full_disk(*_):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "save_checkpoint", full_the_second_time)
            with pytest.raises(
                UserError, match=r"No space left on device\. Training stopped at step 4; the checkpoint of step 2 is"
            ):
                loop.train(config)
        monkeypatch.undo()
        assert read_json(config.folder / "last" / "trainer.json")["step"] == 2
        loop.train(config, resume="auto")
        assert read_json(config.folder / "last" / "trainer.json")["step"] == 4

    def test_the_log_on_a_full_disk(self, tmp_path):
        log = MetricsLog(tmp_path / "metrics.jsonl")
        log._file = Path("/dev/full").open("a")  # noqa: SIM115
        with pytest.raises(UserError, match=r"Cannot write .*metrics\.jsonl: No space left"):
            log.write(TrainLine(step=1, images=1, losses={}, lr=0.1))
        log.close()


class TestWhen:
    def steps_saved(self, scenes, tmp_path, monkeypatch, *changes) -> list[int]:
        config = load_config(small_config(tmp_path, scenes), ["train.eval_every=100", *changes])
        real, steps = checkpoint.save_checkpoint, []

        def record(folder, state, info, trainer, **more):
            steps.append(trainer.values["step"])
            real(folder, state, info, trainer, **more)

        monkeypatch.setattr(checkpoint, "save_checkpoint", record)
        loop.train(config)
        return steps

    def test_by_steps_and_at_the_end(self, scenes, tmp_path, monkeypatch):
        steps = self.steps_saved(scenes, tmp_path, monkeypatch, "train.steps=5", "train.save_every=3")
        assert steps == [3, 5, 5]  # before the evaluation at the end, and after it

    def test_by_minutes(self, scenes, tmp_path, monkeypatch):
        minutes = iter(range(0, 1000, 4))
        monkeypatch.setattr(checkpoint.time, "monotonic", lambda: 60.0 * next(minutes))
        changes = ["train.steps=6", "train.save_every=100", "train.save_minutes=10"]
        steps = self.steps_saved(scenes, tmp_path, monkeypatch, *changes)
        assert steps[-1] == 6
        assert 1 < len(steps) < 6

    def test_how_many_are_kept(self, scenes, tmp_path):
        config = load_config(small_config(tmp_path, scenes), ["train.save_every=1", "train.keep_last=3"])
        loop.train(config)
        kept = [read_json(p / "trainer.json")["step"] for p in folder_versions(config.folder / "last")]
        assert kept == [4, 3, 2]


def test_the_model_is_written_once(scenes, tmp_path):
    """The weights that are evaluated are in the model file, and nowhere else."""
    config = load_config(small_config(tmp_path, scenes), ["train.ema=null", "train.steps=1"])
    loop.train(config)
    names = set(load_file(config.folder / "last" / "trainer.safetensors"))
    assert not any(name.startswith(("model/", "ema/")) for name in names)


def test_a_damaged_model_is_not_used(scenes, tmp_path):
    config = load_config(small_config(tmp_path, scenes), ["train.steps=1"])
    loop.train(config)
    file = config.folder / "best" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged"):
        load_model(config.folder)


def test_an_intact_checkpoint_that_does_not_fit(scenes, tmp_path):
    config = load_config(small_config(tmp_path, scenes), ["train.steps=1"])
    loop.train(config)
    folder = config.folder / "last"
    trainer = read_safetensors(folder / "trainer.safetensors")
    del trainer["model/head.classes.weight"]
    values = json.loads((folder / "trainer.json").read_text())
    model, info = read_safetensors(folder / "model.safetensors"), read_model_file(folder)[0]
    save_checkpoint(folder, model, info, TrainerState(trainer, values, values.pop("model_prefix")))
    with pytest.raises(CheckpointError, match=r"does not fit this version.*head\.classes\.weight"):
        loop.train(config, resume=True)


def test_a_damaged_checkpoint_is_moved_away(scenes, tmp_path, capsys):
    changes = ["train.save_every=1", "train.keep_last=2", "train.eval_every=100"]
    loop.train(load_config(small_config(tmp_path, scenes), [*changes, "train.steps=2"]))
    config = load_config(small_config(tmp_path, scenes), [*changes, "train.steps=2"])
    damaged = config.folder / "last" / "trainer.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    loop.train(config, resume=True)
    kept = [read_json(p / "trainer.json")["step"] for p in folder_versions(config.folder / "last")]
    assert kept == [2, 1]
    for place in folder_versions(config.folder / "last"):
        assert read_safetensors(place / "trainer.safetensors")  # intact
    assert (config.folder / "last.damaged").is_dir()


def test_an_evaluation_that_fails_loses_no_step(scenes, tmp_path, monkeypatch):
    config = load_config(small_config(tmp_path, scenes), ["train.save_every=100", "train.eval_every=3"])

    def fail(*_, **__):
        raise UserError("the validation data is broken")

    with monkeypatch.context() as patch:
        patch.setattr(loop, "evaluate_run", fail)
        with pytest.raises(UserError, match="broken"):
            loop.train(config)
    assert read_json(config.folder / "last" / "trainer.json")["step"] == 3
    loop.train(config, resume=True)


def test_a_folder_with_checkpoints_and_no_configuration_is_not_overwritten(scenes, tmp_path):
    config = load_config(small_config(tmp_path, scenes), ["train.steps=1"])
    loop.train(config)
    (config.folder / "config.yaml").unlink()
    with pytest.raises(UserError, match="already holds a run"):
        loop.train(config)


def test_metrics_log_removes_an_evaluation_that_is_repeated(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 2}\n{"kind": "eval", "step": 2}\n')
    MetricsLog(tmp_path / "metrics.jsonl", last_step=2, last_eval_step=1).close()
    assert [json.loads(line)["kind"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == ["train"]


def test_metrics_log_removes_repeated_steps_and_cut_lines(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 1}\n{"kind": "train", "step": 2}\n{"kind": "tr')
    log = MetricsLog(tmp_path / "metrics.jsonl", last_step=1)
    log.write(TrainLine(step=2, images=1, losses={}, lr=0.1))
    log.close()
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2]


@pytest.mark.parametrize("rest", [b'{"kind": "\xff', b"[1]\n", b"3\n", b"\0\0\0"])
def test_metrics_log_survives_what_a_crash_leaves(tmp_path, rest):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"kind": "train", "step": 1}\n' + rest)
    MetricsLog(tmp_path / "metrics.jsonl", last_step=1).close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"kind": "train", "step": 1}\n'
