"""Two trained runs on the small scenes, and the page over them."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

import uniquery
from helpers.small_runs import small_config
from uniquery.masks import rle

from .in_browser import CHROMIUM, WAIT, Server

pytest.importorskip("starlette", reason="the extra [explore] is not installed")


def perfect(scenes) -> list[dict]:
    """The ground truth of the validation scenes as predictions."""
    content = json.loads(scenes.annotations("val").read_text())
    sizes = {row["id"]: (row["height"], row["width"]) for row in content["images"]}
    return [
        {
            "image_id": row["image_id"],
            "category_id": row["category_id"],
            "score": 0.9,
            "bbox": row["bbox"],
            "segmentation": rle.from_segmentation(row["segmentation"], *sizes[row["image_id"]]),
        }
        for row in content["annotations"]
    ]


@pytest.fixture(scope="session")
def trained(tmp_path_factory, scenes) -> Path:
    """A folder with the runs base and ours; do not change it.

    Two steps teach a model nothing: the predictions are ground truth, of base every other instance with a low score.
    """
    root = tmp_path_factory.mktemp("explore")
    for name, seed in (("base", 0), ("ours", 1)):
        changes = [f"name={name}", f"seed={seed}", "model.score_threshold=0", "train.steps=2", "train.ema=null"]
        uniquery.train(uniquery.load_config(small_config(root, scenes), changes))
    for name, step in (("base", 2), ("ours", 1)):
        rows = [row | {"score": 0.9 - 0.6 * (i % 2)} for i, row in enumerate(perfect(scenes)[::step])]
        (root / "runs" / name / "predictions.json").write_text(json.dumps(rows))
    return root / "runs"


@pytest.fixture
def runs(trained, tmp_path) -> Path:
    """The same, free to be changed."""
    return Path(shutil.copytree(trained, tmp_path / "runs"))


@dataclass
class Served:
    """The page without a network: `client` asks, `exploration` is what it shows."""

    client: object
    exploration: object
    token: str

    def get(self, path: str, **options):
        return self.client.get(f"/{self.token}/{path}", **options)

    def json(self, path: str):
        answer = self.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def error(self, path: str, status: int) -> str:
        answer = self.get(path)
        assert answer.status_code == status, answer.text
        return answer.json()["error"]


def serve(paths, data=None) -> Served:
    from starlette.testclient import TestClient

    from uniquery.explore.app import build_app
    from uniquery.explore.exploration import open_exploration
    from uniquery.explore.runs import open_runs

    exploration = open_exploration(open_runs(paths, "cpu"), data)
    token = "secret-token"
    return Served(TestClient(build_app(exploration, token), base_url="http://127.0.0.1:8000"), exploration, token)


def work(exploration) -> None:
    """All that the thread in the background would do."""
    for run in exploration.runs:
        exploration._guarded(run, exploration.refresh)
        while exploration._guarded(run, exploration.prepare):
            pass


def query(page, run=0, image=0, instance=0) -> dict:
    """The query view of an instance of the ground truth."""
    image_id = int(page.exploration.data.image_ids[image])
    return page.json(f"api/query?run={run}&image={image_id}&source=truth&instance={instance}")


@pytest.fixture(scope="module")
def page(trained) -> Served:
    served = serve([trained / "base", trained / "ours"])
    work(served.exploration)
    return served


@pytest.fixture(scope="module")  # its event loop must not stay for other tests
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def server(trained):
    started = Server(trained / "base", trained / "ours")
    yield started
    started.stop()


@pytest.fixture
def tab(browser):
    """A page that fails the test if a script raises, or anything but the server is asked."""
    context = browser.new_context(viewport={"width": 1280, "height": 720})
    page = context.new_page()
    page.set_default_timeout(WAIT)
    page.problems = []
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on("console", lambda line: page.problems.append(line.text) if "Content Security" in line.text else None)
    page.on(
        "request",
        lambda request: (
            None if request.url.startswith(("http://127.0.0.1:", "blob:")) else page.problems.append(request.url)
        ),
    )
    yield page
    assert page.problems == []
    context.close()
