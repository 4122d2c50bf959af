"""A run folder becomes a page; images that cannot be drawn cost only the images."""

import json
import re
import shutil

import pytest

import uniquery
from helpers.small_runs import small_config
from uniquery.errors import UserError
from uniquery.evaluation.compare import ImageInterval, mean_interval, paired_difference
from uniquery.evaluation.instance_traits import TRAITS
from uniquery.report.analysis import error_tables, score_section
from uniquery.report.build import build_report, examples_of
from uniquery.report.evaluated import read_evaluated
from uniquery.report.verdicts import compare_sides, pair_by_seed
from uniquery.training.run_folder import RunFolder
from uniquery.weights.model_file import Thresholds, store_thresholds


@pytest.fixture(scope="module")
def run(tmp_path_factory, scenes):
    return uniquery.train(uniquery.load_config(small_config(tmp_path_factory.mktemp("run"), scenes)))


@pytest.fixture
def copy(run, tmp_path):
    return shutil.copytree(run, tmp_path / "copy")


def test_the_page_is_in_the_first_folder_unless_said_otherwise(copy, tmp_path):
    assert build_report([copy, copy]) == copy / "report.html"
    assert build_report([copy], tmp_path / "new" / "page.html") == tmp_path / "new" / "page.html"
    assert "<svg" in (tmp_path / "new" / "page.html").read_text()


def perfect_results(run) -> list[dict]:
    """The ground truth of the run's validation data as results."""
    truth = json.loads(RunFolder(run).read_config().data.val.annotations.read_text())["annotations"]
    return [{**{k: a[k] for k in ("image_id", "category_id", "segmentation")}, "score": 0.9} for a in truth]


def make_perfect(folder):
    (folder / "predictions.json").write_text(json.dumps(perfect_results(folder)))
    return folder


def set_seed(folder, seed):
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(re.sub(r"^seed: .*$", f"seed: {seed}", config, flags=re.MULTILINE))
    return folder


def compared(first, second):
    return compare_sides([read_evaluated(first)], [read_evaluated(second)], ("first", "second"))


def evaluated_on_training_images(folder):
    """As if its validation data were its training images, which are more; it finds nothing."""
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(config.replace("val.json", "train.json").replace("images/val", "images/train"))
    (folder / "predictions.json").write_text("[]")
    return folder


def test_the_difference_of_two_runs_has_an_interval_over_images(copy, run, tmp_path):
    perfect = make_perfect(evaluated_on_training_images(copy.rename(tmp_path / "perfect")))
    run = evaluated_on_training_images(shutil.copytree(run, tmp_path / "nothing"))
    verdict = compared(run, perfect)
    rows = {row.name: row for row in verdict.metrics}
    assert 50 < rows["AP"].images.low <= rows["AP"].images.delta <= rows["AP"].images.high <= 100
    assert (rows["AP"].verdict, rows["AP"].seeds, rows["AP"].css_class) == ("better", None, "better")
    assert {"AP50", "AP75"} < rows.keys()
    assert {row.name for row in verdict.classes} <= {c.name for c in read_evaluated(run).data.categories}
    assert compared(run, run).metrics[0].images == ImageInterval(0, 0, 0, images=6)
    html = build_report([run, perfect], tmp_path / "page.html", intro="Read <me>.").read_text()
    assert f"perfect minus {run.name}, best weights of each: +{rows['AP'].images.delta:.1f}" in html
    assert f"Is it really better? perfect against {run.name}" in html
    assert "Images that differ most" in html
    assert "Read &lt;me&gt;." in html


def test_few_images_have_no_interval(copy, run, tmp_path):
    verdict = compared(run, make_perfect(copy))
    assert [(row.verdict, row.css_class) for row in verdict.metrics if row.name == "AP"] == [
        ("cannot tell: 4 images", "")
    ]
    assert " to " not in verdict.metrics[0].texts[2]
    html = build_report([run, copy], tmp_path / "page.html").read_text()
    assert "cannot tell: 4 images; an interval needs at least 6 images with instances." in html


def test_runs_on_different_data_have_no_common_interval(copy, run, tmp_path):
    config = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(config.replace("val.json", "train.json").replace("images/val", "images/train"))
    make_perfect(copy)
    assert "best weights of each" not in build_report([run, copy], tmp_path / "page.html").read_text()
    with pytest.raises(UserError, match="were not evaluated on the same instances"):
        build_report([run], tmp_path / "page.html", against=[copy])


class TestSeveralSeeds:
    @pytest.fixture
    def sides(self, run, tmp_path):
        """Three runs against three, of the seeds 0 to 2."""
        base = [set_seed(shutil.copytree(run, tmp_path / f"base{seed}"), seed) for seed in range(3)]
        ours = [set_seed(make_perfect(shutil.copytree(run, tmp_path / f"ours{seed}")), seed) for seed in range(3)]
        partly = perfect_results(run)
        (ours[1] / "predictions.json").write_text(json.dumps(partly[: len(partly) // 2]))
        return base, ours

    def test_the_interval_is_over_seeds(self, sides, tmp_path):
        base, ours = sides
        runs = [[read_evaluated(folder) for folder in side] for side in (base, ours[::-1])]
        verdict = compare_sides(*runs, ("base", "ours"))
        pairs = [compared(*pair).metrics[0] for pair in zip(base, ours, strict=True)]
        control, variant = ({n: getattr(row, side) for n, row in enumerate(pairs)} for side in ("control", "variant"))
        first = verdict.metrics[0]
        assert first.seeds == paired_difference(control, variant)
        assert first.images == mean_interval([row.images for row in pairs])
        assert first.verdict == first.seeds.verdict
        html = build_report(ours, tmp_path / "page.html", against=base).read_text()
        assert "over 3 seeds" in html
        assert "Is it really better? ours0 and 2 more against base0 and 2 more" in html
        assert "the 95 % interval is over 3 seeds" in html

    def test_only_shared_seeds_are_paired(self, sides):
        base, ours = ([read_evaluated(folder) for folder in side] for side in sides)
        pairs = pair_by_seed(base[:2], ours[1:])
        assert [(before.folder.name, after.folder.name) for before, after in pairs] == [("base1", "ours1")]

    def test_seeds_that_cannot_be_paired(self, sides):
        base, ours = ([read_evaluated(folder) for folder in side] for side in sides)
        with pytest.raises(UserError, match=r"none in common \(0, 1 against 2\)"):
            pair_by_seed(base[2:], ours[:2])
        with pytest.raises(UserError, match="have the same seed"):
            pair_by_seed([base[0], base[0]], ours)

    def test_a_run_without_predictions(self, sides, tmp_path):
        base, ours = sides
        (ours[2] / "predictions.json").unlink()
        with pytest.raises(UserError, match="ours2 has no predictions"):
            build_report(ours, tmp_path / "page.html", against=base)
        assert not (tmp_path / "page.html").exists()


class TestErrors:
    def test_a_perfect_run_has_none(self, copy, tmp_path):
        (table,) = error_tables([("perfect", read_evaluated(make_perfect(copy)))])
        first = table.groups[0]
        truth = json.loads(RunFolder(copy).read_config().data.val.annotations.read_text())["annotations"]
        assert (first.name, first.note) == ("all instances", str(len(truth)))
        assert [cell.text for cell in first.cells] == ["100.0", *["0.0"] * 6, "100.0"]
        assert {row.name.partition(":")[0] for row in table.groups[1:]} == set(TRAITS)
        assert table.note == "score thresholds: 0.5"
        html = build_report([copy], tmp_path / "page.html").read_text()
        assert "all instances" in html
        assert "cannot be told from masks" in html

    def test_a_second_run_shows_the_difference(self, copy, run):
        (copy / "predictions.json").write_text("[]")
        perfect = make_perfect(shutil.copytree(run, copy.parent / "perfect"))
        _, table = error_tables([("none", read_evaluated(copy)), ("perfect", read_evaluated(perfect))])
        cells = table.groups[0].cells
        assert (cells[0].text, cells[0].change, cells[0].verdict) == ("100.0", "+100.0", "better")
        assert (cells[6].text, cells[6].change, cells[6].verdict) == ("0.0", "−100.0", "better")  # missed
        assert table.note.endswith("differences are to none")
        assert table.predictions[0].cells[0].change.startswith("+")

    def test_thresholds_of_the_model_decide_what_counts(self, copy):
        make_perfect(copy)
        store_thresholds(copy, Thresholds((0.95, 0.1, 0.1), 0.5, "precision=0.9"))
        evaluated = read_evaluated(copy)
        assert sorted(evaluated.score_thresholds.values()) == [0.1, 0.1, 0.95]
        (table,) = error_tables([("run", evaluated)])
        assert table.note == "score thresholds: chosen by precision=0.9"
        assert float(table.groups[0].cells[6].text) > 0  # those of the first class are missed
        section = score_section("run", evaluated)
        assert [row.cells[0].text for row in section.rows] == ["0.950", "0.100", "0.100"]
        assert section.rule == "precision=0.9"
        assert section.error == "10.0"  # scores of 0.9 that are always right

    def test_a_run_without_a_correct_prediction(self, copy, tmp_path):
        (copy / "predictions.json").write_text("[]")
        html = build_report([copy], tmp_path / "page.html").read_text()
        assert "Calibration error: n/a" in html


def test_examples_are_validation_images_with_their_instances(run, scenes):
    examples = examples_of(read_evaluated(run))
    assert [example.name for example in examples] == sorted(path.name for path in scenes.images("val").iterdir())
    assert all(example.truth for example in examples)
    assert all(mask.score >= 0.5 for example in examples for mask in example.predicted)


@pytest.mark.parametrize("file", ["predictions.json", "config.yaml"])
def test_without_predictions_or_configuration_there_are_no_examples(copy, file):
    (copy / file).unlink()
    assert read_evaluated(copy) is None
    assert build_report([copy]).is_file()


def test_data_that_is_gone_is_a_warning(copy):
    config = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(config.replace("val.json", "gone.json"))
    sentences = []
    assert read_evaluated(copy, warn=sentences.append) is None
    assert len(sentences) == 1
    assert f"The report of {copy} has no pictures" in sentences[0]
    with pytest.warns(UserWarning, match="no pictures"):
        assert build_report([copy]).is_file()


def test_a_folder_without_a_run(tmp_path):
    with pytest.raises(UserError, match=r"metrics\.jsonl"):
        build_report([tmp_path])


def test_a_run_of_another_version_has_a_page_without_pictures(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "older")
    text = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(text + "long_gone: 3\n")
    warnings = []
    assert build_report([copy], warn=warnings.append).is_file()
    assert len(warnings) == 1
    assert "no pictures" in warnings[0]
    assert "long_gone: no such key" in warnings[0]
