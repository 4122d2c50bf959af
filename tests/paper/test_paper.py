"""The paper's tables: figures, configurations and commands belong together."""

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from uniquery import paper as module
from uniquery.cli import build_parser, main
from uniquery.data.scenes import ScenesConfig
from uniquery.errors import ConfigError
from uniquery.paper import config_name, our_figures, read_paper
from uniquery.paper.forecast import drawn_data, forecast_row, row_config, split_batch
from uniquery.study.plan import read_study, slug
from uniquery.training.batches import load_splits
from uniquery.training.config import load_config
from uniquery.training.config_files import PAPER, shipped_configs
from uniquery.training.dry_run import Measurement

PAPER_TEX = Path(__file__).parents[3] / "shared" / "paper.tex"
TABLES = read_paper().tables
ROWS = [(table, row.row) for table, content in TABLES.items() for row in content.rows if row.row is not None]
SMALL = ["train.batch_size=2", "data.test_size={short: 64, longest: 64}"]


def method_only(name: str):
    """A configuration without its name and its method."""
    return load_config(name).model_copy(update={"name": "", "querying": None})


class TestRows:
    def test_each_has_a_configuration_and_each_configuration_a_row(self):
        names = {name for name in shipped_configs() if name.startswith(f"{PAPER}/")}
        recipes = {name for name in names if name.startswith(f"{PAPER}/recipes/")}
        assert names - recipes == {config_name(*row) for row in ROWS}
        assert len(ROWS) == len(set(ROWS)) > 80

    @pytest.mark.parametrize(("table", "row"), ROWS)
    def test_is_short_and_named_after_its_row(self, table, row):
        file = shipped_configs()[config_name(table, row)]
        lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
        assert len(lines) <= 10
        assert lines[0].startswith(f"base: {PAPER}/")
        config = load_config(config_name(table, row))
        assert config.name == f"{table}-{row}"
        assert config.data.train is not None
        assert config.data.val is not None

    @pytest.mark.parametrize(("table", "row"), [(t, r) for t, r in ROWS if (t, f"{r}-ours") in ROWS])
    def test_base_and_ours_differ_in_the_method_alone(self, table, row):
        base, ours = config_name(table, row), config_name(table, f"{row}-ours")
        assert method_only(base) == method_only(ours)
        assert load_config(base).querying != load_config(ours).querying

    @pytest.mark.parametrize(
        ("table", "row"), [r for r in ROWS if r[0] in ("table1", "table2", "segmenters", "panoptic")]
    )
    def test_model_backbone_and_epochs_are_the_table_s(self, table, row):
        figures, config = TABLES[table].row(row), load_config(config_name(table, row))
        backbones = {"ResNet-50": "resnet50", "ResNet-101": "resnet101", "ResNet-50-DCN": "resnet50"}
        swin = (figures.backbone or "").replace("Swin-S", "swin_small").replace("Swin-B", "swin_base")
        assert config.backbone.name.startswith(backbones.get(figures.backbone, swin.replace("Swin-L", "swin_large")))
        assert row.startswith(config.model.name)
        if (table, row) != ("table1", "sparseinst-r50"):  # whose figure is of its authors' recipe
            assert config.train.epochs == figures.epochs
        assert bool(config.querying.inter and config.querying.equivariance) == row.endswith("-ours")

    def test_settings_that_the_paper_states(self):
        resnet, swin = load_config("paper/table1/solov2-r101"), load_config("paper/table1/mask2former-swin-b")
        assert (resnet.optim.name, resnet.optim.lr, swin.optim.name, swin.optim.lr) == ("sgd", 0.01, "adam", 1e-5)
        for config in (resnet, swin):
            assert config.schedule.name == "polynomial"
            assert config.train.batch_size == config.optim.lr_batch == 16
            assert (config.data.test_size.short, config.data.test_size.longest) == (800, 1333)
        crop, short_side, flip = resnet.data.augment
        assert (crop.op, crop.range, flip.op) == ("crop", (0.6, 1.0), "flip")
        assert (short_side.range, short_side.longest) == ((400, 1200), 1333)
        jitter = swin.data.augment[0]
        assert (jitter.range, jitter.size) == ((0.1, 2.0), 1024)
        inter = load_config("paper/table3/both").querying.inter
        assert (inter.capacity, inter.sampling.name, inter.loss.name) == (100_000, "instance_balanced", "focal")
        assert (inter.loss.alpha, inter.loss.gamma) == (0.1, 2.5)
        assert load_config("paper/table3/both").querying.equivariance.weight == 3

    def test_the_other_reading_of_the_learning_rate(self):
        optim = load_config("paper/table1/mask2former-swin-l-adamw-ours").optim
        assert (optim.name, optim.lr, optim.backbone_lr_factor, optim.weight_decay) == ("adamw", 1e-4, 0.1, 0.05)


class TestFigures:
    @pytest.mark.parametrize("table", TABLES)
    def test_gains_are_those_of_the_text(self, table):
        """ "+ ours" is better than its base in every metric of every table."""
        content = TABLES[table]
        for row in content.rows:
            if row.row and (table, f"{row.row}-ours") in ROWS:
                ours = content.row(f"{row.row}-ours").figures
                assert all(b > a for a, b in zip(row.figures, ours, strict=True)), row

    @pytest.mark.skipif(not PAPER_TEX.is_file(), reason="needs the source of the paper beside the repository")
    @pytest.mark.parametrize("table", TABLES)
    def test_are_in_the_paper(self, table):
        """Each row's figures stand in one row of the source, in this order."""
        lines = [re.findall(r"\d+(?:\.\d+)?", line) for line in PAPER_TEX.read_text().splitlines() if "&" in line]
        rows = [[float(number) for number in line] for line in lines]
        for row in TABLES[table].rows:
            assert any(_in_order(row.figures, numbers) for numbers in rows), row

    def test_as_text(self):
        table = TABLES["capacity"]
        assert table.format_figures(table.row("mini-batch")) == ["36.9", "17.8", "40.1", "53.1", "106", "19.68"]
        assert table.format_figures(table.row("10k"))[:1] == ["37.0"]

    @pytest.mark.parametrize(
        "name", ["table3", "table4a", "table4b", "table4c", "table4d", "table4e", "transformations"]
    )
    def test_are_those_of_the_studies(self, name):
        known = {row.figures[0] for row in (*TABLES[name].rows, TABLES["table3"].row("base"))}
        assert {variant.paper["AP"] for variant in read_study(name).variants.values()} <= known


def _in_order(figures: Sequence[float], numbers: Sequence[float]) -> bool:
    """Whether the figures are among the numbers, in their order."""
    rest = iter(numbers)
    return all(figure in rest for figure in figures)


# Variant of a study at the paper's scale → row. The control of table4d and of the transformations is not a row of the
# paper: views as ordinary samples, which is fairer than plain augmentation.
STUDIES = {
    "table3": {"base": "base", "L_inter": "inter", "L_equi": "equi", "both": "both"},
    "table4a": {name: slug(name) for name in ("base", "l1", "l2", "cross-entropy", "focal")},
    "table4b": {name: slug(name) for name in ("dense", "sparse 500", "sparse 1000", "balanced 10", "balanced 50")},
    "table4c": {"none": "base", **{name: name for name in ("mini-batch", "10k", "50k", "70k", "100k")}},
    "table4d": {"no augmentation": "no-aug", "features only": "features", "L_equi": "equi"},
    "table4e": {f"λ {weight}": f"lambda-{weight}" for weight in (1, 3, 5, 10)},
    "transformations": {
        "flip, crop + L_equi": "flip-crop-ours",
        "and rotation": "rotation",
        "and rotation + L_equi": "rotation-ours",
        "and scaling": "scaling",
        "and scaling + L_equi": "scaling-ours",
        "all": "rotation-scaling",
        "all + L_equi": "rotation-scaling-ours",
    },
}


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_at_the_scale_of_the_paper_trains_the_rows(name):
    study = read_study(name).at_scale("paper")
    for variant, row in STUDIES[name].items():
        config = load_config(study.config, list(study.settings_of(variant).items()))
        expected = load_config(config_name(name, row))
        assert config.model_copy(update={"name": expected.name}) == expected, variant


class TestOurFigures:
    def test_are_read_from_the_json_beside_the_configuration(self, tmp_path, monkeypatch):
        monkeypatch.setattr(module, "shipped_configs", lambda: {"paper/table1/x": tmp_path / "x.yaml"})
        assert our_figures("table1", "x") == {}
        (tmp_path / "x.json").write_text(json.dumps({"segm": {"metrics": {"AP": 35.25}, "per_class": {}}}))
        assert our_figures("table1", "x") == {"AP": 35.25}
        (tmp_path / "x.json").write_text(json.dumps({"panoptic": {"metrics": {"PQ": 50.0}}}))
        assert our_figures("table1", "x") == {"PQ": 50.0}

    @pytest.mark.parametrize("content", ["", "[]", "{}", '{"segm": 3}'])
    def test_another_json_is_refused(self, tmp_path, monkeypatch, content):
        monkeypatch.setattr(module, "shipped_configs", lambda: {"paper/table1/x": tmp_path / "x.yaml"})
        (tmp_path / "x.json").write_text(content)
        with pytest.raises(ConfigError, match="is not what 'uniquery eval --json' writes"):
            our_figures("table1", "x")


class TestForecast:
    def test_the_batch_is_split_among_processes(self):
        assert split_batch(row_config("table1", "solov2-r50"), 16).train.batch_size == 1
        assert split_batch(row_config("segmenters", "sparseinst-r50-ours"), 8).train.batch_size == 8

    @pytest.mark.parametrize(("row", "processes"), [("solov2-r50", 3), ("solov2-r50-ours", 16)])
    def test_a_batch_that_cannot_be_split_is_an_error(self, row, processes):
        with pytest.raises(ConfigError, match=r"cannot be divided among .* possible numbers: 1, 2, 4, 8"):
            split_batch(row_config("table1", row), processes)

    @pytest.mark.parametrize(
        ("table", "row", "classes"),
        [("table1", "solov2-r50", 80), ("table2", "solov2-r50", 1203), ("panoptic", "mask2former-swin-b", 133)],
    )
    def test_drawn_data_has_the_form_and_the_classes_of_the_real(self, table, row, classes):
        scenes = ScenesConfig(train_images=1, val_images=1, size=64, crowding=3)
        with drawn_data(row_config(table, row, SMALL), classes, scenes) as config:
            data, val = load_splits(config)
            folder = config.data.train.annotations
            assert (len(data), len(val), len(data.categories)) == (2, 1, classes)
            assert all(data.frequencies) == (table == "table2")
            assert (data.categories[0].is_thing is not None) == (table == "panoptic")
        assert not folder.exists()

    def test_steps_are_those_of_the_whole_batch_on_all_images(self, monkeypatch):
        measured = Measurement(None, 1, {}, 2.0, 0.5, 10, None)
        seen = []
        monkeypatch.setattr(
            "uniquery.paper.forecast.measure_config", lambda config, *_: seen.append(config.train) or measured
        )
        result = forecast_row(row_config("table1", "solov2-r50"), read_paper().data["coco"], 8)
        assert seen[0].batch_size == 2
        assert result.is_drawn
        forecast = result.forecast
        assert forecast.steps == round(12 * 118287 / 16)
        assert forecast.evaluations == 9
        assert forecast.evaluation_seconds == 9 * 625 * 0.5
        assert forecast.training_seconds == forecast.steps * 2.0

    def test_real_data_is_measured_if_it_is_there(self, scenes, monkeypatch):
        measured = Measurement(None, 1, {}, 2.0, 0.5, 10, None)
        lengths = []
        monkeypatch.setattr(
            "uniquery.paper.forecast.measure_config", lambda _, *splits: lengths.extend(map(len, splits)) or measured
        )
        data = {
            split: {"annotations": str(scenes.annotations(split)), "images": str(scenes.images(split))}
            for split in ("train", "val")
        }
        config = row_config("table1", "solov2-r50", [(f"data.{split}", data[split]) for split in data])
        result = forecast_row(config, read_paper().data["coco"], 2)
        assert lengths == [6, 4]
        assert not result.is_drawn
        assert result.forecast.steps == round(12 * 6 / 16)


class TestCommand:
    def test_lists_every_row_with_its_figures(self, capsys):
        assert main(["paper"]) == 0
        printed = capsys.readouterr().out
        for table, row in ROWS:
            assert row in printed, table
        assert "Mask R-CNN, ResNet-101" in printed
        assert "35.5 55.8 37.7 16.8 39.2 50.6" in printed

    def test_lists_one_table(self, capsys):
        assert main(["paper", "table2"]) == 0
        printed = capsys.readouterr().out
        assert "LVIS" in printed
        assert "condinst" not in printed

    def test_prints_commands_that_parse(self, capsys):
        change = ["--set", "data.train.annotations=my data/train.json"]
        assert main(["paper", "table1", "--row", "solov2-r50", "--gpus", "4", *change]) == 0
        lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
        words = shlex.split(lines["train"])
        assert words[:6] == ["torchrun", "--standalone", "--nproc-per-node", "4", "-m", "uniquery"]
        args = build_parser().parse_args(words[6:])
        assert args.set == [change[1], "train.batch_size=4"]
        assert load_config(args.config, args.set).data.train.annotations == Path("my data/train.json")
        for key in ("score on val2017", "submit to test-dev"):
            build_parser().parse_args(shlex.split(lines[key])[1:])
        assert lines["paper"].startswith("AP 35.1, AP50 55.5")

    def test_one_gpu_needs_no_torchrun(self, capsys):
        assert main(["paper", "table3", "--row", "base", "--gpus", "1"]) == 0
        assert "train: uniquery train paper/table3/base\n" in capsys.readouterr().out

    def test_the_dry_run_says_what_was_measured(self, capsys, monkeypatch):
        measured = Measurement("cpu", 1, {"largest": "2 images"}, 2.0, 0.5, 10**9, None)
        monkeypatch.setattr("uniquery.paper.forecast.measure_config", lambda *_: measured)
        assert main(["paper", "table2", "--row", "solov2-r50", "--gpus", "8", "--dry-run"]) == 0
        printed = " ".join(capsys.readouterr().out.split())
        for part in (
            "drawn images were measured",
            "Repeat factors",
            "peak memory: 1.00 GB",
            "with the batch of one of 8",
        ):
            assert part in printed

    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            (["tabel1"], "The paper has no table 'tabel1'. Did you mean 'table1'?"),
            (["table1", "--row", "solo-r50"], "has no row 'solo-r50'. Did you mean 'solov2-r50'?"),
            (["table1", "--row", "mask-rcnn"], "has no row 'mask-rcnn'"),
            (["--row", "base"], "--row needs its table"),
            (["table1", "--dry-run"], "are for one row"),
            (["table3", "--row", "base", "--set", "optim.lrr=1"], "Did you mean 'lr'?"),
        ],
    )
    def test_a_mistake_is_one_sentence(self, capsys, arguments, sentence):
        assert main(["paper", *arguments]) == 2
        assert sentence in capsys.readouterr().err

    def test_configurations_are_listed_with_their_figures_only_here(self, capsys):
        assert main(["config", "list"]) == 0
        printed = " ".join(capsys.readouterr().out.split())
        assert "table4a" not in printed
        assert "uniquery paper" in printed
