"""An image that cannot be read: training stops with a checkpoint, or skips it; either way the run stays exact."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from rich.console import Console

from helpers.coco_files import assert_one_sentence
from helpers.killed_runs import ALGORITHM, run_content
from helpers.small_runs import small_config
from uniquery.data.augment import CopyPaste
from uniquery.data.batch import MAX_UNREADABLE, LoadedSample, TrainingSamples
from uniquery.data.coco import CocoData
from uniquery.data.sampling import StepBatchSampler
from uniquery.errors import DataError
from uniquery.training import loop
from uniquery.training.checkpoint import load_trainer_state
from uniquery.training.config import load_config

ONE_IMAGE_STEPS = [
    "train.steps=12",
    "train.batch_size=1",
    "train.eval_every=6",
    "train.save_every=100",
    "data.augment=[]",
]


def truncate(file) -> bytes:
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    return whole


@pytest.fixture
def images(scenes, tmp_path):
    """A copy of the training images."""
    return shutil.copytree(scenes.images("train"), tmp_path / "images")


def config_on(scenes, folder, images, *changes):
    return load_config(small_config(folder, scenes), [("data.train.images", str(images)), *ONE_IMAGE_STEPS, *changes])


class TestStop:
    def test_a_checkpoint_is_saved_and_the_resumed_run_is_bit_identical(self, scenes, tmp_path, images):
        changes = ["train.accumulate=2", "train.batch_size=2", "train.eval_every=12", *ALGORITHM]
        whole = config_on(scenes, tmp_path, images, *changes, "name=whole")
        loop.train(whole)
        data = CocoData(scenes.annotations("train"), images)
        file = _first_image_of_step(whole, data, 2)
        content = truncate(file)
        broken = config_on(scenes, tmp_path, images, *changes, "name=broken")
        with pytest.raises(DataError, match=r"not a readable image.*data\.on_unreadable=skip.*--resume auto") as caught:
            loop.train(broken)
        assert_one_sentence(caught.value)
        stopped = load_trainer_state(broken.folder / "last").values["step"]
        assert f"stopped at step {stopped}, which is saved in {broken.folder / 'last'}" in str(caught.value)
        assert 0 < stopped <= 1
        file.write_bytes(content)
        loop.train(broken, resume=True)
        assert run_content(broken.folder) == run_content(whole.folder)

    def test_in_the_first_step_there_is_nothing_to_save(self, scenes, tmp_path, images):
        for file in images.iterdir():
            truncate(file)
        config = config_on(scenes, tmp_path, images)
        with pytest.raises(DataError, match="stopped before its first step"):
            loop.train(config)
        assert not (config.folder / "last").exists()

    def test_a_validation_image(self, scenes, tmp_path):
        images = shutil.copytree(scenes.images("val"), tmp_path / "val")
        truncate(min(images.iterdir()))
        config = load_config(small_config(tmp_path, scenes), [("data.val.images", str(images))])
        with pytest.raises(DataError, match=r"not a readable image.*stopped at step 2, which is saved"):
            loop.train(config)
        assert load_trainer_state(config.folder / "last").values["step"] == 2


def _first_image_of_step(config, data, step):
    """The file of an image that no step before reads."""
    batch = config.train.batch_size // config.querying.forwards_per_image
    per_step = config.train.accumulate
    steps = list(StepBatchSampler(len(data), batch, config.seed, last_step=step * per_step))
    before = {index for one in steps[:-per_step] for _, index in one}
    return data.path(next(index for one in steps[-per_step:] for _, index in one if index not in before))


class TestSkip:
    def trained(self, scenes, tmp_path, images, *changes):
        config = config_on(scenes, tmp_path, images, "data.on_unreadable=skip", *changes)
        with Console(record=True, width=500, file=(tmp_path / "out.txt").open("w")) as console:
            loop.train(config, console=console)
        return config, console.export_text()

    def test_training_goes_on_and_names_the_image_once(self, scenes, tmp_path, images):
        broken = min(images.iterdir())
        truncate(broken)
        config, text = self.trained(scenes, tmp_path, images)
        assert load_trainer_state(config.folder / "last").values["step"] == 12  # two epochs
        assert text.count(f"warning: {broken} is not a readable image") == 1

    def test_neither_workers_nor_a_restart_change_the_run(self, scenes, tmp_path, images, monkeypatch):
        truncate(min(images.iterdir()))
        whole, _ = self.trained(scenes, tmp_path, images, "name=whole")
        saved = ["train.save_every=5", "name=broken"]
        broken = config_on(scenes, tmp_path, images, "data.on_unreadable=skip", "data.workers=1", *saved)
        real = loop.Trainer.step

        def dying(trainer, batches):
            if trainer.run.step == 7:
                raise KeyboardInterrupt
            real(trainer, batches)

        with monkeypatch.context() as patch:
            patch.setattr(loop.Trainer, "step", dying)
            with pytest.raises(KeyboardInterrupt):
                loop.train(broken)
        loop.train(broken, resume=True)
        assert run_content(broken.folder) == run_content(whole.folder)

    def test_a_sample_depends_on_seed_epoch_and_image_alone(self, scenes, images):
        truncate(min(images.iterdir()))
        data = CocoData(scenes.annotations("train"), images)
        index = next(i for i in range(len(data)) if data.path(i) == min(images.iterdir()))
        samples = TrainingSamples(data, [], seed=3, skip_unreadable=True)
        first = [samples[epoch, index] for epoch in range(8)]
        again = [samples[epoch, index] for epoch in reversed(range(8))][::-1]
        assert [one.image_id for one in first] == [one.image_id for one in again]
        assert len({one.image_id for one in first}) > 1
        assert all(len(one.unreadable) >= 1 for one in first)

    def test_what_is_pasted_is_another_image_too(self, scenes, images):
        files = sorted(images.iterdir())
        for file in files[1:]:
            truncate(file)
        data = CocoData(scenes.annotations("train"), images)
        index = next(i for i in range(len(data)) if data.path(i) == files[0])
        loaded = TrainingSamples(data, [CopyPaste(p=1)], seed=0, skip_unreadable=True)[0, index]
        assert isinstance(loaded, LoadedSample)
        assert loaded.image_id == int(data.image_ids[index])

    def test_a_data_set_that_is_damaged_as_a_whole_stops(self, scenes, tmp_path, images):
        for file in images.iterdir():
            truncate(file)
        samples = TrainingSamples(CocoData(scenes.annotations("train"), images), [], 0, skip_unreadable=True)
        assert isinstance(samples[0, 0], DataError)
        with pytest.raises(DataError, match="not a readable image"):
            self.trained(scenes, tmp_path, images)
        assert MAX_UNREADABLE > 5

    @pytest.mark.parametrize("batch_size", [1, 3])
    def test_a_validation_image_counts_as_not_found(self, scenes, tmp_path, images, batch_size):
        val = shutil.copytree(scenes.images("val"), tmp_path / "val")
        truncate(min(val.iterdir()))
        changes = [("data.val.images", str(val)), "train.eval_every=null", f"eval.batch_size={batch_size}"]
        config, text = self.trained(scenes, tmp_path, images, *changes, "model.score_threshold=0")
        assert text.count("Its instances count as not found") == 1
        data = CocoData(scenes.annotations("val"), val)
        index = next(i for i in range(len(data)) if data.path(i) == min(val.iterdir()))
        predicted = {row["image_id"] for row in json.loads((config.folder / "predictions.json").read_text())}
        assert predicted == set(data.image_ids.tolist()) - {int(data.image_ids[index])}


@pytest.mark.distributed
@pytest.mark.parametrize("on_unreadable", ["stop", "skip"])
def test_two_processes(scenes, tmp_path, images, on_unreadable):
    """Whichever process meets the image: both stop after the same step, saved; or both go on."""
    config = small_config(tmp_path, scenes)
    data = CocoData(scenes.annotations("train"), images)
    file = _first_image_of_step(config_on(scenes, tmp_path, images, "train.batch_size=2"), data, 2)
    truncate(file)
    changes = [f"data.train.images={images}", "train.steps=4", "train.batch_size=1", "train.eval_every=4"]
    settings = [*changes, "train.save_every=100", f"data.on_unreadable={on_unreadable}"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    sets = [part for setting in settings for part in ("--set", setting)]
    done = subprocess.run(
        [*launcher, "-m", "uniquery", "train", str(config), *sets],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    step = load_trainer_state(tmp_path / "runs" / "small" / "last").values["step"]
    if on_unreadable == "stop":
        assert done.returncode != 0
        assert "is not a readable image" in done.stderr
        assert "lost connection" not in done.stderr.lower()
        assert step == 1
    else:
        assert done.returncode == 0, done.stderr[-2000:]
        assert file.name in done.stdout
        assert step == 4
