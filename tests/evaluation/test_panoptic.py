"""Panoptic quality, against the official figures and against a second implementation."""

import json

import numpy as np
import pytest
import torch

from helpers.coco_files import assert_one_sentence, write_set
from helpers.naive_panoptic import assert_equals_the_naive_way, bitmap
from helpers.panoptic_files import CAT, SKY, maps, panoptic_set, save_ids, write_panoptic
from helpers.reference import reference
from uniquery.cli import main
from uniquery.data.dataset import GroundTruth
from uniquery.errors import DataError
from uniquery.evaluation.entries import read_ground_truth
from uniquery.evaluation.panoptic import evaluate_panoptic
from uniquery.evaluation.panoptic_files import decode_panoptic_truth, read_panoptic_results, write_panoptic_results
from uniquery.masks import rle
from uniquery.masks.panoptic import PanopticSegments, Segment

CATEGORIES = {i: {"id": i, "name": name, "isthing": t} for i, name, t in [(1, "a", 1), (4, "b", 1), (9, "c", 0)]}


def random_case(seed):
    """Patchwork with void and crowds, and results that are the same patchwork with some patches changed."""
    rng = np.random.default_rng(seed)
    images, truth, results = {}, [], []
    for image in (1, 2, 8):
        height, width = rng.integers(3, 6, 2) * 6
        images[image] = {"id": image, "height": int(height), "width": int(width)}
        coarse = rng.integers(0, 7, (height // 3, width // 3))
        ids = np.kron(coarse, np.ones((3, 3), int))
        kinds = {k: int(rng.choice([1, 4, 9])) for k in range(1, 8)}
        there = [k for k in range(1, 7) if (ids == k).any()]
        truth += [row(image, kinds[k], ids == k, iscrowd=int(rng.random() < 0.2)) for k in there]
        changed = np.where(rng.random(ids.shape) < 0.15, rng.integers(0, 8, ids.shape), ids)
        for k in range(1, 8):
            if (changed == k).any():
                other = kinds[k] if rng.random() < 0.8 else int(rng.choice([1, 4, 9]))
                results.append(row(image, other, changed == k, score=0.9))
    return GroundTruth(images, CATEGORIES, truth, "the test"), results


def row(image, category, mask, **more):
    return {"image_id": image, "category_id": category, "segmentation": rle.encode(mask), **more}


class TestQuality:
    @pytest.mark.parametrize("seed", range(8))
    def test_the_definition(self, seed):
        found = assert_equals_the_naive_way(*random_case(seed))
        assert 0 < found.score < 100

    def test_no_results(self):
        truth, _ = random_case(0)
        found = assert_equals_the_naive_way(truth, [])
        assert found.values["PQ"] == 0
        assert found.headline == "PQ"

    def test_nothing_to_measure(self):
        truth, _ = random_case(0)
        found = evaluate_panoptic(GroundTruth(truth.images, CATEGORIES, [], "the test"), [])
        assert set(found.values.values()) == {None}
        assert set(found.per_class.values()) == {None}
        assert found.score is None

    def test_only_things(self):
        truth, results = random_case(3)
        things = [a for a in truth.annotations if a["category_id"] != 9]
        few = [r for r in results if r["category_id"] != 9]
        found = assert_equals_the_naive_way(GroundTruth(truth.images, CATEGORIES, things, "the test"), few)
        assert found.values["PQ_st"] is None
        assert found.values["PQ_th"] == found.values["PQ"]

    def test_the_segments_are_counted(self):
        truth, results = random_case(0)
        found = evaluate_panoptic(truth, results)
        assert sum(found.per_class_instances.values()) == sum(not a["iscrowd"] for a in truth.annotations)

    def test_predicted_segments_as_results(self):
        ids = torch.tensor([[1, 1, 0], [2, 2, 2]], dtype=torch.int32)
        segments = PanopticSegments(ids, (Segment(1, 0, 0.9, True), Segment(2, 2, 0.8, False)))
        results = segments.to_coco(5, [1, 4, 9])
        assert [(r["image_id"], r["category_id"], r["score"]) for r in results] == [(5, 1, 0.9), (5, 9, 0.8)]
        assert [bitmap(r).tolist() for r in results] == [(ids == 1).tolist(), (ids == 2).tolist()]
        assert results[0]["bbox"] == [0, 0, 2, 1]
        assert len(segments.to_coco(5, [None, 4, 9])) == 1


@pytest.mark.realdata
class TestOfficialExample:
    @pytest.mark.parametrize("name", ["shift8", "identity"])
    def test_published_numbers(self, name, tmp_path, capsys):
        folder = reference("data", "metrics", "panoptic_sample")
        truth, figures = folder / "sample_data" / "panoptic_examples.json", tmp_path / "figures.json"
        results = [folder / "pred_shift8.json", folder / "pred_shift8"]
        if name == "identity":
            results = [truth, truth.with_suffix("")]
        command = ["eval", "--results", *map(str, results), "--annotations", str(truth), str(truth.with_suffix(""))]
        assert main([*command, "--json", str(figures)]) == 0
        expected = json.loads((folder / f"expected_official_panopticapi_{name}.json").read_text())
        found = json.loads(figures.read_text())["panoptic"]["metrics"]
        for ending, group in (("", "All"), ("_th", "Things"), ("_st", "Stuff")):
            for metric in ("PQ", "SQ", "RQ"):
                value = expected[group][metric.lower()]
                assert found[metric + ending] / 100 == pytest.approx(value, abs=1e-14)
                assert f"{100 * value:.2f}" in capsys_text(capsys, tmp_path)
        if name == "shift8":
            assert [round(found[key] / 100, 6) for key in ("PQ", "PQ_th", "PQ_st")] == [0.526495, 0.277444, 0.775545]

    def test_the_definition(self):
        folder = reference("data", "metrics", "panoptic_sample")
        annotations = folder / "sample_data" / "panoptic_examples.json"
        truth = decode_panoptic_truth(read_ground_truth(annotations), annotations)
        assert_equals_the_naive_way(truth, read_panoptic_results(folder / "pred_shift8.json", truth))


def capsys_text(capsys, tmp_path):
    """All that was printed so far."""
    kept = tmp_path / "printed.txt"
    text = (kept.read_text() if kept.exists() else "") + capsys.readouterr().out
    kept.write_text(text)
    return text


@pytest.fixture
def files(tmp_path):
    """The ground truth of the sound set, its json, and results that equal it, but for the crowd."""
    data = panoptic_set(tmp_path)
    truth = data.ground_truth()
    rows = [{**a, "score": 1.0} for a in truth.annotations if not a["iscrowd"]]
    write_panoptic_results(tmp_path / "found.json", rows, truth)
    return truth, data.annotations, tmp_path / "found.json"


class TestFiles:
    def test_what_is_written_is_read(self, files):
        truth, annotations, found = files
        decoded = decode_panoptic_truth(read_ground_truth(annotations), annotations)
        assert [a["segmentation"] for a in sorted(decoded.annotations, key=key)] == [
            a["segmentation"] for a in sorted(truth.annotations, key=key)
        ]
        rows = read_panoptic_results(found, decoded)
        assert len(rows) == 4
        assert evaluate_panoptic(decoded, rows).score == 100
        assert (found.with_suffix("") / "000000000007.png").is_file()

    def test_the_command_takes_the_folders(self, files, tmp_path, capsys):
        _, annotations, found = files
        annotations.with_suffix("").rename(tmp_path / "truth_pngs")
        found.with_suffix("").rename(tmp_path / "found_pngs")
        command = ["eval", "--results", str(found), str(tmp_path / "found_pngs"), "--annotations", str(annotations)]
        assert main([*command, str(tmp_path / "truth_pngs")]) == 0
        assert "100.00" in capsys.readouterr().out
        assert main(command) == 2
        assert "folder of panoptic PNG files is missing" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda c: c["annotations"][0].update(image_id=99), "results for image 99, which is not in"),
            (lambda c: c["annotations"][0].update(image_id="7"), "results for image 7, which is not in"),
            (lambda c: c["annotations"].pop(0), "Image 7 has no entry"),
            (lambda c: c["annotations"][0].update(file_name="../../secret.png"), "does not name a file inside"),
            (lambda c: c["annotations"][0].update(file_name="none.png"), "PNG file of image 7 is missing"),
            (lambda c: c["annotations"][0]["segments_info"][0].update(category_id=6), "has category 6"),
            (
                lambda c: c["annotations"][0]["segments_info"].pop(),
                "which the 'segments_info' of image 7 does not name",
            ),
            (
                lambda c: c["annotations"][0]["segments_info"].append({"id": 50, "category_id": 5}),
                "has no pixel of segment 50",
            ),
            (lambda c: c.pop("annotations"), "needs the list 'annotations'"),
            (lambda c: c["annotations"].append(3), "results for image None"),
        ],
    )
    def test_wrong_results(self, files, change, message):
        truth, _, found = files
        content = json.loads(found.read_text())
        change(content)
        found.write_text(json.dumps(content))
        with pytest.raises(DataError, match=message) as error:
            read_panoptic_results(found, truth)
        assert_one_sentence(error.value)

    def test_results_of_another_size(self, files):
        truth, _, found = files
        save_ids(found.with_suffix("") / "000000000007.png", np.zeros((5, 5), int))
        with pytest.raises(DataError, match="is 5×5, but image 7 is 16×12") as error:
            read_panoptic_results(found, truth)
        assert_one_sentence(error.value)

    def test_wrong_ground_truth(self, tmp_path):
        annotations, _ = write_panoptic(tmp_path, lambda c: c["categories"][0].pop("isthing"))
        with pytest.raises(DataError, match="needs 'isthing'") as error:
            decode_panoptic_truth(read_ground_truth(annotations), annotations)
        assert_one_sentence(error.value)
        annotations, _ = write_panoptic(tmp_path, lambda c: c["images"][0].pop("height"))
        with pytest.raises(DataError, match="image 7 needs 'width' and 'height'"):
            decode_panoptic_truth(read_ground_truth(annotations), annotations)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--max-detections", "5"], "--max-detections is for instances"),
            (["--type", "segm"], "--type is for instances"),
            (["--annotations", "a", "b", "c"], "not 3 paths"),
        ],
    )
    def test_options_that_do_not_fit(self, files, options, message, capsys):
        _, annotations, found = files
        assert main(["eval", "--results", str(found), "--annotations", str(annotations), *options]) == 2
        assert message in capsys.readouterr().err

    def test_folders_with_instances(self, tmp_path, capsys):
        annotations, _ = write_set(tmp_path)
        (tmp_path / "results.json").write_text("[]")
        command = ["eval", "--results", str(tmp_path / "results.json"), "--annotations", str(annotations)]
        assert main([*command, str(tmp_path)]) == 2
        assert "is not panoptic" in capsys.readouterr().err


def key(annotation):
    return annotation["image_id"], annotation["category_id"], annotation["iscrowd"]


def test_ids_of_the_helper():
    assert set(np.unique(maps()[7])) >= {0, CAT, SKY}
