"""Steps that go wrong: non-finite losses, memory that runs out, data workers that are killed."""

import json
import math
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from helpers.killed_runs import ALGORITHM, arguments, children, start, wait_for
from helpers.small_runs import small_config
from uniquery.errors import CheckpointError, UserError
from uniquery.querying import UniqueQuerying
from uniquery.training import loop, step
from uniquery.training.batches import load_splits, training_batches
from uniquery.training.config import load_config
from uniquery.training.out_of_memory import is_out_of_memory
from uniquery.training.phase_clock import PhaseClock
from uniquery.training.recovery import Savepoint
from uniquery.training.replay import replay
from uniquery.training.run import build_run
from uniquery.training.step import StepResult, compute_gradients

# The first update is tiny, the second throws the weights away, the third step meets what is left of them.
EXPLODING = ["optim.lr=1e25", "schedule.warmup_steps=3", "schedule.warmup_factor=1e-30", "train.steps=6"]
ON = ["querying.inter={capacity: 10, sampling: {count: 3}}", "querying.equivariance={}"]


@pytest.fixture
def poisoned(monkeypatch):
    """Makes a loss nan whenever the given images are seen, after all else was computed."""
    real, images = UniqueQuerying.forward, set()

    def forward(self, batch, targets, *rest):
        losses = real(self, batch, targets, *rest)
        if images & {t.image_id for t in targets}:
            losses["loss_mask"] = losses["loss_mask"] * math.nan
        return losses

    monkeypatch.setattr(UniqueQuerying, "forward", forward)
    return images


class TestNonFinite:
    @pytest.fixture
    def failed(self, scenes, tmp_path):
        """A run with a non-finite third step, and its error message."""
        config = load_config(
            small_config(tmp_path, scenes), [*EXPLODING, *ON, "train.accumulate=2", "train.save_every=1"]
        )
        with pytest.raises(UserError) as caught:
            loop.train(config)
        return config, str(caught.value)

    def test_it_stops_and_explains(self, failed):
        config, message = failed
        images = json.loads((config.folder / "non_finite_step" / "step.json").read_text())["batches"]
        ids = [i for batch in images for i in batch["image_ids"]]
        assert "Non-finite loss or gradient at step 3: loss_class " in message
        assert f"images {ids}. No weight was changed" in message
        for word in (
            "loss_mask",
            "loss_inter",
            "loss_equi",
            "gradient norm",
            "optim.clip_norm",
            "train.skip_nonfinite",
        ):
            assert word in message
        assert "nan" in message or "inf" in message

    def test_no_weight_is_changed(self, failed):
        config, _ = failed
        before = load_file(config.folder / "last" / "trainer.safetensors")
        kept = load_file(config.folder / "non_finite_step" / "model.safetensors")
        assert json.loads((config.folder / "last" / "trainer.json").read_text())["step"] == 2
        assert all(torch.equal(kept[name], before[f"model/{name}"]) for name in kept)
        state = load_file(config.folder / "non_finite_step" / "state.safetensors")
        assert all(torch.equal(state[name], before[name]) for name in state)
        assert len(state["algorithm/memory/embeddings"]) == 10

    def test_the_step_is_replayed(self, failed):
        config, message = failed
        replayed = replay(config.folder / "non_finite_step")
        assert replayed.step == 3
        assert not all(map(math.isfinite, (*replayed.losses.values(), replayed.grad_norm)))
        assert same(replayed.losses, replayed.recorded_losses)
        assert same({"": replayed.grad_norm}, {"": replayed.recorded_grad_norm})
        line = message.split("replay it with: ")[1].split(". Lower")[0]
        program, *rest = shlex.split(line)
        assert program == "python"
        out = subprocess.run([sys.executable, *rest], check=True, capture_output=True, text=True).stdout
        assert out.startswith("step 3\n  loss_class")

    def test_a_damaged_dump_is_not_replayed(self, failed):
        config, _ = failed
        file = config.folder / "non_finite_step" / "batch.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"\7")
        with pytest.raises(CheckpointError, match=r"batch\.safetensors is damaged"):
            replay(config.folder / "non_finite_step")

    def test_a_dump_that_cannot_be_written_does_not_hide_the_cause(self, scenes, tmp_path, monkeypatch):
        def full_disk(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("uniquery.training.replay.write_checksummed", full_disk)
        config = load_config(small_config(tmp_path, scenes), [*EXPLODING, "train.save_every=100"])
        with pytest.raises(UserError, match=r"Non-finite .* at step 3: .*could not be saved: .*No space left"):
            loop.train(config)

    def test_nothing_is_kept_of_it(self, scenes, tmp_path):
        changes = ["train.log_every=100", "train.save_every=3", "train.eval_every=3"]
        config = load_config(small_config(tmp_path, scenes), [*EXPLODING, *changes])
        with pytest.raises(UserError, match="Non-finite loss or gradient at step 3"):
            loop.train(config)
        assert not (config.folder / "last").exists()
        assert not (config.folder / "best").exists()

    def test_precise_steps_replay_to_the_bit(self, scenes, tmp_path, poisoned, monkeypatch):
        """All losses but the poisoned one are plain numbers, which a replay without the poison gives replayed."""
        changes = [*ON, "seed=3", "train.accumulate=2", "train.steps=5", "train.save_every=100", "model.max_queries=2"]
        config = load_config(small_config(tmp_path, scenes), changes)
        poisoned.add(images_of_step(config, 3)[1])  # two of six images a step: none is seen before
        with pytest.raises(UserError, match="Non-finite loss or gradient at step 3"):
            loop.train(config)
        monkeypatch.undo()
        replayed = replay(config.folder / "non_finite_step")
        assert math.isfinite(replayed.losses["loss_mask"])
        assert math.isnan(replayed.recorded_losses["loss_mask"])
        rest = {name: loss for name, loss in replayed.losses.items() if name != "loss_mask"}
        assert len(rest) == 5
        assert all(replayed.recorded_losses[name] == loss for name, loss in rest.items())


class TestSkipping:
    def test_steps_are_skipped_and_the_run_ends(self, scenes, tmp_path, poisoned, capsys):
        config = load_config(small_config(tmp_path, scenes), [*ALGORITHM, "train.steps=5", "train.skip_nonfinite=5"])
        poisoned.add(images_of_step(config, 2)[0])
        bad = [n for n in range(1, 6) if poisoned & set(images_of_step(config, n))]
        loop.train(config)
        lines = [json.loads(line) for line in (config.folder / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines if line["kind"] == "skipped"] == bad
        assert [line["step"] for line in lines if line["kind"] == "train"] == sorted({1, 2, 3, 4, 5} - set(bad))
        skipped = next(line for line in lines if line["kind"] == "skipped")
        assert skipped["losses"]["loss_mask"] == "nan"
        assert skipped["image_ids"] == images_of_step(config, 2)
        assert "skipped step 2:" in " ".join(capsys.readouterr().out.split())
        values = json.loads((config.folder / "last" / "trainer.json").read_text())
        assert (values["step"], values["skipped"]) == (5, len(bad))
        for name in ("model", "trainer"):
            tensors = load_file(config.folder / "last" / f"{name}.safetensors").values()
            assert all(t.isfinite().all() for t in tensors)

    def test_not_more_than_are_allowed_even_over_a_resume(self, scenes, tmp_path, poisoned):
        changes = ["train.steps=5", "train.save_every=1", "train.skip_nonfinite=1"]
        config = load_config(small_config(tmp_path, scenes), changes)
        poisoned |= set(range(1000))
        with pytest.raises(UserError, match=r"Non-finite loss or gradient after 1 skipped steps at step 2"):
            loop.train(config)
        with pytest.raises(UserError, match=r"Non-finite loss or gradient after 1 skipped steps at step 2"):
            loop.train(config, resume=True)
        more = load_config(small_config(tmp_path, scenes), [*changes, "train.skip_nonfinite=2"])
        with pytest.raises(UserError, match=r"Non-finite loss or gradient after 2 skipped steps at step 3"):
            loop.train(more, resume=True)

    def test_a_step_is_rolled_back_completely(self, scenes, tmp_path):
        changes = [*ON, "model.mask_norm=batch", "model.max_queries=2", "querying.inter.ramp_steps=9"]
        run, batches = prepared(load_config(small_config(tmp_path, scenes), changes))
        savepoint, clock = Savepoint(run), PhaseClock(run.device)
        for _ in range(3):
            before = snapshot(run)
            savepoint.save()
            compute_gradients(run, batches, clock)
            changed = {n for n, t in snapshot(run).items() if n not in before or not torch.equal(t, before[n])}
            assert {"algorithm/forwards", "algorithm/memory/embeddings"} <= changed
            assert any("running_mean" in name for name in changed)
            savepoint.rollback()
            after = snapshot(run)
            assert set(after) == set(before)
            assert all(torch.equal(after[name], before[name]) for name in before)
            savepoint.save()
            step.update_weights(run, compute_gradients(run, batches, clock).grad_norm, clock)

    @pytest.mark.parametrize("capacity", [0, 5, 1000])
    def test_the_memory_is_rolled_back_over_several_pushes(self, scenes, tmp_path, capacity):
        changes = ["train.accumulate=2", f"querying.inter={{capacity: {capacity}, sampling: {{count: 3}}}}"]
        run, batches = prepared(load_config(small_config(tmp_path, scenes), changes))
        savepoint, clock = Savepoint(run), PhaseClock(run.device)
        for _ in range(2):
            before = snapshot(run)
            savepoint.save()
            compute_gradients(run, batches, clock)
            savepoint.rollback()
            after = snapshot(run)
            assert set(after) == set(before)
            assert all(torch.equal(after[name], before[name]) for name in before)
            savepoint.save()
            compute_gradients(run, batches, clock)


@pytest.mark.parametrize(
    ("losses", "norm", "finite"),
    [([1.0, 2.0], 3.0, True), ([1.0, math.nan], 3.0, False), ([1.0, 2.0], math.inf, False), ([-math.inf], 0.0, False)],
)
def test_what_is_finite(losses, norm, finite):
    named = {str(i): torch.tensor(loss) for i, loss in enumerate(losses)}
    assert StepResult(named, torch.tensor(norm), [], torch.tensor(0.0)).is_finite() is finite


class TestOutOfMemory:
    def fails(self, scenes, tmp_path, *changes) -> str:
        config = load_config(small_config(tmp_path, scenes), list(changes))
        with pytest.raises(UserError) as caught:
            loop.train(config)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    def test_on_a_gpu_in_the_forward_pass(self, scenes, tmp_path, monkeypatch):
        def full(self, *_):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has ...")

        monkeypatch.setattr("uniquery.segmenters.condinst.CondInst.forward", full)
        message = self.fails(scenes, tmp_path, "train.batch_size=4", "train.accumulate=3", *ALGORITHM)
        assert (
            "Out of memory in step 1, in the forward pass of 2 images of 64×64, 64×64 (padded to 64×64) with "
            in message
        )
        assert " instances (CUDA out of memory. Tried to allocate 2.00 GiB)." in message
        assert "train.batch_size=2 with train.accumulate=6, as many images in one update; " in message
        assert "smaller sizes in data.augment; " in message
        assert "train.precision=bfloat16 or backbone.checkpoint_gradients=true." in message

    def test_on_a_cpu_in_the_backward_pass(self, scenes, tmp_path, monkeypatch):
        monkeypatch.setattr(torch.Tensor, "backward", lambda *_: torch.empty(2**58))
        message = self.fails(scenes, tmp_path, "train.batch_size=1", "train.precision=bfloat16", "model.levels=4")
        assert "in the backward pass of 1 images" in message
        assert "can't allocate memory" in message
        assert "model.max_queries" in message
        assert "Try: " in message

    def test_in_the_update(self, scenes, tmp_path, monkeypatch):
        monkeypatch.setattr(torch.optim.AdamW, "step", lambda *_: torch.empty(2**58))
        assert "in the optimizer's update (" in self.fails(scenes, tmp_path)

    def test_in_the_evaluation(self, scenes, tmp_path, monkeypatch):
        monkeypatch.setattr("uniquery.segmenters.condinst.CondInst.predict", lambda *_, **__: torch.empty(2**58))
        message = self.fails(scenes, tmp_path, "eval.batch_size=2")
        assert "Out of memory in step 3, in the evaluation (" in message or "in step 2, in the evaluation (" in message
        assert "eval.batch_size=1; a smaller data.test_size" in message

    def test_other_errors_are_not_touched(self, scenes, tmp_path, monkeypatch):
        def broken(*_):
            raise RuntimeError("shapes do not fit")

        monkeypatch.setattr("uniquery.segmenters.condinst.CondInst.forward", broken)
        with pytest.raises(RuntimeError, match="shapes do not fit"):
            loop.train(load_config(small_config(tmp_path, scenes), []))

    def test_what_counts(self):
        assert is_out_of_memory(MemoryError())
        assert is_out_of_memory(RuntimeError("MPS backend out of memory (MPS allocated: ...)"))
        assert not is_out_of_memory(ValueError("out of memory"))


def test_a_killed_data_worker_is_told_in_one_sentence(scenes, tmp_path):
    output = tmp_path / "out.txt"
    settings = ["train.steps=400", "train.save_every=1000", "train.eval_every=1000", "data.workers=1"]
    process = start(arguments(small_config(tmp_path, scenes), *settings), output)
    wait_for(lambda: "step 2/" in output.read_text(), output)
    os.kill(int(children(process.pid)[0]), signal.SIGKILL)
    process.join(30)
    message = " ".join(output.read_text().split())
    assert process.exitcode == 2, message
    assert "error: A data worker process was killed" in message
    assert "lower data.workers" in message
    assert "Traceback" not in message


@pytest.mark.parametrize("kind", [RuntimeError, EOFError])
def test_an_error_in_a_data_worker_keeps_its_cause(scenes, tmp_path, monkeypatch, kind):
    def broken(*_):
        raise kind("shapes do not fit")

    monkeypatch.setattr("uniquery.data.batch.augment", broken)
    with pytest.raises(kind, match=r"DataLoader worker process 0[^$]*Traceback[^$]*in broken[^$]*shapes do not fit"):
        loop.train(load_config(small_config(tmp_path, scenes), ["data.workers=1"]))
    assert not multiprocessing.active_children()


def prepared(config):
    """A run at its first step, and enough batches."""
    torch.manual_seed(config.seed)
    data, _ = load_splits(config)
    run = build_run(config, data)
    return run, training_batches(run, data, steps=(0, 20))


def snapshot(run) -> dict[str, torch.Tensor]:
    """Copies of all that a checkpoint would hold."""
    tensors = {**run.trainer_state().tensors, **{f"own/{n}": t for n, t in run.model.state_dict().items()}}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def images_of_step(config, number: int) -> list[int]:
    """Ids of the images that a step sees."""
    data, _ = load_splits(config)
    run = build_run(config, data)
    batches = training_batches(run, data, steps=(number - 1, number), workers=0)
    return [target.image_id for batch in batches for target in batch.targets]


def same(one: dict[str, float], other: dict[str, float]) -> bool:
    """Equal to the bit; a nan equals a nan."""
    return set(one) == set(other) and all(
        one[k] == other[k] or (one[k] != one[k] and other[k] != other[k]) for k in one
    )


@pytest.mark.parametrize(("local_losses", "image_ids"), [((1.0, math.nan), [7, 9]), ((1.0, 2.0), [3, 5, 7, 9])])
def test_images_of_the_processes_with_a_non_finite_loss(local_losses, image_ids, monkeypatch):
    """What the second of two processes would gather."""
    first = [torch.tensor([3, 5]), torch.tensor([not math.isfinite(local_losses[0])] * 2)]
    monkeypatch.setattr(
        step, "all_gather_rows", lambda rows: [torch.cat(pair) for pair in zip(first, rows, strict=True)]
    )
    result = StepResult({"loss": torch.tensor(math.nan)}, torch.tensor(math.nan), [7, 9], torch.tensor(local_losses[1]))
    assert result.non_finite_images() == image_ids
