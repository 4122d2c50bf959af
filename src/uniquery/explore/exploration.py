"""What the page shows: a data set, runs on it, and a thread that keeps them up to date."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from threading import Condition, Event, Thread

from uniquery.data.coco import CocoData
from uniquery.data.dataset import GroundTruth, is_panoptic
from uniquery.data.open import open_data
from uniquery.errors import UserError
from uniquery.evaluation.error_summary import ImageTruth, truth_by_image
from uniquery.evaluation.protocol import DETECTIONS, choose_protocol
from uniquery.explore.analysis import analyze
from uniquery.explore.pictures import Pictures
from uniquery.explore.response_maps import ResponseMaps
from uniquery.explore.runs import ExploredRun
from uniquery.training.batches import hint_at_option
from uniquery.training.config import SplitConfig
from uniquery.training.run_folder import RunFolder

POLL_SECONDS = 2.0
QUIET_SECONDS = 0.15  # a page asks for one thing after another
LONGEST_WAIT = 5.0  # seconds that requests may hold up the work in the background, at each of its steps
LONGEST_STOP = 60.0  # seconds: a forward of a large model on a CPU
MAPS_AT_ONCE = 8  # between two looks at the run folders
FIRST_THUMBNAILS = 48  # about what the gallery shows first


class Exploration:
    """A data set and runs on it.

    Args:
        data: the images and their ground truth.
        runs: in the order in which the page shows them; may be empty.
    """

    def __init__(self, data: CocoData, runs: Sequence[ExploredRun]) -> None:
        self.data, self.runs = data, list(runs)
        self.pictures = Pictures(data)
        self.maps = [ResponseMaps(run, data) for run in runs]
        self._index = {image_id: index for index, image_id in enumerate(data.image_ids.tolist())}
        self._stopped = Event()
        self._thread: Thread | None = None
        self._requests, self._last_request, self._idle = 0, 0.0, Condition()

    @property
    def is_panoptic(self) -> bool:
        """Whether the data has things and stuff, for which errors and AP of instances are not defined."""
        return is_panoptic(self.data.categories)

    @cached_property
    def truth(self) -> GroundTruth:
        """The annotations as COCO tables."""
        return self.data.ground_truth()

    @cached_property
    def images(self) -> dict[int, ImageTruth]:
        """The ground truth of each image."""
        return truth_by_image(self.truth)

    @cached_property
    def _max_detections(self) -> int:
        return DETECTIONS[choose_protocol(self.truth)]

    def index(self, image_id: int) -> int:
        """The position of an image in the data.

        Raises:
            UserError: there is no such image.
        """
        if image_id not in self._index:
            raise UserError(f"There is no image with the id {image_id}.")
        return self._index[image_id]

    def run(self, number: int) -> ExploredRun:
        """A run by its position.

        Raises:
            UserError: there is no such run.
        """
        if not 0 <= number < len(self.runs):
            raise UserError(f"There is no run number {number}.")
        return self.runs[number]

    def least_scores(self, run: ExploredRun) -> dict[int, float]:
        """The least score of a prediction that counts, by category id."""
        scores = run.least_scores(self.data.classes)
        return {category.id: score for category, score in zip(self.data.categories, scores, strict=True)}

    def start(self) -> None:
        """Begins to read, to analyze and to compute in a thread of its own."""
        self._thread = Thread(target=self._work, name="explore", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after what it is doing: Python must not exit while torch computes in it."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(LONGEST_STOP)

    @contextmanager
    def request(self) -> Iterator[None]:
        """While a request is answered, and shortly after, the thread in the background waits."""
        with self._idle:
            self._requests += 1
        try:
            yield
        finally:
            with self._idle:
                self._requests -= 1
                self._last_request = time.monotonic()
                self._idle.notify_all()

    def _wait_for_requests(self) -> None:
        end = time.monotonic() + LONGEST_WAIT
        while (now := time.monotonic()) < end and not self._stopped.is_set():
            with self._idle:
                is_idle = self._idle.wait_for(lambda: not self._requests, timeout=end - now)
                rest = self._last_request + QUIET_SECONDS - time.monotonic()
            if is_idle and rest <= 0:
                return
            self._stopped.wait(max(rest, 0.0))

    def _work(self) -> None:
        self._prepare_thumbnails()
        while self.runs and not self._stopped.is_set():
            for run in self.runs:
                self._guarded(run, self.refresh)
            is_busy = [self._guarded(run, self.prepare) for run in self.runs]
            if not any(is_busy):
                self._stopped.wait(POLL_SECONDS)

    def _prepare_thumbnails(self) -> None:
        """Those that the gallery shows first; an image that cannot be read says so when the page asks for it."""
        for index in range(min(FIRST_THUMBNAILS, len(self.data))):
            if self._stopped.is_set():
                return
            with suppress(UserError, OSError):
                self.pictures.get(index, "thumbnail")

    def _guarded(self, run: ExploredRun, work: Callable[[ExploredRun], bool]) -> bool:
        """Whether there is more to do; a run that is damaged or deleted says so on the page, and the others go on."""
        try:
            return work(run)
        except (UserError, OSError) as error:
            run.message = str(error)
        except Exception as error:  # whatever a damaged file makes a library raise: the page goes on
            traceback.print_exc()
            run.message = f"{run.path}: {type(error).__name__}, see the terminal."
        return False

    def refresh(self, run: ExploredRun) -> bool:
        """Reads the folder of a run, and analyzes its predictions if they are new."""
        run.read_predictions(self.truth)
        run.message = run.check_model()  # the thresholds in its file decide which predictions count
        missing = [image_id for image_id in run.predictions if image_id not in run.analysis]
        for image_id in missing:
            if self._stopped.is_set():
                break
            self._wait_for_requests()
            self.analyze(run, image_id)
        return bool(missing)

    def analyze(self, run: ExploredRun, image_id: int) -> None:
        """Errors and AP of one image; nothing for panoptic data."""
        if not self.is_panoptic:
            least, limit = self.least_scores(run), self._max_detections
            run.analysis[image_id] = analyze(self.images[image_id], run.predictions[image_id], least, limit)

    def prepare(self, run: ExploredRun) -> bool:
        """Computes some pixel maps, and predictions where the folder has none; whether there is more to do."""
        if not run.has_model:
            return False
        needs_predictions = not run.has_own_predictions
        maps = self.maps[self.runs.index(run)]
        for _ in range(MAPS_AT_ONCE):
            if self._stopped.is_set():
                return False
            self._wait_for_requests()
            found = maps.compute_next(needs_predictions)
            if found is None:
                return False
            image_id, rows = found
            if needs_predictions:
                run.predictions[image_id] = rows
                self.analyze(run, image_id)
        return True


def open_exploration(
    runs: Sequence[ExploredRun], data: tuple[Path, Path] | None = None, *, pngs: Path | None = None
) -> Exploration:
    """Runs with the given data, or with the validation data of the first run that has some.

    Raises:
        UserError: there is no data, or it cannot be read.
    """
    if data is not None:
        split = SplitConfig(annotations=data[0], images=data[1], panoptic_pngs=pngs)
        classes = None
    else:
        configs = [RunFolder(folder.path).read_config() for run in runs if (folder := run.folder)]
        config = next((config for config in configs if config.data.val), None)
        if config is None or config.data.val is None:
            raise UserError("There is no data to show: give run folders with validation data, or --data JSON IMAGES.")
        split, classes = config.data.val, config.data.classes
    with hint_at_option("--data", split):
        opened = open_data(
            split.annotations, split.images, pngs=split.panoptic_pngs, classes=classes, allow_missing=True
        )
    return Exploration(opened, runs)
