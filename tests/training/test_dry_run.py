"""The dry run: which images it takes, what it counts, what it forecasts, and that it writes nothing."""

import mmap
import resource
from contextlib import closing

import pytest
import torch

from helpers.small_runs import small_config
from uniquery.cli import main
from uniquery.errors import UserError
from uniquery.querying.memory import InstancePixels, PixelMemory
from uniquery.report.forecast import forecast_lines
from uniquery.training import dry_run as module
from uniquery.training.batches import load_splits, training_batches
from uniquery.training.config import load_config
from uniquery.training.dry_run import Forecast, Measurement, count_evaluations, dry_run, fill_memory, hardest_images
from uniquery.training.memory_use import available_memory, limited_to_available, peak_memory, reset_peak_memory
from uniquery.training.run import build_run

CPU = torch.device("cpu")
PAPER = ["querying=paper", "train.batch_size=4"]


@pytest.fixture
def config(tmp_path, scenes):
    return load_config(small_config(tmp_path, scenes))


def measurement(**changes) -> Measurement:
    values = {
        "device": CPU,
        "processes": 1,
        "batches": {"largest": "2 images"},
        "step_seconds": 0.5,
        "image_seconds": 0.25,
        "peak_memory": 2_000_000_000,
        "available_memory": 10_000_000_000,
    }
    return Measurement(**{**values, **changes})


class TestForecast:
    def test_time_is_that_of_all_steps_and_all_evaluations(self):
        forecast = Forecast(measurement(), steps=100, evaluations=4, val_images=30)
        assert forecast.training_seconds == 50
        assert forecast.evaluation_seconds == 30
        assert forecast.seconds == 80
        lines = forecast_lines(forecast)
        assert "training: 100 steps × 0.5 s = 50 s" in lines
        assert "evaluation: 4 × 30 images × 0.25 s = at most 30 s" in lines
        assert "total: 1 min 20 s" in lines
        assert not any("warning" in line for line in lines)

    def test_processes_share_the_images_of_an_evaluation(self):
        assert Forecast(measurement(processes=4), steps=1, evaluations=1, val_images=30).evaluation_seconds == 8 * 0.25

    def test_without_validation_data_there_is_no_evaluation(self):
        forecast = Forecast(measurement(image_seconds=None), steps=10, evaluations=0, val_images=0)
        assert forecast.seconds == 5
        assert not any(line.startswith("evaluation") for line in forecast_lines(forecast))

    def test_warns_if_the_memory_is_nearly_full(self):
        lines = forecast_lines(Forecast(measurement(available_memory=2_100_000_000), 1, 1, 1))
        assert lines[-1].startswith("warning: this is nearly all of the memory: lower train.batch_size")

    @pytest.mark.parametrize(("every", "count"), [(None, 1), (2, 5), (3, 4), (10, 1), (20, 1)])
    def test_evaluations_are_as_many_as_the_run_has(self, config, every, count):
        settings = config.train.model_copy(update={"eval_every": every, "steps": 10})
        assert count_evaluations(config.model_copy(update={"train": settings}), 10) == count


class FiveImages:
    """What `hardest_images` asks of a data set."""

    sizes = torch.tensor([[10, 10], [40, 10], [20, 30], [5, 5], [100, 1]])

    def __len__(self) -> int:
        return 5

    def instances_per_image(self) -> torch.Tensor:
        return torch.tensor([7, 0, 1, 30, 9])


class TestHardestImages:
    def test_those_with_most_instances_and_those_with_most_pixels(self):
        assert hardest_images(FiveImages(), 2) == {"most crowded": [3, 4], "largest": [2, 1]}

    def test_no_more_than_there_are(self):
        assert sorted(hardest_images(FiveImages(), 100)["largest"]) == [0, 1, 2, 3, 4]

    def test_a_step_runs_on_each(self, config, monkeypatch):
        """The images of the two hardest batches, then ordinary ones."""
        data, _ = load_splits(config)
        seen = []
        step = module.compute_gradients

        def spy(run, batches, clock):
            result = step(run, batches, clock)
            seen.append(set(result.image_ids))
            return result

        monkeypatch.setattr(module, "compute_gradients", spy)
        dry_run(config)
        hardest = hardest_images(data, 2).values()
        assert seen[:2] == [set(data.image_ids[indices].tolist()) for indices in hardest]
        assert len(seen) == 4


class TestFilledMemory:
    def test_is_full_of_pixels_of_other_images(self):
        memory = PixelMemory(capacity=10)
        ids = torch.tensor([0, 1, 2])
        memory.push(InstancePixels(torch.rand(3, 4), torch.zeros(3, 2), ids, ids, ids == ids))
        fill_memory(memory)
        stored = memory.read()
        assert len(stored) == 10
        assert stored.image_ids.tolist()[:3] == [0, 1, 2]
        assert (stored.image_ids[3:] < 0).all()

    @pytest.mark.parametrize("capacity", [0, 10])
    def test_an_empty_one_stays_empty(self, capacity):
        memory = PixelMemory(capacity)
        fill_memory(memory)
        assert len(memory) == 0

    def test_steps_are_timed_with_it(self, config, monkeypatch):
        filled = []
        timed = module._ordinary_seconds

        def spy(run, *rest):
            filled.append(len(run.objective.memory))
            return timed(run, *rest)

        monkeypatch.setattr(module, "_ordinary_seconds", spy)
        changed = load_config(config.folder.parents[1] / "small.yaml", [*PAPER, "querying.inter.capacity=5000"])
        dry_run(changed)
        assert filled == [5000]


class TestMemory:
    def test_peak_of_a_step_is_seen(self):
        reset_peak_memory(CPU)
        before = peak_memory(CPU)
        with mmap.mmap(-1, 200_000_000, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:  # not memory that was freed
            block[:: mmap.PAGESIZE] = bytes(len(block[:: mmap.PAGESIZE]))
        assert 190e6 < peak_memory(CPU) - before < 300e6

    def test_available_is_less_than_all_there_is(self):
        available = available_memory(CPU)
        assert available is None or available > 0

    @pytest.mark.skipif(available_memory(CPU) is None, reason="the system does not say how much memory there is")
    def test_more_than_available_fails_and_the_limit_is_lifted_afterwards(self):
        before = resource.getrlimit(resource.RLIMIT_DATA)
        with limited_to_available(CPU), pytest.raises(RuntimeError, match="can't allocate memory"):
            torch.empty(available_memory(CPU) + 2**30, dtype=torch.uint8)
        assert resource.getrlimit(resource.RLIMIT_DATA) == before


class TestDryRun:
    def test_forecasts_the_run_and_writes_nothing(self, config, tmp_path):
        files = set(tmp_path.rglob("*"))
        forecast = dry_run(config)
        assert set(tmp_path.rglob("*")) == files
        assert (forecast.steps, forecast.evaluations, forecast.val_images) == (4, 2, 4)
        measured = forecast.measured
        assert set(measured.batches) == {"most crowded", "largest"}
        assert measured.batches["largest"].startswith("2 images of 64×64")
        assert 0 < measured.step_seconds < 60
        assert measured.image_seconds > 0
        assert measured.peak_memory > 1e8

    def test_with_more_images_in_a_batch_than_there_are(self, tmp_path, scenes):
        file = small_config(tmp_path, scenes)
        forecast = dry_run(load_config(file, ["train.batch_size=8", "data.workers=2", "train.accumulate=2"]))
        assert forecast.measured.batches["most crowded"].startswith("8 images")

    def test_without_validation_data(self, tmp_path, scenes):
        forecast = dry_run(load_config(small_config(tmp_path, scenes), ["data.val=null"]))
        assert (forecast.evaluations, forecast.measured.image_seconds) == (0, None)

    def test_seconds_of_a_step_are_those_of_the_training(self, config):
        """The same steps, timed by hand."""
        seconds, steps = module.seconds_per_step(config)
        assert steps == 4
        data, _ = load_splits(config)
        run = build_run(config, data)
        clock = module.PhaseClock(CPU)
        with closing(training_batches(run, data, steps=(0, 4), workers=0)) as batches:
            for _ in range(4):
                module._step(run, batches, clock)
                clock.steps += 1
        by_hand = sum(clock.pop_means().values())
        assert by_hand / 10 < seconds < by_hand * 10

    def test_predictions_are_not_cut_by_score(self, config):
        """An untrained model scores below any threshold, and would predict nothing."""
        assert module._with_all_detections(config).model.score_threshold == 0
        assert config.model.score_threshold > 0


class TestCommand:
    def test_prints_memory_and_time(self, tmp_path, scenes, capsys):
        file = small_config(tmp_path, scenes)
        assert main(["train", str(file), "--dry-run", *(f"--set={change}" for change in PAPER)]) == 0
        printed = capsys.readouterr().out
        for line in (
            "most crowded images: 2 images of",
            "largest images:",
            "peak memory:",
            "training: 4 steps",
            "total:",
        ):
            assert line in printed
        assert not (tmp_path / "runs").exists()

    def test_out_of_memory_says_what_to_change(self, config, monkeypatch):
        def full(self, *_):
            raise RuntimeError(
                "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
            )

        monkeypatch.setattr("uniquery.segmenters.condinst.CondInst.forward", full)
        changed = load_config(config.folder.parents[1] / "small.yaml", PAPER)
        with pytest.raises(UserError) as caught:
            dry_run(changed)
        for advice in ("train.batch_size=2", "smaller sizes in data.augment", "a smaller querying.inter.capacity"):
            assert advice in str(caught.value)

    def test_out_of_memory_in_the_evaluation(self, config, monkeypatch):
        monkeypatch.setattr("uniquery.segmenters.condinst.CondInst.predict", lambda *_, **__: torch.empty(2**58))
        with pytest.raises(UserError, match=r"in the evaluation .* a smaller data\.test_size"):
            dry_run(config)

    def test_fails_like_the_run_would(self, tmp_path, scenes, capsys):
        file = small_config(tmp_path, scenes)
        assert main(["train", str(file), "--dry-run", "--train", "missing.json", "."]) == 2
        assert capsys.readouterr().err.startswith("error: ")
        assert main(["train", str(file), "--dry-run", "--set", "train.init_from=nowhere"]) == 2
        assert "nowhere" in capsys.readouterr().err

    def test_a_folder_that_holds_a_run_is_an_error(self, tmp_path, scenes, capsys):
        file = small_config(tmp_path, scenes)
        assert main(["train", str(file), "--set", "train.steps=1"]) == 0
        assert main(["train", str(file), "--dry-run"]) == 2
        assert "already holds a run" in capsys.readouterr().err
