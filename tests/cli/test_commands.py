"""The command line as a user meets it: what works, and one clear sentence for what does not."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from helpers.small_runs import small_config
from uniquery import demo
from uniquery.cli import COMMANDS, build_parser, data, main, predict, weights
from uniquery.cli import demo as demo_command
from uniquery.data import importing
from uniquery.data.coco_json import read_json
from uniquery.data.scenes import ScenesConfig
from uniquery.masks import rle
from uniquery.report.predictions import DEFAULT_FORMATS, FORMATS
from uniquery.training.config import load_config
from uniquery.weights.convert import PROJECTS
from uniquery.weights.model_file import SCORE_THRESHOLD


@pytest.fixture(scope="module")
def trained(tmp_path_factory, scenes):
    """A folder with a configuration and its finished run."""
    folder = tmp_path_factory.mktemp("trained")
    config = small_config(folder, scenes)
    assert main(["train", str(config)]) == 0
    return folder


def test_a_run_parses_each_json_once(tmp_path, scenes, monkeypatch):
    """Training, its two evaluations and the pictures of the report."""
    parsed = []
    for module in ("coco", "open"):
        monkeypatch.setattr(f"uniquery.data.{module}.read_json", lambda path: (parsed.append(path), read_json(path))[1])
    files = {split: tmp_path / f"{split}.json" for split in ("train", "val")}
    for split, file in files.items():
        shutil.copy(scenes.annotations(split), file)
    changes = [f"data.{split}.annotations={file}" for split, file in files.items()]
    assert main(["train", str(small_config(tmp_path, scenes)), *(a for c in changes for a in ("--set", c))]) == 0
    assert sorted(parsed) == sorted(files.values())


def fails(capsys, *arguments) -> str:
    """Runs a command that must fail with exit code 2, one sentence and no traceback."""
    capsys.readouterr()
    assert main([str(a) for a in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "Traceback" not in error
    return error


def test_every_command_has_help_with_an_example(capsys):
    names = [
        "demo",
        "train",
        "eval",
        "predict",
        "export",
        "diagnose",
        "study",
        "paper",
        "push",
        "report",
        "config show",
        "config explain",
        "config list",
        "data make-scenes",
        "data import",
        "data split",
    ]
    for name in [*names, "data check", "data preview", "weights convert", "weights show"]:
        with pytest.raises(SystemExit) as stop:
            build_parser().parse_args([*name.split(), "--help"])
        assert stop.value.code == 0
        assert f"example:\n  uniquery {name}" in capsys.readouterr().out


def subparsers(parser):
    return next((a.choices for a in parser._actions if isinstance(a.choices, dict)), {})


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_a_help_sentence_and_says_its_default(name):
    parser = subparsers(build_parser([name]))[name]
    for command in subparsers(parser).values() or [parser]:
        for action in command._actions:
            assert action.help, action
            if action.option_strings and action.nargs != 0 and "--set" not in action.option_strings:
                assert "(default: " in action.help, action


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], [], ["config", "list"], ["paper"], *([name, "--help"] for name in COMMANDS)],
)
def test_what_needs_no_command_does_not_import_torch(arguments):
    code = f"""
import sys
from uniquery.cli import main
try:
    main({arguments})
except SystemExit:
    pass
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in COMMANDS) or arguments != ["--help"]


def test_options_repeat_the_defaults_of_python():
    """They are not imported, as that would import torch."""
    assert predict.FORMATS == FORMATS
    assert predict.DEFAULT_FORMATS == DEFAULT_FORMATS
    assert tuple(importing.FORMATS) == data.IMPORT_FORMATS
    assert predict.SCORE_THRESHOLD == SCORE_THRESHOLD
    assert weights.PROJECTS == PROJECTS


def test_the_list_of_commands_is_that_of_the_modules(capsys):
    """A command that is only listed shows the same sentence as one whose module was imported."""
    assert build_parser().format_help() == build_parser([]).format_help()
    assert list(COMMANDS) == list(next(a for a in build_parser()._actions if a.choices).choices)


def test_a_run_leaves_everything_behind(trained):
    run = trained / "runs" / "small"
    for name in ("config.yaml", "environment.json", "metrics.jsonl", "predictions.json", "report.html"):
        assert (run / name).stat().st_size > 0, name
    for checkpoint in ("best", "last"):
        assert (run / checkpoint / "model.safetensors").is_file()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    training = [line for line in lines if line["kind"] == "train"]
    assert [line["step"] for line in training] == [1, 2, 3, 4]
    assert set(training[0]["losses"]) == {"loss_class", "loss_box", "loss_centerness", "loss_mask"}
    assert all(training[0]["seconds"][phase] > 0 for phase in ("data", "forward", "assign", "loss", "backward", "step"))
    assert [line["step"] for line in lines if line["kind"] == "eval"] == [2, 4]


def test_eval_of_a_run_on_its_own_data_and_its_json(trained, tmp_path, capsys):
    run = trained / "runs" / "small"
    assert (
        main(
            ["eval", str(run), "--json", str(tmp_path / "m.json"), "--save", str(tmp_path / "r.json"), "--workers", "0"]
        )
        == 0
    )
    assert "AP50" in capsys.readouterr().out
    metrics = json.loads((tmp_path / "m.json").read_text())
    assert set(metrics) == {"segm", "bbox"}
    assert isinstance(json.loads((tmp_path / "r.json").read_text()), list)


def test_eval_sweeps_thresholds(trained, capsys):
    assert main(["eval", str(trained / "runs" / "small"), "--sweep-threshold", "--workers", "0"]) == 0
    out = capsys.readouterr().out
    assert all(f"{t}" in out for t in (0.2, 0.5, 0.7))


def test_diagnose(trained, tmp_path, capsys):
    run = str(trained / "runs" / "small")
    assert main(["diagnose", run, "--json", str(tmp_path / "d.json"), "--picture", str(tmp_path / "d.png")]) == 0
    out = capsys.readouterr().out
    assert "instances of other images" in out
    assert "mask threshold" in out
    figures = json.loads((tmp_path / "d.json").read_text())
    assert 0 <= figures["cross_scene"]["mean"] <= figures["cross_scene"]["p99"] <= 1
    assert set(figures["equivariance"]) == {"flip", "crop", "rotate 30°", "scale 0.7"}
    assert Image.open(tmp_path / "d.png").size[0] > 150


def test_eval_of_results_from_anywhere(scenes, tmp_path, capsys):
    truth = json.loads(scenes.annotations("val").read_text())
    results = [
        {"image_id": a["image_id"], "category_id": a["category_id"], "segmentation": a["segmentation"], "score": 0.9}
        for a in truth["annotations"]
    ]
    (tmp_path / "r.json").write_text(json.dumps(results))
    assert main(["eval", "--results", str(tmp_path / "r.json"), "--annotations", str(scenes.annotations("val"))]) == 0
    assert "100.0" in capsys.readouterr().out


def test_predict_keeps_resolution_and_writes_all_formats(trained, tmp_path, capsys):
    folder = tmp_path / "photos"
    folder.mkdir()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (70, 101, 3), dtype=np.uint8)).save(folder / "a.png")
    Image.fromarray(np.zeros((33, 200), dtype=np.uint8)).save(folder / "b.jpg")
    out = tmp_path / "out"
    run = str(trained / "runs" / "small")
    assert main(["predict", run, str(folder / "a.png"), str(folder / "*.jpg"), "-o", str(out), "--score", "0"]) == 0
    assert Image.open(out / "a.overlay.png").size == (101, 70)
    assert Image.open(out / "b.labels.png").size == (200, 33)
    images = json.loads((out / "images.json").read_text())["images"]
    assert [(i["width"], i["height"]) for i in images] == [(101, 70), (200, 33)]
    for result in json.loads((out / "results.json").read_text()):
        size = next((i["height"], i["width"]) for i in images if i["id"] == result["image_id"])
        assert rle.decode(result["segmentation"]).shape == size


def test_predict_leaves_out_what_it_cannot_read_and_keeps_the_rest(trained, tmp_path, capsys):
    folder, out = tmp_path / "photos", tmp_path / "out"
    folder.mkdir()
    for name in ("a.png", "b.png", "c.png"):
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 50, 3), dtype=np.uint8)).save(folder / name)
    (folder / "b.png").write_bytes((folder / "b.png").read_bytes()[:300])
    (folder / "notes.jpg").write_text("not an image")
    capsys.readouterr()
    run = str(trained / "runs" / "small")
    assert main(["predict", run, str(folder), "-o", str(out), "--score", "0"]) == 1
    printed = capsys.readouterr()
    assert "in 2 images, written to" in printed.out
    assert [line.split()[:3] for line in printed.err.splitlines()] == [
        ["warning:", "left", "out:"],
        ["warning:", "left", "out:"],
    ]
    assert "b.png is not a readable image" in printed.err
    assert "notes.jpg is not a readable image" in printed.err
    images = json.loads((out / "images.json").read_text())["images"]
    assert [(i["id"], i["file_name"]) for i in images] == [(1, str(folder / "a.png")), (3, str(folder / "c.png"))]
    assert {r["image_id"] for r in json.loads((out / "results.json").read_text())} <= {1, 3}
    assert (out / "c.overlay.png").is_file()
    assert not (out / "b.overlay.png").exists()
    error = fails(capsys, "predict", run, folder / "b.png", folder / "notes.jpg", "-o", tmp_path / "none")
    assert "notes.jpg is not a readable image" in error
    assert not (tmp_path / "none").exists()
    tiles = ["--tile", "32", "--seam-check", "--format", "coco"]
    assert main(["predict", run, str(folder), "-o", str(tmp_path / "tiles"), *tiles]) == 1
    printed = capsys.readouterr()
    assert printed.out.count("seam error") == 2
    assert printed.err.count("left out") == 2


@pytest.mark.parametrize("options", [[], ["--sweep-threshold"], ["--workers", "0"]])
def test_eval_counts_what_it_cannot_read_as_not_found(trained, scenes, tmp_path, capsys, options):
    images = shutil.copytree(scenes.images("val"), tmp_path / "images")
    first, *others = sorted(images.iterdir())
    first.write_text("not an image")
    capsys.readouterr()
    command = ["eval", str(trained / "runs" / "small"), "--data", str(scenes.annotations("val")), str(images)]
    assert main([*command, *options, "--json", str(tmp_path / "metrics.json")]) == 1
    printed = capsys.readouterr().err
    assert printed.count("warning:") == 1
    assert f"{first} is not a readable image" in printed
    assert "Its instances count as not found." in printed
    assert json.loads((tmp_path / "metrics.json").read_text())
    for file in others:
        file.write_text("not an image")
    assert "not a readable image" in fails(capsys, *command, *options)


def test_report_compares_two_runs(trained, tmp_path):
    run = str(trained / "runs" / "small")
    assert main(["report", run, run, "-o", str(tmp_path / "both.html")]) == 0
    assert "<svg" in (tmp_path / "both.html").read_text()


def test_config_show_and_list(capsys):
    assert main(["config", "list"]) == 0
    assert "demo" in capsys.readouterr().out
    assert main(["config", "show", "demo", "--set", "train.steps=7", "--set", "data.augment.0.p=1"]) == 0
    assert "steps: 7" in capsys.readouterr().out


def test_data_commands(scenes, tmp_path, capsys):
    sound = [str(scenes.annotations("train")), str(scenes.images("train"))]
    assert main(["data", "check", *sound]) == 0
    assert "The data is valid" in capsys.readouterr().out
    assert main(["data", "preview", "demo", "--train", *sound, "-o", str(tmp_path / "p.png")]) == 0
    assert Image.open(tmp_path / "p.png").size[0] > 300
    assert main(["data", "make-scenes", str(tmp_path / "s"), "--set", "train_images=2", "--set", "val_images=1"]) == 0
    assert (tmp_path / "s" / "annotations" / "train.json").is_file()
    broken = json.loads(scenes.annotations("train").read_text())
    broken["annotations"][0]["category_id"] = 99
    (tmp_path / "broken.json").write_text(json.dumps(broken))
    assert main(["data", "check", str(tmp_path / "broken.json"), sound[1]]) == 1
    assert "category 99" in capsys.readouterr().out


def test_all_config_mistakes_are_told_at_once(capsys):
    error = fails(
        capsys,
        "config",
        "show",
        "condinst_lite0",
        "--set",
        "trian.steps=3",
        "--set",
        "optim.lr=fast",
        "--set",
        "model.mask_norm=grup",
    )
    assert "Did you mean 'train'" in error
    assert "optim.lr" in error
    assert "Did you mean 'group'" in error


@pytest.mark.parametrize(
    ("override", "word"),
    [
        ("model.chanels=64", "channels"),
        ("train.batch_size=0", "train.batch_size"),
        ("train={epochs: 3, steps: 2}", "either epochs or steps"),
        ("data.augment.0.op=flop", "flip"),
        ("nonsense", "key=value"),
        ("backbone=resnet5", "resnet50"),
        ("data.test_size={short: 800, longest: 600}", "short is more than longest (800 and 600)"),
        ("data.augment=[{op: short_side, range: [400, 1200], longest: 1000}]", "cannot be 1200"),
    ],
)
def test_config_mistakes(capsys, override, word):
    assert word in fails(capsys, "config", "show", "demo", "--set", override)


@pytest.mark.parametrize(("options", "is_warned"), [(["--set", "model=solov2"], True), ([], False)])
def test_a_switch_of_the_model_says_what_it_keeps(tmp_path, capsys, options, is_warned):
    (tmp_path / "mine.yaml").write_text(
        "model: {name: condinst, channels: 32}\nbackbone: {name: tiny, weights: random}"
    )
    error = fails_after_warnings(capsys, "train", tmp_path / "mine.yaml", *options)  # there is no data
    warning = "is a configuration of condinst: solov2 gets its default size, and optim, schedule and data stay"
    assert (warning in error) == is_warned


def fails_after_warnings(capsys, *arguments) -> str:
    capsys.readouterr()
    assert main([str(a) for a in arguments]) == 2
    return capsys.readouterr().err


def test_unknown_configuration(capsys):
    assert "Did you mean 'demo'" in fails(capsys, "train", "demoo")


def test_train_refuses_a_finished_run_and_another_config(trained, capsys):
    config = trained / "small.yaml"
    assert "--resume" in fails(capsys, "train", config)
    error = fails(capsys, "train", config, "--resume", "--set", "optim.lr=0.5")
    assert "optim.lr" in error
    assert "another configuration" in error


def test_resume_without_a_run(trained, capsys):
    assert "Nothing to resume" in fails(capsys, "train", trained / "small.yaml", "--name", "none", "--resume")


def test_bad_data_ends_training_before_it_starts(scenes, tmp_path, capsys):
    config = small_config(tmp_path, scenes)

    def error_with(annotations, images=None, *more) -> str:
        path = tmp_path / "a.json"
        path.write_text(annotations if isinstance(annotations, str) else json.dumps(annotations))
        return fails(capsys, "train", config, "--train", path, images or scenes.images("train"), *more)

    good = json.loads(scenes.annotations("train").read_text())
    assert "not valid json" in error_with("{")
    assert "no 'categories'" in error_with({**good, "categories": []})
    assert "no 'annotations'" in error_with({k: v for k, v in good.items() if k != "annotations"})
    assert "lists no images" in error_with({**good, "images": []})
    assert "Image folder not found" in error_with(good, tmp_path / "nowhere")
    assert "image files are missing" in error_with(good, tmp_path)
    assert "Did you mean" in error_with(good, None, "--set", f"data.classes=[{good['categories'][0]['name'][:-1]}]")
    assert not (tmp_path / "runs" / "small" / "last").exists()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_truncated_image_stops_training_with_its_name(scenes, tmp_path, capsys, workers):
    images = tmp_path / "images"
    shutil.copytree(scenes.images("train"), images)
    for file in images.iterdir():
        file.write_bytes(file.read_bytes()[:200])
    config = small_config(tmp_path, scenes)
    error = fails(
        capsys, "train", config, "--train", scenes.annotations("train"), images, "--set", f"data.workers={workers}"
    )
    assert "not a readable image" in error
    assert "annotation" in error


def test_checkpoints_that_are_not_ours(trained, tmp_path, capsys):
    photo = trained / "small.yaml"
    assert "No checkpoint" in fails(capsys, "predict", tmp_path / "nothing", photo)
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes((trained / "runs" / "small" / "best" / "model.safetensors").read_bytes()[:1000])
    assert "damaged" in fails(capsys, "predict", cut, photo)
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    assert "is not a uniquery model" in fails(capsys, "predict", tmp_path / "other.safetensors", photo)


class TestClassesOfValidationData:
    """The same rule for `train` and `eval`: no instances of unknown classes; a class without instances is fine."""

    def changed(self, scenes, folder, change):
        raw = json.loads(scenes.annotations("val").read_text())
        change(raw)
        (folder / "other.json").write_text(json.dumps(raw))
        return [str(folder / "other.json"), str(scenes.images("val"))]

    def train(self, scenes, folder, val, *more):
        config = small_config(folder, scenes)
        return ["train", str(config), "--val", *val, "--set", "train.steps=1", *more]

    def test_an_unknown_class_with_instances_is_refused(self, trained, scenes, tmp_path, capsys):
        val = self.changed(scenes, tmp_path, lambda raw: raw["categories"][0].update(name="zebra"))
        for arguments in (
            ["eval", trained / "runs" / "small", "--data", *val, "--workers", "0"],
            self.train(scenes, tmp_path, val),
        ):
            error = fails(capsys, *arguments)
            assert "annotations of the class 'zebra', which the training data does not have" in error
            assert "data.classes" in error
        assert not (tmp_path / "runs").exists()

    def test_an_unknown_class_without_instances_is_not(self, trained, scenes, tmp_path):
        val = self.changed(scenes, tmp_path, lambda raw: raw["categories"].append({"id": 99, "name": "zebra"}))
        assert main(["eval", str(trained / "runs" / "small"), "--data", *val, "--workers", "0"]) == 0
        assert main(self.train(scenes, tmp_path, val)) == 0
        assert main(["eval", str(tmp_path / "runs" / "small"), "--workers", "0"]) == 0

    def test_nor_a_known_one_that_the_data_does_not_have(self, trained, scenes, tmp_path):
        def without_first(raw):
            first = raw["categories"].pop(0)["id"]
            raw["annotations"] = [row for row in raw["annotations"] if row["category_id"] != first]

        val = self.changed(scenes, tmp_path, without_first)
        assert main(["eval", str(trained / "runs" / "small"), "--data", *val, "--workers", "0"]) == 0
        assert main(self.train(scenes, tmp_path, val)) == 0

    def test_chosen_classes_leave_all_others_out(self, scenes, tmp_path):
        def change(raw):
            raw["categories"][0].update(name="zebra")

        val = self.changed(scenes, tmp_path, change)
        names = [row["name"] for row in json.loads(scenes.annotations("train").read_text())["categories"]]
        assert main(self.train(scenes, tmp_path, val, "--set", f"data.classes=[{names[1]}]")) == 0
        assert main(["eval", str(tmp_path / "runs" / "small"), "--workers", "0"]) == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["predict", "run", "a.png", "--mask-threshold", "50"],
        ["predict", "run", "a.png", "--score", "1.5"],
        ["predict", "run", "a.png", "--score", "nan"],
        ["eval", "run", "--mask-threshold", "-1"],
    ],
)
def test_thresholds_are_probabilities(capsys, arguments):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert f"argument {arguments[-2]}: {arguments[-1]} is not a number from 0 to 1" in capsys.readouterr().err


def test_predict_of_nothing(trained, capsys, tmp_path):
    assert "No image at" in fails(capsys, "predict", trained / "runs" / "small", tmp_path / "*.png")


def test_no_permission_to_write(scenes, tmp_path, capsys):
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert "Cannot create the folder" in fails(capsys, "train", small_config(tmp_path, scenes), "--output", blocked)


def test_original_category_ids_in_results(scenes, tmp_path):
    """Ids with gaps and a zero: results carry the data set's own."""
    new_id = {1: 0, 2: 17, 3: 90}
    folder = tmp_path / "data"
    folder.mkdir()
    for split in ("train", "val"):
        raw = json.loads(scenes.annotations(split).read_text())
        for category in raw["categories"]:
            category["id"] = new_id[category["id"]]
        for annotation in raw["annotations"]:
            annotation["category_id"] = new_id[annotation["category_id"]]
        (folder / f"{split}.json").write_text(json.dumps(raw))
    config = small_config(tmp_path, scenes)
    splits = [x for s in ("train", "val") for x in (f"--{s}", folder / f"{s}.json", scenes.images(s))]
    assert main(["train", str(config), *map(str, splits), "--set", "model.score_threshold=0"]) == 0
    results = json.loads((tmp_path / "runs" / "small" / "predictions.json").read_text())
    assert results
    assert {r["category_id"] for r in results} <= set(new_id.values())


def test_names_and_paths_are_taken_as_they_are(scenes, tmp_path):
    folder = tmp_path / "my data #2: new"
    shutil.copytree(scenes.images("train"), folder / "images")
    shutil.copy(scenes.annotations("train"), folder / "t.json")
    config = small_config(tmp_path, scenes)
    options = ["--train", str(folder / "t.json"), str(folder / "images"), "--name", "2024", "--set", "train.steps=1"]
    assert main(["train", str(config), *options]) == 0
    assert (tmp_path / "runs" / "2024" / "last").is_dir()


def test_resume_auto_starts_goes_on_and_survives_a_kill_between_renames(scenes, tmp_path, capsys):
    config = str(small_config(tmp_path, scenes))
    run = tmp_path / "runs" / "small"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("name: small\n")  # killed before the first checkpoint
    assert main(["train", config, "--resume", "auto"]) == 0
    (run / "last").rename(run / ".last.old")  # killed between the two renames of a save
    assert main(["train", config, "--resume", "auto"]) == 0
    assert (run / "last").is_dir()
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps.count(4) == 2  # one line of training, one of evaluation


@pytest.mark.parametrize(
    "arguments",
    [
        ["diagnose", "x", "--images", "0"],
        ["eval", "x", "--workers", "-1"],
        ["eval", "x", "--max-detections", "0"],
        ["predict", "x", "y", "--short", "-5"],
        ["data", "preview", "demo", "--images", "0"],
        ["data", "preview", "demo", "--images", "1.5"],
    ],
)
def test_numbers_out_of_range(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert f"argument {arguments[-2]}: {arguments[-1]} is not a whole number from " in capsys.readouterr().err


def test_scenes_settings_that_cannot_be(tmp_path, capsys):
    for setting, word in (
        ("train_images=[1", "train_images"),
        ("clases=2", "Did you mean 'classes'"),
        ("x", "key=value"),
    ):
        assert word in fails(capsys, "data", "make-scenes", tmp_path / "s", "--set", setting)


def test_a_broken_predictions_file_costs_only_the_pictures(trained, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(trained / "runs" / "small", run)
    (run / "predictions.json").write_text("{")
    assert main(["report", str(run)]) == 0
    assert "no pictures" in capsys.readouterr().err


def test_sweep_writes_json_and_refuses_what_it_cannot_do(trained, tmp_path, capsys):
    run = trained / "runs" / "small"
    assert main(["eval", str(run), "--sweep-threshold", "--json", str(tmp_path / "s.json"), "--workers", "0"]) == 0
    assert "0.5" in json.loads((tmp_path / "s.json").read_text())
    assert "--save" in fails(capsys, "eval", run, "--sweep-threshold", "--save", tmp_path / "r.json")


def test_the_demo(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "DEMO_SCENES", ScenesConfig(train_images=6, val_images=4, size=64, classes=3, crowding=4))
    settings = [
        "train={steps: 2, batch_size: 4, eval_every: 2, save_every: 2, log_every: 1}",
        "backbone={name: tiny, weights: random}",
        "data.workers=0",
        "data.augment=[{op: scale_jitter, range: [0.9, 1.5], size: 64}]",
        "data.test_size={short: 64, longest: 64}",
    ]
    command = ["demo", "--data", str(tmp_path / "scenes"), "--output", str(tmp_path / "runs")]
    assert main([*command, *(part for setting in settings for part in ("--set", setting))]) == 0
    out = capsys.readouterr().out
    folder = tmp_path / "runs" / "demo"
    page = (folder / "report.html").read_text()
    terms = {}
    for name in ("plain", "paper"):
        run = folder / name
        assert name in page
        assert name in out
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines if line["kind"] == "train"] == [1, 2]
        terms[name] = set(lines[0]["losses"])
        figures = json.loads((run / "diagnose.json").read_text())
        assert figures["images"] == 4
        assert 0 < figures["cross_scene"]["mean"] < 1
        assert f"{100 * figures['cross_scene']['mean']:.2f} %" in out
        assert Image.open(run / "diagnose.png").size[0] > 150
    assert terms["paper"] - terms["plain"] == {"loss_inter", "loss_equi"}
    assert page.count("<svg") > 1
    assert "paper minus plain, best weights of each:" in page
    assert "our recommended setting" in page


def test_the_quick_demo_is_short_and_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        demo, "QUICK_SCENES", ScenesConfig(train_images=6, val_images=4, size=64, classes=3, crowding=4)
    )
    asked = []
    monkeypatch.setattr(demo, "_train_and_diagnose", lambda overrides, _: asked.append(load_config("demo", overrides)))
    monkeypatch.setattr(demo, "build_report", lambda runs, page, *, intro, warn: page.write_text(intro))
    monkeypatch.setattr(demo_command, "_summary", lambda runs: "")
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    monkeypatch.setattr(demo, "_new_folder", lambda output: output / "demo")
    assert main(["demo", "--quick", "--set", "train.batch_size=2"]) == 0
    assert [config.train.steps for config in asked] == [20, 20]
    assert all(config.train.batch_size == 2 for config in asked)
    assert asked[0].data.train.images == Path("data/scenes_quick/images/train")
    assert "far too short" in Path("runs/demo/report.html").read_text()
    assert "Too few steps to learn anything" in capsys.readouterr().out
