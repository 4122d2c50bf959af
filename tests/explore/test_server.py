"""What the page is told."""

import base64
import io
import json

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.coco_files import assert_one_sentence, write_set
from uniquery.evaluation.diagnose import cross_scene_response, probe_images
from uniquery.explore import response_maps
from uniquery.explore.training_view import training_state
from uniquery.masks import rle

from .conftest import perfect, query, serve, work


def test_start(page, scenes):
    start = page.json("api/start")
    content = json.loads(scenes.annotations("val").read_text())
    assert start["runs"] == ["base", "ours"]
    assert start["images"]["id"] == [row["id"] for row in content["images"]]
    assert start["images"]["name"] == [row["file_name"] for row in content["images"]]
    assert sum(start["images"]["instances"]) == len(content["annotations"])
    assert {"missed", "merged", "split", "duplicate", "wrong class"} <= set(start["kinds"])


def test_only_data(tmp_path):
    annotations, images = write_set(tmp_path)
    served = serve([], (annotations, images))
    start = served.json("api/start")
    assert start["runs"] == []
    assert start["images"]["instances"] == [2, 2, 0, 0]
    masks = served.json("api/masks?images=7,3")
    assert [len(masks[key]["truth"]) for key in ("7", "3")] == [2, 0]
    assert served.get("api/images/7?size=thumbnail").headers["content-type"] == "image/jpeg"
    assert "run number 0" in served.error("api/runs/0/analysis", 422)


def test_masks_are_those_of_data_and_predictions(page, trained):
    image_id = page.json("api/start")["images"]["id"][0]
    found = page.json(f"api/masks?images={image_id}")[str(image_id)]
    data = page.exploration.data
    assert found["truth"] == [[label, mask["counts"]] for label, mask in data.instances(0)]
    for number, name in enumerate(("base", "ours")):
        rows = json.loads((trained / name / "predictions.json").read_text())
        rows = sorted((r for r in rows if r["image_id"] == image_id and r["score"] >= 0.05), key=lambda r: -r["score"])
        assert [row[2] for row in found["runs"][number]["predictions"]] == [r["segmentation"]["counts"] for r in rows]
        assert len(found["runs"][number]["truth"]) == len(found["truth"])


def test_perfect_predictions_have_no_errors(runs, scenes):
    (runs / "ours" / "predictions.json").write_text(json.dumps(perfect(scenes)))
    served = serve([runs / "base", runs / "ours"])
    work(served.exploration)
    state, analysis = served.json("api/state"), served.json("api/runs/1/analysis")
    assert [run["analyzed"] for run in state["runs"]] == [4, 4]
    assert [run["maps"] for run in state["runs"]] == [[4, 4]] * 2
    assert [value for value in analysis["ap"] if value is not None] == pytest.approx([1.0] * 4)
    assert not np.array(analysis["counts"]).any()
    base = served.json("api/runs/0/analysis")
    missed = list(served.json("api/start")["kinds"]).index("missed")
    assert sum(counts[missed] for counts in base["counts"]) > 0


def test_predictions_at_mask_thresholds(page):
    import uniquery

    data = page.exploration.data
    image_id = int(data.image_ids[0])
    model = uniquery.load(page.exploration.runs[0].path, device="cpu")
    for threshold in page.json("api/start")["thresholds"]:
        found = page.json(f"api/images/{image_id}/predictions?run=0&mask={threshold}")
        expected = model.predict(data.read(0), score_threshold=0.05, mask_threshold=threshold)
        assert [row[2] for row in found] == [mask["counts"] for mask in expected.rles]


def test_query_view(page):
    found = query(page)
    assert found["searched"] == 3
    assert found["preparing"] == 0
    own_id = int(page.exploration.data.image_ids[0])
    assert found["own"]["image"] == own_id
    assert own_id not in [other["image"] for other in found["others"]]
    means = [other["mean"] for other in found["others"]]
    assert means == sorted(means, reverse=True)
    own = np.frombuffer(base64.b64decode(found["own"]["map"]), np.uint8)
    assert own.size == found["own"]["height"] * found["own"]["width"]
    assert own.mean() / 255 == pytest.approx(found["own"]["mean"], abs=0.003)
    for group in found["numbers"].values():
        assert sum(group["histogram"]) == pytest.approx(float(group["pixels"] > 0))
    pixels = {name: group["pixels"] for name, group in found["numbers"].items()}
    assert pixels["same class"] + pixels["other class"] == pixels["others"]
    assert pixels["inside the own footprint"] + pixels["outside of it"] == pixels["others"]


def test_query_numbers_are_those_of_diagnose(page):
    """With one query in one image, `uniquery diagnose` measures the same groups; only its pixels are other samples."""
    exploration, run = page.exploration, page.exploration.runs[0]
    model = run.model()
    size = model.info.test_size
    probed = probe_images(model.segmenter, exploration.data, size.short, size.longest, range(4))
    from dataclasses import replace

    from uniquery.explore.query_view import QueryView
    from uniquery.querying.memory import InstancePixels

    view = QueryView(exploration.maps[0])
    own = view.prepare(0)
    asked = view._best(own, own.queries[own.queries.target == 0], own.batch, 0)
    maps = {one.image_id: one for one in exploration.maps[0].all()}
    others = []
    for other in probed[1:]:
        one = maps[other.batch.targets[0].image_id]
        pixels = one.pixels(torch.device("cpu"))
        ids = torch.full_like(one.cells, one.image_id)
        same = InstancePixels(
            pixels.embeddings[one.cells], pixels.locations[one.cells], ids, one.labels, torch.ones_like(ids).bool()
        )
        others.append(
            replace(other, queries=other.queries[:0], own_response=other.own_response[:0], instance_pixels=same)
        )
    mine = replace(probed[0], batch=own.batch, queries=asked.query, own_response=torch.zeros(1))
    expected = cross_scene_response(model.segmenter, [mine, *others])
    found = query(page)["numbers"]
    assert found["others"]["pixels"] == expected.inside.pairs + expected.outside.pairs
    assert found["others"]["mean"] == pytest.approx(expected.mean, rel=1e-3)
    assert found["others"]["above_half"] == pytest.approx(expected.above_half, abs=1e-6)
    for name, group in [("same class", expected.same_class), ("other class", expected.other_class)]:
        assert found[name]["pixels"] == group.pairs
        assert found[name]["mean"] == pytest.approx(group.mean, rel=1e-3)
    for name, group in [("inside the own footprint", expected.inside), ("outside of it", expected.outside)]:
        assert found[name]["pixels"] == group.pairs


def test_query_of_a_prediction(runs, scenes):
    """A prediction of one run is asked about in another; its mask decides which query is meant."""
    (runs / "ours" / "predictions.json").write_text(json.dumps(perfect(scenes)))
    served = serve([runs / "base", runs / "ours"])
    work(served.exploration)
    data = served.exploration.data
    image_id = int(data.image_ids[0])
    rows = served.json(f"api/masks?images={image_id}")[str(image_id)]["runs"][1]["predictions"]
    truth = [mask["counts"] for _, mask in data.instances(0)]
    found = served.json(f"api/query?run=0&image={image_id}&source=1&instance={[r[2] for r in rows].index(truth[0])}")
    assert found["numbers"]["own"]["pixels"] == query(served)["numbers"]["own"]["pixels"]
    assert found["searched"] == 3


def test_query_of_an_empty_mask(runs, scenes):
    rows = perfect(scenes)
    for row in rows:
        row["segmentation"] = rle.encode(np.zeros((64, 64), np.uint8))
    (runs / "base" / "predictions.json").write_text(json.dumps(rows))
    served = serve([runs / "base"])
    work(served.exploration)
    image_id = int(served.exploration.data.image_ids[0])
    assert "too small" in served.error(f"api/query?run=0&image={image_id}&source=0&instance=0", 422)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("api/query?run=0&image=999&instance=0", "no image with the id 999"),
        ("api/query?run=7&image={0}&instance=0", "no run number 7"),
        ("api/query?run=0&image={0}&instance=500", "no instance number 500"),
        ("api/query?run=0&image={0}&source=9&instance=0", "no run number 9"),
        ("api/query?run=x&image={0}&instance=0", "is not a number"),
        ("api/query?image={0}&instance=0", "lacks run"),
        ("api/equivariance?run=0&image={0}&scale=100", "scale must be in"),
        ("api/equivariance?run=0&image={0}&angle=nan", "angle must be in"),
        ("api/masks?images=1,x", "is not a number"),
        ("api/images/{0}/predictions?run=0&mask=7", "from 0 to 1"),
        ("api/images/{0}/predictions?run=0", "lacks mask"),
        ("api/uploads/77/overlay.png", "not kept any more"),
    ],
)
def test_bad_requests(page, path, words):
    sentence = page.error(path.format(int(page.exploration.data.image_ids[0])), 422)
    assert words in sentence
    assert_one_sentence(sentence)


def test_too_many_images_at_once(page):
    assert "At most 100" in page.error("api/masks?images=" + ",".join(["1"] * 101), 422)


def test_maps_are_bounded_in_bytes(runs, monkeypatch):
    served = serve([runs / "base"])
    work(served.exploration)
    each = served.exploration.maps[0].size / 4
    monkeypatch.setattr(response_maps, "CACHE_BYTES", int(1.5 * each))
    bounded = serve([runs / "base"])
    work(bounded.exploration)
    maps = bounded.exploration.maps[0]
    assert maps.progress == (2, 2)
    assert maps.size <= 2.5 * each
    shown = {one.image_id for one in maps.all()}
    image = next(i for i, image_id in enumerate(bounded.exploration.data.image_ids.tolist()) if image_id not in shown)
    assert query(bounded, image=image)["searched"] == 2


def test_images_in_sight_are_predicted_first(runs):
    (runs / "base" / "predictions.json").unlink()
    served = serve([runs / "base"])
    maps, ids = served.exploration.maps[0], served.exploration.data.image_ids.tolist()
    last = ids[maps._order[-1]]
    assert served.json(f"api/masks?images={last}")[str(last)]["runs"] == [None]
    assert maps.compute_next(needs_predictions=True)[0] == last
    others = [maps.compute_next(needs_predictions=True)[0] for _ in ids[1:]]
    assert sorted([last, *others]) == sorted(ids)
    assert maps.compute_next(needs_predictions=True) is None


def test_thumbnails_of_the_first_page_are_ready(runs, monkeypatch):
    served = serve([runs / "base"])
    served.exploration._prepare_thumbnails()
    monkeypatch.setattr(served.exploration.data, "read", None)
    image_id = int(served.exploration.data.image_ids[0])
    assert served.get(f"api/images/{image_id}?size=thumbnail").headers["content-type"] == "image/jpeg"


def test_identity_is_equivariant(page):
    image_id = int(page.exploration.data.image_ids[0])
    page.exploration.runs[0].model()
    found = page.json(f"api/equivariance?run=0&image={image_id}&flip=0")
    assert (found["height"], found["width"]) == (64, 64)
    assert found["feature_error"] == pytest.approx(0, abs=1e-6)
    flipped = page.json(f"api/equivariance?run=0&image={image_id}&flip=1&crop=0.5&angle=20&scale=1.5")
    assert (flipped["height"], flipped["width"]) == (32, 32)
    assert flipped["feature_error"] > 0
    picture = page.get(f"api/view?run=0&image={image_id}&flip=1")
    original = page.exploration.data.read(0)
    shown = np.asarray(Image.open(io.BytesIO(picture.content)))
    assert np.abs(shown.astype(int) - original[:, ::-1]).mean() < 6  # jpeg


def test_upload_and_its_files(page, scenes):
    photo = next(scenes.images("val").iterdir())
    found = page.client.post("/secret-token/api/uploads?run=0", content=photo.read_bytes()).json()
    assert (found["height"], found["width"]) == (64, 64)
    address = f"api/uploads/{found['upload']}"
    level = page.json(f"{address}/predictions?mask=0.3")
    assert page.json(f"{address}/predictions") == found["predictions"] != level
    least = level[1][1]
    kept = [row for row in level if row[1] >= least]
    results = page.get(f"{address}/results.json?score={least - 1e-4}&mask=0.3")
    assert "attachment" in results.headers["content-disposition"]
    assert [row["segmentation"]["counts"] for row in results.json()] == [row[2] for row in kept]
    labels = Image.open(io.BytesIO(page.get(f"{address}/labels.png?score={least - 1e-4}&mask=0.3").content))
    assert np.asarray(labels).max() <= len(kept)
    overlay = Image.open(io.BytesIO(page.get(f"{address}/overlay.png").content))
    assert overlay.size == (64, 64)
    assert "offers results.json" in page.error(f"{address}/passwd", 422)


def test_only_some_uploads_are_kept(page, scenes):
    photo = next(scenes.images("val").iterdir()).read_bytes()
    numbers = [page.client.post("/secret-token/api/uploads?run=0", content=photo).json()["upload"] for _ in range(5)]
    assert "not kept" in page.error(f"api/uploads/{numbers[0]}/labels.png", 422)
    assert page.get(f"api/uploads/{numbers[-1]}/labels.png").status_code == 200


def test_other_data_is_predicted(runs, scenes):
    served = serve([runs / "base"], (scenes.annotations("train"), scenes.images("train")))
    assert served.json("api/state")["runs"][0]["predicted"] == 0
    work(served.exploration)
    state = served.json("api/state")["runs"][0]
    assert (state["predicted"], state["analyzed"]) == (6, 6)
    assert all(value is not None for value in served.json("api/runs/0/analysis")["ap"])


def test_training_view(page, runs):
    state = page.json("api/runs/0/training")
    assert (state["status"], state["step"], state["steps"], state["remaining"]) == ("finished", 2, 2, None)
    assert len(state["losses"]["total"]) == len(state["train_steps"]) == 2
    served = serve([runs / "base"])
    run, metrics = served.exploration.runs[0], runs / "base" / "metrics.jsonl"
    config = runs / "base" / "config.yaml"
    config.write_text(config.read_text().replace("  steps: 2\n", "  steps: 10\n"))
    written = metrics.stat().st_mtime
    training = training_state(run, now=written + 1)
    assert training["status"] == "training"
    seconds = [json.loads(line)["seconds"] for line in metrics.read_text().splitlines() if '"train"' in line]
    each = sum(sum(one.values()) for one in seconds) / len(seconds)
    evaluation = [json.loads(line)["seconds"] for line in metrics.read_text().splitlines() if '"eval"' in line]
    evals = 8 / 2 * sum(evaluation) / len(evaluation)
    assert training["remaining"] == pytest.approx(8 * each + evals, abs=1)
    assert training_state(run, now=written + 10_000)["status"] == "stopped"
    config.write_text(config.read_text().replace("  steps: 10\n", "  epochs: 3\n"))
    assert training_state(run)["steps"] is None
    environment = runs / "base" / "environment.json"
    environment.write_text(json.dumps(json.loads(environment.read_text()) | {"steps_per_epoch": 2.5}))
    assert training_state(run)["steps"] == 8
