"""COCO metrics: both backends agree, agree with pycocotools used by hand, and have their limits."""

import contextlib
import copy
import io
import json
import sys
from typing import Any

import pytest
from rich.console import Console

from helpers.coco_sets import HEIGHT, PERFECT, WIDTH, one_object, polygon, random_set, uncompressed
from helpers.reference import reference
from uniquery.errors import DataError, UserError
from uniquery.evaluation import Metrics, class_table, evaluate, load_results, table
from uniquery.masks import rle

BACKENDS = ("hotcoco", "pycocotools")
NAMES = ["AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl"]


def official(truth: dict[str, Any], results: list[dict[str, Any]], iou_type: str) -> dict[str, float | None]:
    """The twelve numbers of pycocotools, used as its demo uses it."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):
        wanted = COCO()
        wanted.dataset = copy.deepcopy(truth)
        wanted.createIndex()
        run = COCOeval(wanted, wanted.loadRes(copy.deepcopy(results)), iou_type)
        run.evaluate()
        run.accumulate()
        run.summarize()
    return {name: None if value == -1 else 100 * float(value) for name, value in zip(NAMES, run.stats, strict=True)}


def assert_equal(left: dict[str, float | None], right: dict[str, float | None]) -> None:
    assert list(left) == list(right)
    for name, value in left.items():
        assert value == (None if right[name] is None else pytest.approx(right[name], abs=1e-9)), name


def text(results_table: Any) -> str:
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(results_table)
    return console.export_text()


@pytest.fixture
def one() -> dict[str, Any]:
    return one_object()


class TestBackendsAgree:
    @pytest.mark.parametrize("max_detections", [1, 5, 10, 100, 300])
    @pytest.mark.parametrize("iou_type", ["segm", "bbox"])
    @pytest.mark.parametrize("seed", range(3))
    def test_on_random_sets(self, seed: int, iou_type: Any, max_detections: int) -> None:
        truth, results = random_set(seed)
        ours, theirs = (
            evaluate(truth, results, iou_type=iou_type, max_detections=max_detections, backend=backend)
            for backend in BACKENDS
        )
        assert_equal(ours.values, theirs.values)
        assert_equal(ours.per_class, theirs.per_class)
        assert None not in ours.values.values()
        assert 0 < ours.values["AP"] < 100
        assert ours.per_class["b"] is None
        assert ours.per_class["d"] == 0.0

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("seed", range(2))
    def test_with_pycocotools_by_hand(self, seed: int, backend: Any) -> None:
        truth, results = random_set(seed)
        masks = evaluate(truth, results, backend=backend)
        assert_equal(masks.values, official(truth, results, "segm"))
        boxes = [{**one, "bbox": list(rle.bounding_box(one["segmentation"]))} for one in results]
        for one in boxes:
            del one["segmentation"]
        expected = official(truth, boxes, "bbox")
        for given in (boxes, results):
            found = evaluate(truth, given, iou_type="bbox", backend=backend)
            assert_equal(found.values, expected)

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_at_a_limit_the_rest_is_not_seen(self, backend: Any) -> None:
        truth, results = random_set(0)
        kept: list[dict[str, Any]] = []
        for image, category in {(one["image_id"], one["category_id"]) for one in results}:
            group = [one for one in results if (one["image_id"], one["category_id"]) == (image, category)]
            kept += sorted(group, key=lambda one: -one["score"])[:5]
        cut = evaluate(truth, kept, max_detections=5, backend=backend)
        whole = evaluate(truth, results, max_detections=5, backend=backend)
        assert cut.values["AR5"] == pytest.approx(whole.values["AR5"], abs=1e-9)
        assert list(whole.values) == [*NAMES[:7], "AR5", *NAMES[9:]]

    def test_more_detections_raise_the_recall(self) -> None:
        truth, results = random_set(0)
        low, high = (evaluate(truth, results, max_detections=n) for n in (100, 300))
        assert high.values["AR300"] > low.values["AR100"] + 1
        assert high.values["AR10"] == low.values["AR10"]


@pytest.mark.realdata
class TestOfficialExample:
    SEGM = (0.320, 0.562, 0.299, 0.387, 0.310, 0.327, 0.268, 0.415, 0.417, 0.469, 0.377, 0.381)
    BBOX = (0.505, 0.697, 0.573, 0.586, 0.519, 0.501, 0.387, 0.594, 0.595, 0.640, 0.566, 0.564)

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize(("iou_type", "expected"), [("segm", SEGM), ("bbox", BBOX)])
    def test_published_numbers(self, iou_type: Any, expected: tuple[float, ...], backend: Any) -> None:
        folder = reference("data", "metrics", "coco_fake100")
        truth, results = folder / "instances_val2014_100.json", f"instances_val2014_fake{iou_type}100_results.json"
        found = evaluate(truth, folder / results, iou_type=iou_type, backend=backend)
        assert list(found.values) == NAMES
        assert [value / 100 for value in found.values.values()] == pytest.approx(expected, abs=5.0001e-4)
        if iou_type == "segm":
            assert found.values["AP"] / 100 == pytest.approx(0.3195452759, abs=5e-11)
        assert sum(found.per_class_instances.values()) < 839
        by_hand = official(json.loads(truth.read_bytes()), json.loads((folder / results).read_bytes()), iou_type)
        assert_equal(found.values, by_hand)

    def test_per_class_averages_to_ap(self) -> None:
        folder = reference("data", "metrics", "coco_fake100")
        results = load_results(
            folder / "instances_val2014_fakesegm100_results.json", folder / "instances_val2014_100.json"
        )
        found = evaluate(folder / "instances_val2014_100.json", results)
        measured = [value for value in found.per_class.values() if value is not None]
        assert len(measured) < len(found.per_class) == 80
        assert sum(measured) / len(measured) == pytest.approx(found.values["AP"])


@pytest.mark.parametrize("backend", BACKENDS)
class TestLimits:
    def test_one_perfect_result(self, one: dict[str, Any], backend: Any) -> None:
        for iou_type in ("segm", "bbox"):
            found = evaluate(one, [PERFECT], iou_type=iou_type, backend=backend)
            assert found.values["AP"] == pytest.approx(100)
            assert found.values["APm"] == pytest.approx(100)
            assert found.values["APs"] is found.values["APl"] is None
            assert found.per_class == {"cell": pytest.approx(100)}
            assert found.per_class_instances == {"cell": 1}

    def test_empty_results(self, one: dict[str, Any], backend: Any) -> None:
        found = evaluate(one, [], backend=backend)
        assert found.values["AP"] == found.values["AR100"] == 0.0
        assert found.values["APl"] is None
        assert found.per_class == {"cell": 0.0}

    @pytest.mark.parametrize("missing", ["annotations", "images", "crowd only", "categories"])
    def test_no_ground_truth(self, one: dict[str, Any], backend: Any, missing: str) -> None:
        results = [PERFECT]
        if missing == "crowd only":
            one["annotations"][0]["iscrowd"] = 1
        else:
            one["annotations"], one[missing] = [], []
            results = [PERFECT] if missing == "annotations" else []
        found = evaluate(one, results, backend=backend)
        assert list(found.values) == NAMES
        assert set(found.values.values()) == {None}
        assert set(found.per_class.values()) <= {None}
        assert sum(found.per_class_instances.values()) == 0

    def test_chosen_images(self, one: dict[str, Any], backend: Any) -> None:
        one["images"].append({"id": 43, "height": HEIGHT, "width": WIDTH})
        one["annotations"].append({**one["annotations"][0], "image_id": 43})
        assert evaluate(one, [PERFECT], backend=backend).values["AR100"] == 50
        assert evaluate(one, [PERFECT], backend=backend, image_ids=[42]).values["AR100"] == 100
        assert evaluate(one, [PERFECT], backend=backend, image_ids=[43]).values["AR100"] == 0
        with pytest.raises(DataError, match="no image with the id 44"):
            evaluate(one, [PERFECT], backend=backend, image_ids=[44])

    def test_is_silent_and_changes_nothing(self, backend: Any, capfd: pytest.CaptureFixture[str]) -> None:
        truth, results = random_set(5)
        before = copy.deepcopy((truth, results))
        evaluate(truth, results, backend=backend)
        assert capfd.readouterr() == ("", "")
        assert (truth, results) == before


class TestWhatCounts:
    def test_size_of_a_mask_is_its_own(self) -> None:
        """A large box beside a small mask must not move a wrong detection out of the small ones."""
        truth, results = random_set(1)
        boxed = [{**one, "bbox": [0, 0, WIDTH, HEIGHT]} for one in results]
        assert evaluate(truth, boxed).values == evaluate(truth, results).values

    def test_missing_fields_are_filled(self) -> None:
        truth, results = random_set(2)
        bare = {**truth, "annotations": [dict(one) for one in truth["annotations"]]}
        for one in bare["annotations"]:
            del one["area"], one["bbox"], one["id"]
            if not one["iscrowd"]:
                del one["iscrowd"]
        for iou_type in ("segm", "bbox"):
            full = evaluate(truth, results, iou_type=iou_type)
            assert evaluate(bare, results, iou_type=iou_type).values == full.values

    @pytest.mark.parametrize("iou_type", ["segm", "bbox"])
    def test_size_of_an_object_is_its_mask_s(self, one: dict[str, Any], iou_type: Any) -> None:
        """A triangle of some 800 pixels is small, though its box has 1600."""
        one["annotations"][0]["segmentation"] = [[10, 10, 50, 10, 10, 50]]
        found = evaluate(one, [], iou_type=iou_type)
        assert found.values["APs"] == 0.0
        assert found.values["APm"] is None

    def test_any_form_of_result_mask(self) -> None:
        truth, results = random_set(3)
        other = [{**one, "segmentation": uncompressed(one["segmentation"])} for one in results]
        for one in other[::2]:
            compressed = rle.from_segmentation(one["segmentation"], HEIGHT, WIDTH)
            one["segmentation"] = {"size": compressed["size"], "counts": compressed["counts"].encode()}
        assert evaluate(truth, other).values == evaluate(truth, results).values
        truth["annotations"] = truth["annotations"][:1]
        first = truth["annotations"][0] | {"segmentation": polygon(20, 30, 50, 60), "iscrowd": 0}
        truth["annotations"] = [first]
        drawn = {**first, "score": 0.5}
        assert evaluate(truth, [drawn]).values["AP"] == pytest.approx(100)

    def test_same_names_do_not_collide(self, one: dict[str, Any]) -> None:
        one["categories"] += [{"id": 8, "name": "cell"}, {"id": 1, "name": "cell (8)"}, {"id": 2}]
        found = evaluate(one, [PERFECT])
        assert list(found.per_class) == ["cell (8) (1)", "category 2 (2)", "cell (3)", "cell (8)"]
        assert found.per_class["cell (3)"] == pytest.approx(100)
        assert found.per_class_instances == {"cell (8) (1)": 0, "category 2 (2)": 0, "cell (3)": 1, "cell (8)": 0}

    def test_more_instances_than_detections(self) -> None:
        truth, results = random_set(0)
        crowded = evaluate(truth, results, max_detections=100)
        most = sum(one["image_id"] == 0 and not one["iscrowd"] for one in truth["annotations"])
        assert crowded.notes[0].startswith(f"1 image has more than 100 instances (the most: {most})")
        assert "images have more than 2 instances" in evaluate(truth, results, max_detections=2).notes[0]
        assert evaluate(truth, results, max_detections=most).notes == ()


class TestBadArguments:
    def test_missing_pycocotools(self, one: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "pycocotools.coco", None)
        with pytest.raises(UserError, match=r"pip install 'uniquery\[pycocotools\]'"):
            evaluate(one, [PERFECT], backend="pycocotools")

    @pytest.mark.parametrize(
        ("argument", "sentence"),
        [
            ({"max_detections": 0}, "max_detections is 0 and must be at least 1."),
            ({"backend": "hotcocoa"}, "Did you mean 'hotcoco'"),
            ({"iou_type": "mask"}, "it is one of segm, bbox"),
        ],
    )
    def test_out_of_range(self, one: dict[str, Any], argument: dict[str, Any], sentence: str) -> None:
        with pytest.raises(UserError, match=sentence):
            evaluate(one, [PERFECT], **argument)


def test_tables_say_every_number(one: dict[str, Any]) -> None:
    masks = evaluate(one, [PERFECT])
    boxes = evaluate(one, [], iou_type="bbox", max_detections=300)
    lines = {
        cells[1]: cells[2:] for line in text(table(masks, boxes)).splitlines() if len(cells := line.split("│")) > 1
    }
    shown = {name.strip(): [cell.strip() for cell in cells[1:3]] for name, cells in lines.items()}
    assert shown["AP"] == ["100.00", "0.00"]
    assert shown["APs"] == ["n/a", "n/a"]
    assert shown["AR100"] == ["100.00", "n/a"]
    assert shown["AR300"] == ["n/a", "0.00"]
    assert set(shown) == {*NAMES, "AR300"}
    one["categories"].append({"id": 4, "name": "dust"})
    classes = text(class_table(evaluate(one, [PERFECT]), evaluate(one, [], iou_type="bbox")))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in classes.splitlines() if "│" in line]
    assert rows == [["cell", "1", "100.00", "0.00"], ["dust", "0", "n/a", "n/a"]]


def test_metrics_are_frozen(one: dict[str, Any]) -> None:
    found: Metrics = evaluate(one, [PERFECT])
    with pytest.raises(AttributeError):
        found.values = {}  # type: ignore[misc]
