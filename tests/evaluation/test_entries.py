"""COCO files from anywhere: what is wrong with one is said in one clear sentence."""

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.coco_sets import HEIGHT, PERFECT, WIDTH, one_object, uncompressed
from uniquery.errors import DataError
from uniquery.evaluation import evaluate, load_results


@pytest.fixture
def one() -> dict[str, Any]:
    return one_object()


class TestBadResults:
    CASES = (
        ({"image_id": ...}, "it has no 'image_id'"),
        ({"category_id": ...}, "it has no 'category_id'"),
        ({"score": ...}, "it has no 'score'"),
        ({"segmentation": ...}, "it has no 'segmentation', which mask AP needs"),
        ({"image_id": 43}, "its image id 43 is not in the ground truth (perhaps"),
        ({"image_id": "42"}, "(an id is a whole number)"),
        ({"image_id": [42]}, "(an id is a whole number)"),
        ({"category_id": 0}, "has the ids 3 to 3 (perhaps a class index"),
        ({"score": float("nan")}, "its score is nan instead of a finite number"),
        ({"score": float("inf")}, "its score is inf"),
        ({"score": "0.5"}, "its score is '0.5'"),
        ({"score": None}, "its score is None"),
        ({"segmentation": {"size": [WIDTH, HEIGHT], "counts": "0"}}, "(image 42): its run lengths are for [180, 150]"),
        ({"segmentation": {"size": [HEIGHT, WIDTH], "counts": "05"}}, "its run lengths add up to 5 pixels"),
        ({"segmentation": {"size": [HEIGHT, WIDTH], "counts": [1, 2]}}, "its run lengths add up to 3 pixels"),
        ({"segmentation": {"size": [HEIGHT, WIDTH], "counts": "o"}}, "cut off or not COCO's"),
        ({"segmentation": {"size": [HEIGHT, WIDTH]}}, "lack 'size' or 'counts'"),
        ({"segmentation": {"size": 3, "counts": "0"}}, "entry 1 (image 42)"),
        ({"segmentation": "0"}, "neither polygons nor run lengths"),
        ({"segmentation": []}, "no polygon"),
    )
    BOXES = (
        ({"bbox": ..., "segmentation": ...}, "it has neither 'bbox' nor 'segmentation'"),
        ({"bbox": [1, 2, 3]}, "its bbox is not [x, y, width, height]"),
        ({"bbox": [1, 2, float("nan"), 3]}, "a number of its bbox is nan"),
        ({"bbox": [1, 2, -4, 3]}, "negative width or height"),
        ({"bbox": 5}, "its bbox is not"),
    )

    @pytest.mark.parametrize(
        ("change", "sentence", "iou_type"), [(*case, "segm") for case in CASES] + [(*case, "bbox") for case in BOXES]
    )
    def test_entry(self, one: dict[str, Any], tmp_path: Path, change: Any, sentence: str, iou_type: Any) -> None:
        entry = {key: value for key, value in (PERFECT | change).items() if value is not ...}
        path = tmp_path / "results.json"
        path.write_text(json.dumps([PERFECT, entry]))
        for run in (load_results, lambda path, truth, iou_type: evaluate(truth, path, iou_type=iou_type)):
            with pytest.raises(DataError) as caught:
                run(path, one, iou_type=iou_type)
            message = str(caught.value)
            assert message.startswith(f"{path}, entry 1")
            assert sentence in message
            assert message.endswith(".")
            assert "\n" not in message

    def test_entry_in_memory(self, one: dict[str, Any]) -> None:
        with pytest.raises(DataError, match=r"the results, entry 1: it is text instead of an object\."):
            evaluate(one, [PERFECT, "mask"])  # type: ignore[list-item]

    @pytest.mark.parametrize(
        ("content", "sentence"),
        [(None, "file not found"), ("[{", "not valid json"), ("{}", "holds an object"), ("\xff", "not valid json")],
    )
    def test_file(self, one: dict[str, Any], tmp_path: Path, content: str | None, sentence: str) -> None:
        path = tmp_path / "results.json"
        if content is not None:
            path.write_bytes(content.encode("latin-1"))
        with pytest.raises(DataError, match=f"results.json.*{sentence}"):
            load_results(path, one)

    def test_folder(self, one: dict[str, Any], tmp_path: Path) -> None:
        with pytest.raises(DataError, match="cannot be read"):
            load_results(tmp_path, one)

    def test_good_file_is_brought_to_one_form(self, one: dict[str, Any], tmp_path: Path) -> None:
        path = tmp_path / "results.json"
        given = {**PERFECT, "segmentation": uncompressed(PERFECT["segmentation"]), "image_id": 42.0, "source": "x"}
        del given["bbox"]
        path.write_text(json.dumps([given]))
        (masks,), (boxes,) = load_results(path, one), load_results(path, one, iou_type="bbox")
        assert masks["segmentation"] == PERFECT["segmentation"]
        assert boxes["bbox"] == [10, 20, 30, 40]
        assert masks["source"] == boxes["source"] == "x"
        assert isinstance(masks["image_id"], int)


class TestBadTruth:
    @pytest.mark.parametrize(
        ("change", "sentence"),
        [
            ({"categories": ...}, "needs the lists images, categories and annotations"),
            ({"images": [{"id": 42}]}, "its image has no valid height and width in the ground truth"),
            ({"images": [{"id": 42}, {"id": 42}]}, "the image id 42 appears twice"),
            ({"images": [{"file_name": "a.png"}]}, "image number 0 has no 'id'"),
            ({"categories": [{"id": 1}]}, "annotation 0 (image 42): its category id 3 is not in the ground truth"),
            ({"annotations": [{"id": 5, "category_id": 3}]}, "annotation 5: it has no 'image_id'"),
            ({"annotations": [None]}, "annotation number 0: it is null"),
            (
                {"annotations": [{"id": 5, "image_id": 42, "category_id": 3, "segmentation": [[1, 2, 3, 4]]}]},
                "annotation 5 (image 42): a polygon has 2 points",
            ),
        ],
    )
    def test_content(self, one: dict[str, Any], tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
        truth = {key: value for key, value in (one | change).items() if value is not ...}
        path = tmp_path / "truth.json"
        path.write_text(json.dumps(truth))
        for given, name in ((truth, "the ground truth"), (path, str(path))):
            with pytest.raises(DataError) as caught:
                evaluate(given, [])
            assert str(caught.value).startswith(name)
            assert sentence in str(caught.value)
