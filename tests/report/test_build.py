"""A run folder becomes a page; images that cannot be drawn cost only the images."""

import json
import shutil

import pytest

import uniquery
from helpers.small_runs import small_config
from uniquery.errors import UserError
from uniquery.evaluation.compare import ImageInterval
from uniquery.report.build import build_report, difference_over_images, read_examples
from uniquery.training.run_folder import RunFolder


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


def test_the_difference_of_two_runs_has_an_interval_over_images(copy, run, tmp_path):
    perfect = copy.rename(tmp_path / "perfect")
    config = RunFolder(perfect).read_config()
    truth = json.loads(config.data.val.annotations.read_text())["annotations"]
    results = [{**{k: a[k] for k in ("image_id", "category_id", "segmentation")}, "score": 0.9} for a in truth]
    (perfect / "predictions.json").write_text(json.dumps(results))
    interval = difference_over_images(run, perfect)
    assert 50 < interval.low <= interval.delta <= interval.high <= 100
    assert difference_over_images(run, run) == ImageInterval(0, 0, 0)
    html = build_report([run, perfect], tmp_path / "page.html", intro="Read <me>.").read_text()
    assert f"perfect minus {run.name}, best weights of each: +{interval.delta:.1f}" in html
    assert "Read &lt;me&gt;." in html


def test_runs_on_different_data_have_no_common_interval(copy, run, tmp_path):
    config = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(config.replace("val.json", "train.json"))
    assert difference_over_images(run, copy) is None
    (copy / "predictions.json").unlink()
    assert difference_over_images(copy, copy) is None
    assert "best weights of each" not in build_report([run, copy], tmp_path / "page.html").read_text()


def test_examples_are_validation_images_with_their_instances(run, scenes):
    examples = read_examples(run)
    assert [example.name for example in examples] == sorted(path.name for path in scenes.images("val").iterdir())
    assert all(example.truth for example in examples)
    assert all(mask.score >= 0.5 for example in examples for mask in example.predicted)


@pytest.mark.parametrize("file", ["predictions.json", "config.yaml"])
def test_without_predictions_or_configuration_there_are_no_examples(copy, file):
    (copy / file).unlink()
    assert read_examples(copy) == []
    assert build_report([copy]).is_file()


def test_data_that_is_gone_is_a_warning(copy):
    config = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(config.replace("val.json", "gone.json"))
    sentences = []
    assert read_examples(copy, warn=sentences.append) == []
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
