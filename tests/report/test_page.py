"""The page: complete, self-contained, safe against strangers' names, right in its comparisons."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from uniquery.errors import UserError
from uniquery.masks import rle
from uniquery.report.drawings import LabeledMask
from uniquery.report.page import Example, render, run_labels, write_report
from uniquery.report.runs import EvalLine, load_run
from uniquery.report.tables import compare, headline_metrics

EVIL = '<script>alert("1")</script>'
METRICS = ["AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl"]


def make_run(folder, ap=30.0, classes=("cat", "dog"), config="seed: 1\n", steps=5):
    folder.mkdir(parents=True)
    lines = []
    for step in range(1, steps + 1):
        losses = {"cls": 1.0 / step, "mask": None if step == 2 else 0.5}
        seconds = {"data": 0.01, "forward": 0.03}
        train = {"kind": "train", "step": step, "images": step, "losses": losses, "lr": 0.1, "seconds": seconds}
        lines.append(train)
    metrics = {name: ap + i for i, name in enumerate(METRICS)} | {"APs": None, "ARs": float("nan")}
    per_class = {name: ap + i for i, name in enumerate(classes)} | {"never seen": None}
    counts = {name: 10 + i for i, name in enumerate(classes)}
    result = {"kind": "eval", "step": steps, "weights": "ema", "metrics": metrics, "per_class": per_class}
    lines.append(result | {"instances": counts, "seconds": 2.0})
    (folder / "metrics.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    (folder / "config.yaml").write_text(config)
    (folder / "environment.json").write_text(json.dumps({"torch": "2.6", "note": EVIL}))
    return load_run(folder)


def example(name="one.jpg"):
    mask = np.zeros((30, 40), np.uint8)
    mask[5:20, 5:30] = 1
    return Example(name, np.zeros((30, 40, 3), np.uint8), [LabeledMask(rle.encode(mask), "cat")], [])


class Page(HTMLParser):
    """Collects texts, attributes and tags, and notices a tag that is closed in the wrong place."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.texts = [], [], [], []
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, (tag, self.getpos())

    def handle_data(self, data):
        self.texts.append(data.strip())


def test_one_run_shows_everything(tmp_path):
    run = make_run(tmp_path / "mine", ap=31.25)
    page = Page(render([(run, [example()])], "My title"))
    wanted = {"My title", "31.2", "31.25", "Best AP", "Training time", "Images seen", "Total loss", "cls", "mask"}
    wanted |= {"Learning rate", "Gradient norm", "cat", "dog", "one.jpg", "Ground truth", "Prediction", "1 instance"}
    wanted |= {"data", "10.0 ms", "25%", "whole step", "torch", "2.6", "seed: 1", "mine/config.yaml", "AR100"}
    assert wanted <= set(page.texts)
    assert page.tags.count("img") == 2


def test_missing_numbers_are_shown_as_not_available(tmp_path):
    html = render([(make_run(tmp_path / "a"), [])], "t")
    cells = dict(re.findall(r"<tr><th>(APs|ARs|APm|never seen)\b.*?<td class=\"number\">([^<]*)</td>", html))
    assert cells == {"APs": "n/a", "ARs": "n/a", "APm": "34.00", "never seen": "n/a"}
    assert "nan" not in re.sub(r"data:image[^\"]*", "", html).lower()


def test_page_is_self_contained(tmp_path):
    runs = [(make_run(tmp_path / name), [example()]) for name in ("a", "b")]
    html = render(runs, "t")
    page = Page(html)
    assert "script" not in page.tags
    assert "link" not in page.tags
    addresses = [value for name, value in page.attributes if name in ("src", "href", "srcset", "action", "data")]
    assert len(addresses) == 3
    assert all(address.startswith("data:image/jpeg;base64,") for address in addresses)
    assert not re.search(r"https?://|url\(|@import", html)
    assert not [name for name, _ in page.attributes if name.startswith("on")]


@pytest.mark.parametrize("name", [EVIL, '"><img src=x onerror=alert(1)>', "{{ 7 * 7 }}", "</style></svg>"])
def test_names_of_strangers_stay_text(tmp_path, name):
    run = make_run(tmp_path / "a", classes=(name,), config=f"name: {json.dumps(name)}\n")
    other = make_run(tmp_path / "b", config="name: none\n")
    page = Page(render([(run, [example(name)]), (other, [example(name)])], name))
    assert page.texts.count(name) >= 4
    assert "script" not in page.tags
    assert not [attribute for attribute, _ in page.attributes if attribute.startswith("on")]
    assert page.tags.count("img") == 3


def test_run_folder_name_is_escaped(tmp_path):
    evil = make_run(tmp_path / '<b onclick="x">')
    page = Page(render([(evil, [example()]), (make_run(tmp_path / "b"), [])], "t"))
    assert "b" not in page.tags
    assert '<b onclick="x">' in page.texts


def test_two_runs_are_compared_with_the_first(tmp_path):
    base, ours = make_run(tmp_path / "base", ap=30.0), make_run(tmp_path / "ours", ap=31.5, config="seed: 2\n")
    html = render([(base, []), (ours, [])], "t")
    row = re.search(r"<th>AP50 .*?</tr>", html, re.S).group()
    assert re.findall(r">([\d.]+) ?<", row) == ["31.00", "32.50"]
    assert '<span class="change better">+1.50</span>' in row
    backwards = render([(ours, []), (base, [])], "t")
    assert '<span class="change worse">−1.50</span>' in backwards
    differences = html[html.index("Configuration differences") :]
    assert re.findall(r"<th>seed</th><td>(\d)</td><td>(\d)</td>", differences) == [("1", "2")]
    assert "The configurations are the same." in render([(base, []), (base, [])], "t")


def test_another_headline_than_ap(tmp_path):
    make_run(tmp_path / "a")
    metrics = {"PQ": 40.0, "SQ": 80.0, "RQ": 50.0, "PQth": 41.0}
    line = {
        "kind": "eval",
        "step": 5,
        "weights": "ema",
        "headline": "PQ",
        "metrics": metrics,
        "per_class": {"cat": 39.0},
    }
    run = load_run(tmp_path / "a")
    evaluation = EvalLine.model_validate(line)
    page = Page(render([(replace(run, evals=(evaluation,)), [])], "t"))
    assert {"PQ", "SQ", "RQ", "PQth", "40.0", "Best PQ", "PQ of each class at the best evaluation, in percent."} <= {
        *page.texts
    }
    assert "AP" not in page.texts
    assert headline_metrics([evaluation]) == ("PQ", "SQ", "RQ")


@pytest.mark.parametrize(
    ("value", "first", "change", "verdict"),
    [(2.0, 1.0, "+1.00", "better"), (1.0, 2.0, "−1.00", "worse"), (1.0, 1.001, "±0.00", ""), (None, 1.0, "", "")],
)
def test_change_and_its_verdict(value, first, change, verdict):
    cell = compare(value, first)
    assert (cell.change, cell.verdict) == (change, verdict)


def test_pictures_of_the_same_name_share_a_row(tmp_path):
    runs = [make_run(tmp_path / name) for name in ("a", "b")]
    page = Page(render([(runs[0], [example("x"), example("y")]), (runs[1], [example("y")])], "t"))
    assert page.tags.count("img") == 2 + 3
    assert page.texts.count("not drawn") == 1


def test_pictures_with_one_name_in_one_run_are_both_kept(tmp_path):
    page = Page(render([(make_run(tmp_path / "a"), [example("x"), example("x")])], "t"))
    assert page.tags.count("img") == 4


def test_classes_and_pictures_are_of_the_best_weights(tmp_path):
    run = make_run(tmp_path / "a", ap=30.0)
    (best,) = run.evals
    later = best.model_copy(update={"step": 9, "metrics": {"AP": 10.0}, "per_class": {"cat": 11.5, "dog": 12.5}})
    html = render([(replace(run, evals=[best, later]), [example()])], "a")
    section = html.partition("<h2>Classes</h2>")[2]
    assert "of each class at the best evaluation" in section
    assert "30.0" in section
    assert "11.5" not in section
    assert "Predictions of the best weights that reach the score threshold of their class" in html
    assert "the one in the model file, else 0.5." in html


def test_many_classes_are_folded_and_sorted(tmp_path):
    run = make_run(tmp_path / "a", classes=[f"class{i:02}" for i in range(30)])
    html = render([(run, [])], "t")
    assert "11 more classes" in html
    shown = re.findall(r"<th>(class\d\d|never seen)</th>", html)
    assert shown == [f"class{i:02}" for i in reversed(range(30))] + ["never seen"]


def test_empty_run_makes_a_page(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    page = Page(render([(load_run(tmp_path), [])], "t"))
    assert page.texts.count("no data yet") == 6
    with pytest.raises(ValueError, match="at least one run"):
        render([], "t")


def test_labels_of_runs_are_distinct(tmp_path):
    same = [make_run(tmp_path / parent / "run") for parent in ("x", "y")]
    assert run_labels(same) == [str(tmp_path / "x" / "run"), str(tmp_path / "y" / "run")]
    assert run_labels([same[0], same[0]])[1].endswith("run (2)")


class TestWriteReport:
    def test_replaces_and_leaves_nothing_behind(self, tmp_path):
        path = tmp_path / "new" / "report.html"
        write_report(path, "old")
        write_report(path, "new \ud800 é")
        assert path.read_text("utf-8") == "new ? é"
        assert list(path.parent.iterdir()) == [path]

    def test_a_failure_keeps_the_old_page(self, tmp_path, monkeypatch):
        path = tmp_path / "report.html"
        write_report(path, "old")

        def full(_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("uniquery.files.os.fsync", full)
        with pytest.raises(UserError, match="No space left"):
            write_report(path, "new")
        assert path.read_text() == "old"
        assert list(tmp_path.iterdir()) == [path]

    def test_a_directory_is_refused(self, tmp_path):
        with pytest.raises(UserError, match="Cannot write"):
            write_report(tmp_path, "text")
