"""LVIS metrics: the official figures, an independent small implementation, the federated rule, and the choice."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.coco_files import assert_one_sentence
from helpers.coco_sets import HEIGHT, WIDTH, detection, random_set, rectangle
from helpers.naive_lvis import NaiveLvis, assert_lvis_equals_the_naive_way
from helpers.reference import reference
from uniquery.cli import main
from uniquery.errors import DataError, UserError
from uniquery.evaluation import class_table, evaluate
from uniquery.evaluation.coco import describe_metric
from uniquery.evaluation.compare import compare_over_images
from uniquery.evaluation.operating_points import read_scores
from uniquery.evaluation.protocol import choose_protocol
from uniquery.masks import rle


def random_lvis(seed: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Twelve images, nine classes of three frequencies; one class without ground truth, one never predicted."""
    rng = np.random.default_rng(seed)
    images, annotations, results = [], [], []

    def draw() -> tuple[int, int, int, int]:
        x, y = int(rng.integers(0, WIDTH - 20)), int(rng.integers(0, HEIGHT - 20))
        return x, y, int(rng.integers(4, 130)), int(rng.integers(4, 130))

    for image in range(1, 13):
        present = rng.choice(np.arange(1, 9), 3, replace=False).tolist()
        absent = [c for c in range(1, 10) if c not in present]
        negative = rng.choice(absent, 2, replace=False).tolist()
        images.append({"id": image, "height": HEIGHT, "width": WIDTH, "neg_category_ids": negative})
        images[-1]["not_exhaustive_category_ids"] = [c for c in present if rng.random() < 0.3]
        for category in present:
            for _ in range(int(rng.integers(1, 4))):
                box = draw()
                mask = rectangle(*box)
                row = {"id": len(annotations) + 1, "image_id": image, "category_id": category, "segmentation": mask}
                annotations.append({**row, "area": float(rle.area(mask))})
                for _ in range(int(rng.integers(0, 3)) if category != 8 else 0):
                    x, y, width, height = (side + int(rng.integers(-6, 7)) for side in box)
                    near = (x, y, max(width, 3), max(height, 3))
                    results.append(detection(image, category, near, float(rng.random())))
        wrong = [category for category in (*negative, *present, *absent[:2]) if category != 8]
        results += [detection(image, category, draw(), float(rng.random())) for category in wrong]
    categories = [{"id": i, "name": f"class {i}", "frequency": "rcf"[i % 3]} for i in range(1, 10)]
    return {"images": images, "annotations": annotations, "categories": categories}, results


def folder() -> Path:
    return reference("data/metrics/lvis")


@pytest.mark.realdata
class TestOfficialFigures:
    @pytest.fixture
    def metrics(self):
        return evaluate(folder() / "lvis_val_100.json", folder() / "synthetic_segm_results.json")

    def test_equal_to_the_last_digit(self, metrics):
        expected = json.loads((folder() / "synthetic_segm_expected_official_lvis_api.json").read_text())
        assert set(expected) == set(metrics.values)
        for name, value in expected.items():
            assert metrics.values[name] == pytest.approx(100 * value, abs=1e-12), name

    def test_classes(self, metrics):
        assert len(metrics.per_class) == 1230
        assert sum(value is not None for value in metrics.per_class.values()) == 190
        assert metrics.max_detections == 300
        assert metrics.notes == ()

    def test_the_command(self, capsys):
        results, truth = str(folder() / "synthetic_segm_results.json"), str(folder() / "lvis_val_100.json")
        assert main(["eval", "--results", results, "--annotations", truth, "--type", "segm"]) == 0
        printed = capsys.readouterr().out
        for name, value in (("APr", "90.00"), ("APc", "54.55"), ("APf", "43.10"), ("AP", "45.16")):
            assert any(name in line.split() and value in line for line in printed.splitlines())


class TestIndependently:
    @pytest.mark.parametrize("seed", range(4))
    @pytest.mark.parametrize("limit", [300, 7])
    def test_every_number(self, seed, limit):
        truth, results = random_lvis(seed)
        assert assert_lvis_equals_the_naive_way(truth, results, limit).values["AP"] > 0

    def test_never_predicted_is_zero_and_without_truth_is_not_measured(self):
        truth, results = random_lvis(0)
        metrics = evaluate(truth, results)
        assert metrics.per_class["class 8"] == 0
        assert metrics.per_class["class 9"] is None
        printed = class_table(metrics)
        assert list(printed.columns[2].cells)[-2:] == ["0.00", "n/a"]


class TestRules:
    def test_the_best_300_of_an_image_count_over_all_classes(self):
        truth, _ = random_lvis(1)
        row = truth["annotations"][0]
        hit = {**row, "score": 0.5}
        crowd = [detection(row["image_id"], 1 + i % 9, (0, 0, 3, 3), 0.9) for i in range(300)]
        of_class = truth["categories"][row["category_id"] - 1]["name"]
        assert evaluate(truth, [hit, *crowd[1:]]).per_class[of_class] > 0
        assert evaluate(truth, [hit, *crowd]).per_class[of_class] == 0
        assert evaluate(truth, [hit, *crowd], max_detections=301).per_class[of_class] > 0

    def test_without_negative_classes_a_note_says_what_is_not_counted(self):
        truth, results = random_lvis(0)
        for image in truth["images"]:
            image["neg_category_ids"] = []
        (note,) = evaluate(truth, results).notes
        assert "neg_category_ids" in note

    def test_both_spellings(self):
        truth, results = random_lvis(0)
        expected = evaluate(truth, results)
        for image in truth["images"]:
            image["non_exhaustive_category_ids"] = image.pop("not_exhaustive_category_ids")
        assert evaluate(truth, results) == expected

    def test_some_classes_and_images(self):
        truth, results = random_lvis(2)
        results = [r for r in results if r["category_id"] <= 2]
        some = evaluate(truth, results, category_ids=[1, 2], image_ids=[1, 2, 3, 4, 5, 6])
        images = [i for i in truth["images"] if i["id"] <= 6]
        cut = {**truth, "images": images, "annotations": [a for a in truth["annotations"] if a["image_id"] <= 6]}
        naive = NaiveLvis(cut, results)
        assert list(some.per_class) == ["class 1", "class 2"]
        assert some.values["AP"] == pytest.approx(naive.ap([1, 2]), abs=1e-9)

    def test_boxes(self):
        truth, results = random_lvis(0)
        assert evaluate(truth, results, iou_type="bbox").values["AP"] > 0

    def test_nothing_to_measure(self):
        truth, _ = random_lvis(0)
        assert evaluate({**truth, "annotations": []}, []).values["APr"] is None

    def test_runs_are_compared_by_the_same_rules(self):
        truth, results = random_lvis(0)
        worse = results[::2]
        compared = compare_over_images(truth, results, worse, samples=20)
        ours, theirs = (evaluate(truth, side).values for side in (results, worse))
        assert {"AP", "APr", "APc", "APf"} <= compared.metrics.keys()
        for name, interval in compared.metrics.items():
            assert interval.delta == pytest.approx(theirs[name] - ours[name], abs=1e-9)

    def test_thresholds_are_chosen_by_the_same_rules(self):
        truth, results = random_lvis(0)
        present = {(a["image_id"], a["category_id"]) for a in truth["annotations"]}
        negative = {(image["id"], c) for image in truth["images"] for c in image.get("neg_category_ids", ())}
        for category, detections in read_scores(truth, results).classes.items():
            places = [(row["image_id"], row["category_id"]) for row in results if row["category_id"] == category]
            assert len(detections.scores) <= sum(place in present | negative for place in places)

    def test_every_number_is_described(self):
        truth, results = random_lvis(0)
        assert all(describe_metric(name) for name in evaluate(truth, results).values)


class TestChoice:
    def test_by_the_frequencies(self):
        truth, results = random_lvis(0)
        assert choose_protocol(truth) == "lvis"
        assert "APr" in evaluate(truth, results).values
        assert "APr" not in evaluate(truth, results, protocol="coco").values
        del truth["categories"][4]["frequency"]
        assert choose_protocol(truth) == "coco"
        assert choose_protocol(truth, "lvis") == "lvis"

    def test_plain_coco_is_scored_as_before(self):
        truth, results = random_set(0)
        assert evaluate(truth, results).max_detections == 100

    @pytest.mark.parametrize(
        ("change", "options", "sentence"),
        [
            (lambda t: t["categories"][4].pop("frequency"), {}, r"category 5 \(class 5\) has no 'frequency'.*r, c, f"),
            (lambda t: t["categories"][4].update(frequency="x"), {}, "category 5 .* has no 'frequency'"),
            (lambda t: t["images"][2].update(neg_category_ids=["a"]), {}, "image 3 has .* 'neg_category_ids'"),
            (lambda t: None, {"backend": "pycocotools"}, "LVIS metrics need the backend hotcoco"),
            (lambda t: None, {"max_detections": 0}, "max_detections is 0"),
            (lambda t: None, {"iou_type": "keypoints"}, "iou_type is 'keypoints'"),
            (lambda t: None, {"protocol": "lviss"}, "protocol is 'lviss'"),
        ],
    )
    def test_bad_input_is_told_in_a_sentence(self, change, options, sentence):
        truth, results = random_lvis(0)
        change(truth)
        with pytest.raises((DataError, UserError), match=sentence) as caught:
            evaluate(truth, results, **{"protocol": "lvis", **options})
        assert_one_sentence(caught.value)

    def test_results_for_an_unknown_image(self):
        truth, results = random_lvis(0)
        with pytest.raises(DataError, match=r"entry 0.*image id 99 is not in the ground truth") as caught:
            evaluate(truth, [{**results[0], "image_id": 99}])
        assert_one_sentence(caught.value)
