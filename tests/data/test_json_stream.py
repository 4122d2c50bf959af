"""Large files: read row by row, with the same result and the same errors as a small one."""

import json
from pathlib import Path

import pytest

from helpers.coco_files import sound, write_images, write_json
from helpers.reference import reference
from uniquery.data import coco_json, json_stream
from uniquery.data.check import check_data
from uniquery.data.coco import CocoData
from uniquery.data.json_stream import JsonStream
from uniquery.errors import DataError


@pytest.fixture(params=[1, 2, 7, 64, 2**24])
def chunk(request, monkeypatch):
    monkeypatch.setattr(json_stream, "_CHUNK", request.param)


@pytest.fixture
def every_file_is_large(monkeypatch):
    monkeypatch.setattr(coco_json, "LARGE_FILE", 0)


def stream_of(folder: Path, text: str) -> JsonStream:
    path = folder / "large.json"
    path.write_text(text, encoding="utf-8")
    return JsonStream(path, "rows")


@pytest.mark.usefixtures("chunk")
class TestStream:
    CONTENT = {  # noqa: RUF012
        "a": [1, -2.5e3, 'x]\\"}', None, True, [[]], {"rows": [3]}],
        "rows": [{"id": 1, "s": [[1.25, 2, 3e-7]], "t": "größe 🙂"}, {}, 12, [], "", None],
        "b": {"rows": "not these"},
        "c": 123456789,
    }

    @pytest.mark.parametrize("indent", [None, 1])
    @pytest.mark.parametrize("ascii_only", [True, False])
    def test_gives_what_json_gives(self, tmp_path, indent, ascii_only):
        stream = stream_of(tmp_path, json.dumps(self.CONTENT, indent=indent, ensure_ascii=ascii_only) + "\n ")
        assert list(stream) == list(stream) == self.CONTENT["rows"]
        assert stream.content == {key: value for key, value in self.CONTENT.items() if key != "rows"}
        assert stream.has_table

    @pytest.mark.parametrize("text", ["{}", " { } ", '{"a": 1}'])
    def test_without_the_table(self, tmp_path, text):
        stream = stream_of(tmp_path, text)
        assert not stream.has_table
        assert list(stream) == []

    def test_an_empty_table(self, tmp_path):
        assert list(stream_of(tmp_path, '{"rows": [ ]}')) == []

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "[]",
            "{",
            '{"rows": [1, 2}',
            '{"rows": [1, 2',
            '{"rows": [1,]}',
            '{"rows": [1 2]}',
            '{"rows": 5}',
            '{"rows": []} x',
            '{"rows": [], "rows": []}',
            '{"a": 1, "a": 2}',
            '{"a": 1 "b": 2}',
            '{"a" 1}',
            "{1: 2}",
            '{"a": tru}',
            '{"a": 1,}',
        ],
    )
    def test_anything_else_is_an_error(self, tmp_path, text):
        with pytest.raises(ValueError, match=r"."):
            stream_of(tmp_path, text)


@pytest.mark.usefixtures("every_file_is_large")
class TestLargeFiles:
    def test_annotations_are_streamed(self, tmp_path):
        raw = coco_json.read_json(write_json(tmp_path, sound()))
        assert isinstance(raw["annotations"], JsonStream)
        assert list(raw["annotations"]) == sound()["annotations"]

    @pytest.mark.parametrize(
        "order", [("annotations", "images", "categories"), ("categories", "images", "annotations")]
    )
    def test_the_data_set_is_the_same(self, tmp_path, monkeypatch, order):
        content = sound()
        images = write_images(tmp_path, content)
        path = write_json(tmp_path, {key: content[key] for key in order})
        large = CocoData(path, images)
        monkeypatch.setattr(coco_json, "LARGE_FILE", 2**40)
        small = CocoData(path, images)
        assert large.checksum() == small.checksum()
        assert large.ground_truth() == small.ground_truth()
        assert large.warnings == small.warnings
        assert check_data(path, images) == self.large_check(path, images, monkeypatch)

    def large_check(self, path, images, monkeypatch):
        monkeypatch.setattr(coco_json, "LARGE_FILE", 0)
        return check_data(path, images)

    @pytest.mark.parametrize(
        "text",
        [
            "nothing",
            "[1, 2]",
            '{"images": [1], "categories": [], "annotations": []}',
            '{"images": [{}], "categories": [{}], "annotations": [3]}',
            '{"images": [{}], "categories": [{}], "annotations": 3}',
            '{"images": [], "categories": [], "annotations": []}',
            '{"images": [{"id": 1}], "annotations": []',
        ],
    )
    def test_errors_are_the_same(self, tmp_path, monkeypatch, text):
        path = tmp_path / "a.json"
        path.write_text(text)
        messages = []
        for size in (0, 2**40):
            monkeypatch.setattr(coco_json, "LARGE_FILE", size)
            with pytest.raises(DataError) as caught:
                CocoData(path, tmp_path)
            messages.append(str(caught.value))
        assert messages[0] == messages[1]

    @pytest.mark.realdata
    def test_of_lvis(self, tmp_path, monkeypatch):
        path = reference("data/metrics/lvis/lvis_val_100.json")
        large = CocoData(path, tmp_path)
        monkeypatch.setattr(coco_json, "LARGE_FILE", 2**40)
        assert large.ground_truth() == CocoData(path, tmp_path).ground_truth()
