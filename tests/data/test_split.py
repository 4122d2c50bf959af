import json
from pathlib import Path

import pytest

from helpers.coco_files import assert_one_sentence
from helpers.reference import reference
from uniquery.data.split import split_annotations
from uniquery.errors import DataError


def write(folder: Path, classes: list[list[int]], names: list[str] | None = None, **extra) -> Path:
    """A json whose image i has the ids 10 · i, and instances of these classes."""
    content = {
        "images": [
            {"id": 10 * i, "file_name": names[i] if names else f"{i}.png", "height": 4, "width": 4}
            for i in range(len(classes))
        ],
        "annotations": [
            {"id": 100 * i + j, "image_id": 10 * i, "category_id": label, "iscrowd": 0, "segmentation": []}
            for i, labels in enumerate(classes)
            for j, label in enumerate(labels)
        ],
        "categories": [{"id": 1, "name": "cell"}, {"id": 2, "name": "dust"}, {"id": 3, "name": "rare"}],
        **extra,
    }
    (folder / "all.json").write_text(json.dumps(content))
    return folder / "all.json"


def read(part) -> dict:
    return json.loads(part.file.read_text())


def test_every_image_and_annotation_is_in_one_part(tmp_path):
    file = write(tmp_path, [[1, 1], [1, 2], [], [2], [1]] * 8, info={"year": 2026})
    before = json.loads(file.read_text())
    parts = split_annotations(file, share=0.25, seed=3)
    assert [part.file for part in parts] == [tmp_path / "train.json", tmp_path / "val.json"]
    train, val = map(read, parts)
    assert sorted(row["id"] for c in (train, val) for row in c["images"]) == [10 * i for i in range(40)]
    by_id = {row["id"]: row for c in (train, val) for row in c["annotations"]}
    assert by_id == {row["id"]: row for row in before["annotations"]}
    for content in (train, val):
        assert {row["image_id"] for row in content["annotations"]} <= {row["id"] for row in content["images"]}
        assert (content["categories"], content["info"]) == (before["categories"], {"year": 2026})
    assert (len(train["images"]), len(val["images"])) == (30, 10)
    assert json.loads(file.read_text()) == before


def test_classes_are_stratified(tmp_path):
    """Of a class in ten images, two are validation data, with any seed; one in a single image is training data."""
    classes = [[1]] * 80 + [[1, 2]] * 10 + [[3]] + [[]] * 9
    for seed in range(5):
        folder = tmp_path / str(seed)
        train, val = split_annotations(write(tmp_path, classes), share=0.2, seed=seed, output=folder)
        assert (train.images, val.images) == (80, 20)
        assert val.classes == {"cell": 18, "dust": 2, "rare": 0}
        labeled = {row["image_id"] for row in read(val)["annotations"]}
        assert sum(row["id"] not in labeled for row in read(val)["images"]) == 2


def test_it_is_deterministic_and_depends_on_the_seed(tmp_path):
    file = write(tmp_path, [[1]] * 50)
    parts = [split_annotations(file, seed=s, output=tmp_path / str(n))[1] for n, s in enumerate((0, 0, 1))]
    first, again, other = (part.file.read_bytes() for part in parts)
    assert first == again != other
    content = json.loads(file.read_text())
    content["images"].reverse()
    content["annotations"].reverse()
    file.write_text(json.dumps(content))
    reversed_ids = {row["id"] for row in read(split_annotations(file, output=tmp_path / "r")[1])["images"]}
    assert reversed_ids == {row["id"] for row in json.loads(first)["images"]}


@pytest.mark.parametrize("group", ["^patient[0-9]+", "^(patient[0-9]+)_"])
def test_groups_stay_together(tmp_path, group):
    names = [f"patient{i // 5}_{i % 5}.png" for i in range(50)]
    train, val = split_annotations(write(tmp_path, [[1], [2], [1], [], [1, 2]] * 10, names), group=group)
    patients = [{row["file_name"].split("_")[0] for row in read(part)["images"]} for part in (train, val)]
    assert not patients[0] & patients[1]
    assert (train.groups, val.groups, val.images) == (8, 2, 10)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"share": 0.0}, "more than 0"),
        ({"share": 1.0}, "less than 1"),
        ({"share": 0.01}, "too few"),
        ({"group": "("}, "not a regular expression"),
        ({"group": "patient"}, "finds nothing"),
        ({"group": "png"}, "1 groups: too few"),
    ],
)
def test_options(tmp_path, options, words):
    with pytest.raises(DataError, match=words) as caught:
        split_annotations(write(tmp_path, [[1]] * 5), **options)
    assert_one_sentence(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["all.json"]


def test_no_file_is_replaced(tmp_path):
    file = write(tmp_path, [[1]] * 5).rename(tmp_path / "train.json")
    before = file.read_bytes()
    with pytest.raises(DataError, match="replaces no file"):
        split_annotations(file)
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c["images"][0].update(id="1"),
        lambda c: c["images"][0].update(id=10),
        lambda c: c["images"][0].pop("file_name"),
        lambda c: c["annotations"][0].update(image_id=7),
        lambda c: c["annotations"][0].update(image_id=[]),
        lambda c: c["annotations"][0].update(category_id=None),
        lambda c: c["annotations"][0].update(segments_info=[]),
        lambda c: c.update(images=[]),
    ],
)
def test_bad_annotations(tmp_path, change):
    file = write(tmp_path, [[1]] * 5)
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    with pytest.raises(DataError) as caught:
        split_annotations(file)
    assert_one_sentence(caught.value)
    assert not (tmp_path / "train.json").exists()


@pytest.mark.realdata
def test_voc(tmp_path):
    """Each of the 20 classes has about a fifth of its instances in the validation data."""
    train, val = split_annotations(reference("data", "voc", "annotations", "val.json"), output=tmp_path)
    assert abs(val.images - 145) <= 3
    for name, count in val.classes.items():
        share = count / (count + train.classes[name])
        assert 0.1 < share < 0.32, (name, share)
