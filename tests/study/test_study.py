"""A study from its file to its table and page: planned, run, resumed, compared; and what can be wrong with it."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from helpers.small_runs import small_config
from uniquery.cli import main
from uniquery.errors import ConfigError, UserError
from uniquery.report.runs import load_run
from uniquery.study.estimate import total_seconds
from uniquery.study.page import study_table, variant_curves, write_page
from uniquery.study.plan import plan_runs, read_study, shipped_studies, slug, study_data
from uniquery.study.results import (
    Evaluation,
    RunResult,
    add_image_intervals,
    compare_runs,
    final_predictions,
    read_result,
    result_file,
    result_seeds,
)
from uniquery.study.run import finished_result, run_study, runs_left, threads_per_run
from uniquery.study.worker import exclusive_lock
from uniquery.study.worker import main as worker_main
from uniquery.training.run_folder import RunFolder


def study_file(folder: Path, scenes, **changes) -> Path:
    split = {s: {"annotations": str(scenes.annotations(s)), "images": str(scenes.images(s))} for s in ("train", "val")}
    content = {
        "name": "tiny",
        "config": str(small_config(folder, scenes)),
        "control": "base",
        "variants": {"base": {}, "wider jitter": {"set": {"data.augment.1.range": [0.5, 1.5]}, "paper": {"AP": 1.5}}},
        "seeds": 2,
        "data": {"scenes": split},
        "diagnose_images": 2,
        **changes,
    }
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def planned(folder: Path, scenes, **changes):
    study = read_study(study_file(folder, scenes, **changes))
    return study, plan_runs(study, study_data(study, folder / "out"), folder / "out")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, scenes):
    """A study that has been run by the command line."""
    folder = tmp_path_factory.mktemp("study")
    assert main(["study", str(study_file(folder, scenes)), "--output", str(folder / "out")]) == 0
    return folder


class TestPlan:
    def test_all_variants_of_a_seed_come_before_the_next_seed(self, tmp_path, scenes):
        _, runs = planned(tmp_path, scenes)
        names = [
            "scenes--base--seed0",
            "scenes--wider-jitter--seed0",
            "scenes--base--seed1",
            "scenes--wider-jitter--seed1",
        ]
        assert [run.name for run in runs] == names
        assert [run.config.seed for run in runs] == [0, 0, 1, 1]
        assert runs[1].config.data.augment[1].range == (0.5, 1.5)
        assert len({run.config.folder for run in runs}) == 4

    def test_the_key_depends_on_what_changes_the_result(self, tmp_path, scenes):
        _, runs = planned(tmp_path, scenes)
        assert len({run.key for run in runs}) == 4
        _, elsewhere = planned(tmp_path, scenes, set={"data.workers": 1, "train.device": "cpu"})
        assert [run.key for run in elsewhere] == [run.key for run in runs]
        for change in ({"train.steps": 5}, {"train.init_from": "weights.pth"}):
            _, others = planned(tmp_path, scenes, set=change)
            assert not {run.key for run in others} & {run.key for run in runs}

    def test_the_key_depends_on_the_annotations_not_on_their_place(self, tmp_path, scenes):
        _, runs = planned(tmp_path, scenes)
        train = runs[0].config.data.train
        copy, edited = tmp_path / "copy.json", tmp_path / "edited.json"
        copy.write_bytes(train.annotations.read_bytes())
        edited.write_bytes(train.annotations.read_bytes() + b" ")
        for path, is_same in ((copy, True), (edited, False)):
            split = {"annotations": str(path), "images": str(train.images)}
            _, others = planned(tmp_path, scenes, set={"data.train": split})
            assert ([run.key for run in others] == [run.key for run in runs]) == is_same

    def test_a_base_comes_first_and_is_part_of_the_key(self, tmp_path, scenes):
        _, plain = planned(tmp_path, scenes)
        _, runs = planned(tmp_path, scenes, start_from={"set": {"train.steps": 2}})
        start, *others = runs
        assert (start.variant, start.config.train.steps) == (None, 2)
        assert {run.config.train.init_from for run in others} == {start.config.folder / "last"}
        assert not {run.key for run in others} & {run.key for run in plain}

    def test_scales(self, tmp_path, scenes):
        study, _ = planned(tmp_path, scenes, scales={"paper": {"config": "condinst_r50", "seeds": [0]}})
        assert study.at_scale("small") == study
        assert (study.at_scale("paper").config, study.at_scale("paper").seeds) == ("condinst_r50", (0,))
        with pytest.raises(ConfigError, match=r"no scale 'papr'.*Did you mean 'paper'"):
            study.at_scale("papr")

    def test_keys_that_hold_only_where_their_table_is_used(self, tmp_path, scenes):
        variants = {
            "base": {},
            "inter": {"set": {"querying.inter": {}}},
            "inter, weight": {"set": {"querying.inter.weight": 0.1}},
            "inter, own cap": {"set": {"querying.inter": {}, "querying.inter.max_queries": 5}},
            "inter, cap in its table": {"set": {"querying.inter": {"max_queries": 6}}},
            "off": {"set": {"querying.inter": None}},
            "preset": {"set": {"querying": "paper"}},
            "preset without it": {"set": {"querying": "recommended"}},
        }
        _, runs = planned(tmp_path, scenes, variants=variants, set_if_used={"querying.inter.max_queries": 64}, seeds=1)
        inter = [run.config.querying.inter for run in runs]
        assert [settings and settings.max_queries for settings in inter] == [None, 64, 64, 5, 6, None, 64, None]
        assert (inter[2].weight, inter[2].max_queries) == (0.1, 64)

    def test_a_scale_may_change_variants(self, tmp_path, scenes):
        jitter = {"data.augment": [{"op": "short_side"}]}
        study, _ = planned(
            tmp_path,
            scenes,
            set_if_used={"querying.inter.max_queries": 64},
            scales={"paper": {"variants": {"wider jitter": jitter}, "set_if_used": {}}},
        )
        paper = study.at_scale("paper")
        assert paper.settings_of("wider jitter") == jitter
        assert paper.variants["wider jitter"].paper == {"AP": 1.5}
        assert (study.set_if_used, paper.set_if_used) == ({"querying.inter.max_queries": 64}, {})
        with pytest.raises(ConfigError, match="'scales' names 'jitter', which is not a variant"):
            planned(tmp_path, scenes, scales={"paper": {"variants": {"jitter": {}}}})

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"control": "bas"}, "'control' is 'bas', which is not a variant. Did you mean 'base'"),
            ({"variants": {"base": {}, "b": {"control": "c"}}}, "'variants.b.control' is 'c', which is not a variant"),
            ({"variants": {"base": {}, "a b": {}, "a-b": {}}}, "differ only in signs"),
            ({"variants": {"base": {}, "start": {}}}, "cannot be called 'start'"),
            ({"data": {"my data": {"train": {}, "val": {}}}}, "my data"),
            ({"seeds": [1, 1]}, "a list of different seeds"),
            ({"seeds": []}, "at least 1"),
            ({"seeds": 0}, "seeds: write the number of seeds, at least 1"),
            ({"scales": {"paper": {"seeds": []}}}, "scales.paper.seeds: write the number of seeds, at least 1"),
            ({"variants": {"base": {"set": {"seed": 3}}}}, "variant 'base' sets 'seed', which the study sets itself"),
            (
                {"variants": {"base": {"set": {"train.init_from": "a.pth"}}}, "start_from": {}},
                "variant 'base' sets 'train.init_from'",
            ),
            ({"set_if_used": {"querying.intr.weight": 1}}, "'set_if_used' has the key 'querying.intr.weight'"),
            ({"varients": {}}, "Did you mean 'variants'"),
            ({"set": {"train.stps": 3}}, "study tiny: .*Did you mean 'steps'"),
            (
                {"variants": {"base": {}, "b": {"set": {"train.stps": 3}}}},
                "variant 'b' of study tiny: .*train.stps",
            ),
            ({"start_from": {"set": {"train.stps": 3}}}, "start_from of study tiny: .*train.stps"),
        ],
    )
    def test_mistakes_in_a_study_file(self, tmp_path, scenes, changes, message):
        with pytest.raises(ConfigError, match=f"(?s){message}") as error:
            planned(tmp_path, scenes, **changes)
        assert "?." not in str(error.value)

    def test_no_such_study(self):
        with pytest.raises(ConfigError, match="neither a file nor a shipped name"):
            read_study("nothing.yaml")

    @pytest.mark.parametrize("name", shipped_studies())
    def test_every_shipped_study_is_valid(self, name, tmp_path, scenes):
        study = read_study(name)
        split = read_study(study_file(tmp_path, scenes)).data
        for scale in ("small", *study.scales):
            assert plan_runs(study.at_scale(scale), dict(split), tmp_path)

    def test_names_become_file_names(self):
        assert slug("../../etc/passwd") == "..-..-etc-passwd"
        assert "/" not in slug("a/b")
        assert slug("λ") == "variant"


class TestRun:
    def test_results_table_page_and_summary(self, finished):
        out = finished / "out" / "tiny"
        results = [read_result(path) for path in sorted((out / "results").glob("*.json"))]
        assert len(results) == 4
        for result in results:
            assert [e.step for e in result.evaluations] == [2, 4]
            assert result.evaluations[-1].images == 8
            assert result.seconds > 0
            assert result.peak_memory_gb > 0.05
            assert result.diagnosis["images"] == 2
            assert {"uniquery", "torch", "python"} <= set(result.versions)
            assert (
                out / "results" / f"{result.data}--{slug(result.variant)}--seed{result.seed}.json"
            ).stat().st_size < 20_000
        summary = json.loads((out / "study.json").read_text())
        assert [row["variant"] for row in summary["rows"]] == ["base", "wider jitter"]
        page = (out / "report.html").read_text()
        assert "wider jitter" in page
        assert "AP 1.5" in page
        assert "<script" not in page

    def test_the_score_is_that_of_the_last_weights(self, finished):
        out = finished / "out" / "tiny"
        result = read_result(out / "results" / "scenes--base--seed0.json")
        record = load_run(out / "runs" / "scenes--base--seed0")
        assert result.score == record.final.metric("AP")

    def test_a_finished_study_trains_nothing_again(self, finished, scenes):
        out = finished / "out" / "tiny"
        before = {p: p.stat().st_mtime_ns for p in (out / "runs").rglob("*")}
        assert main(["study", str(study_file(finished, scenes)), "--output", str(finished / "out")]) == 0
        assert {p: p.stat().st_mtime_ns for p in (out / "runs").rglob("*")} == before

    def test_other_settings_do_not_mix_with_old_results(self, finished, scenes, capsys):
        changed = study_file(finished, scenes, set={"train.steps": 3})
        assert main(["study", str(changed), "--output", str(finished / "out")]) == 2
        assert "was made with other settings" in capsys.readouterr().err
        arguments = ["study", str(changed), "--output", str(finished / "out"), "--only", "base", "--seeds", "5"]
        assert main(arguments) == 2  # before anything is trained
        assert not (finished / "out" / "tiny" / "runs" / "scenes--base--seed5").exists()

    def test_a_run_in_progress_does_not_go_on_with_other_settings(self, tmp_path, scenes):
        _, runs = planned(tmp_path, scenes, seeds=[0])
        out = tmp_path / "out"
        assert not run_study(runs[:1], out, diagnose_images=0)
        result_file(out, runs[0]).unlink()
        assert runs_left(runs, out) == runs
        _, longer = planned(tmp_path, scenes, seeds=[0], set={"train.steps": 5})
        with pytest.raises(UserError, match=r"unfinished run .*base--seed0 was started with other settings"):
            runs_left(longer, out)

    def test_a_renamed_variant_keeps_its_results(self, finished, scenes):
        variants = {"base": {}, "wider, jitter": {"set": {"data.augment.1.range": [0.5, 1.5]}}}
        study = read_study(study_file(finished, scenes, variants=variants))
        runs = plan_runs(study, dict(study.data), finished / "out" / "tiny")
        assert finished_result(runs[1], finished / "out" / "tiny").variant == "wider, jitter"

    def test_the_data_of_the_configuration(self, tmp_path, scenes):
        study = read_study(study_file(tmp_path, scenes, data={}))
        (data,) = study_data(study, tmp_path / "out").values()
        assert data.train.annotations == scenes.annotations("train")
        missing = study_file(tmp_path, scenes, data={}, set={"data.val.annotations": "nowhere.json"})
        with pytest.raises(ConfigError, match=r"data.val.annotations: there is no file nowhere.json"):
            study_data(read_study(missing), tmp_path / "out")
        half = study_file(tmp_path, scenes, data={}, set={"data.val": None})
        with pytest.raises(ConfigError, match=r"has only one of data.train and data.val"):
            study_data(read_study(half), tmp_path / "out")

    def test_a_message_with_brackets(self, tmp_path, scenes, capsys):
        """rich would take them for markup."""
        broken = {"set": {"data.train.annotations": f"{tmp_path}/[/data]/train.json"}}
        file = study_file(tmp_path, scenes, variants={"base": broken}, seeds=[0])
        assert main(["study", str(file), "--output", str(tmp_path / "out")]) == 1
        assert "[/data]/train.json" in capsys.readouterr().out.replace("\n", "")

    def test_a_dry_run_trains_nothing(self, tmp_path, scenes, capsys):
        assert main(["study", str(study_file(tmp_path, scenes)), "--output", str(tmp_path / "out"), "--dry-run"]) == 0
        assert "4 of 4 runs are left" in capsys.readouterr().out
        assert not (tmp_path / "out" / "tiny" / "runs").exists()

    def test_a_failed_run_does_not_stop_the_others(self, tmp_path, scenes, capsys):
        variants = {"base": {}, "broken": {"set": {"optim.lr": 1e30, "optim.name": "sgd"}}}
        file = study_file(tmp_path, scenes, variants=variants, seeds=[0])
        assert main(["study", str(file), "--output", str(tmp_path / "out")]) == 1
        output = capsys.readouterr().out
        assert "failed: scenes--broken--seed0" in output.replace("\n", " ")
        assert read_result(tmp_path / "out" / "tiny" / "results" / "scenes--base--seed0.json")
        assert "Failed runs" in (tmp_path / "out" / "tiny" / "report.html").read_text()

    def test_a_run_that_was_killed(self, tmp_path, scenes, monkeypatch):
        monkeypatch.setattr(
            "uniquery.study.run._start",
            lambda *_: subprocess.Popen([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]),
        )
        _, runs = planned(tmp_path, scenes, seeds=[0])
        (failure,) = run_study(runs[:1], tmp_path / "out", diagnose_images=0)
        assert failure.reason == "it was ended by SIGKILL, perhaps because memory ran out"

    def test_two_processes_do_not_train_the_same_run(self, tmp_path):
        """The second waits for the first, and takes its result."""
        task, result = tmp_path / "run.json", tmp_path / "result.json"
        task.write_text(json.dumps({"result": str(result)}))
        with ThreadPoolExecutor(1) as pool:
            with exclusive_lock(tmp_path / "run.lock") as waited:
                assert not waited
                second = pool.submit(worker_main, "there is no configuration, which only a training reads", str(task))
                time.sleep(0.2)
                assert not second.done()
                result.write_text("of the first process")
            assert second.result(10) == 0
        assert result.read_text() == "of the first process"

    def test_variants_start_from_one_base(self, tmp_path, scenes):
        _, runs = planned(tmp_path, scenes, start_from={"set": {"train.steps": 2}}, seeds=[0], diagnose_images=0)
        assert not run_study(runs[:2], tmp_path / "out", diagnose_images=0, jobs=2)
        start, first, second = runs
        assert runs_left(runs, tmp_path / "out") == [second]
        shutil.rmtree(start.config.folder)  # its result is still there, but nothing can start from it
        assert runs_left(runs, tmp_path / "out") == [start, second]
        assert runs_left([start, first], tmp_path / "out") == []
        assert not run_study(runs, tmp_path / "out", diagnose_images=0, jobs=2)
        assert all(finished_result(run, tmp_path / "out") for run in runs)
        log = (tmp_path / "out" / "logs" / f"{runs[1].name}.log").read_text()
        assert "init_from" in log

    def test_extra_views_count_as_forwards(self, tmp_path, scenes):
        variants = {
            "base": {},
            "paired": {"set": {"querying.equivariance": {"views": "paired"}}},
            "extra": {"set": {"querying.equivariance": {"views": "extra"}}},
        }
        _, runs = planned(tmp_path, scenes, variants=variants, seeds=[0])
        assert not run_study(runs, tmp_path / "out", diagnose_images=0, jobs=2)
        evaluations = [finished_result(run, tmp_path / "out").evaluations[-1] for run in runs]
        assert [(e.step, e.images) for e in evaluations] == [(4, 8), (4, 8), (4, 16)]

    def test_variants_of_a_base_that_failed(self, tmp_path, scenes):
        start = {"set": {"optim.lr": 1e30, "optim.name": "sgd"}}
        _, runs = planned(tmp_path, scenes, start_from=start, seeds=[0])
        failures = run_study(runs, tmp_path / "out", diagnose_images=0)
        assert [f.run.name for f in failures] == [run.name for run in runs]
        assert {f.reason for f in failures[1:]} == {"the base that it starts from failed"}

    def test_only_some_variants_and_seeds(self, tmp_path, scenes):
        file = str(study_file(tmp_path, scenes))
        arguments = ["study", file, "--output", str(tmp_path / "out"), "--only", "base", "--seeds", "1"]
        assert main(arguments) == 0
        assert [p.stem for p in (tmp_path / "out" / "tiny" / "results").iterdir()] == ["scenes--base--seed1"]
        assert main([*arguments[:-4], "--only", "bse"]) == 2

    def test_a_variant_comes_with_its_own_control_only(self, tmp_path, scenes, capsys):
        variants = {"base": {}, "views": {}, "equi": {"control": "views"}}
        file = str(study_file(tmp_path, scenes, variants=variants, seeds=1))
        assert main(["study", file, "--output", str(tmp_path / "out"), "--dry-run", "--only", "equi"]) == 0
        output = capsys.readouterr().out
        assert "2 of 2 runs are left" in output
        assert "scenes--base--seed0" not in output

    def test_the_time_of_several_jobs(self, tmp_path, scenes, monkeypatch):
        """A base is not shared out, and a run is not split."""
        start, *others = planned(tmp_path, scenes, start_from={})[1]
        seconds = {start.name: 10.0} | dict.fromkeys([run.name for run in others], 3.0)
        assert [total_seconds([start, *others], seconds, jobs) for jobs in (1, 2, 8)] == [22, 16, 13]
        assert total_seconds([], {}, 2) == 0
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        monkeypatch.setattr(os, "cpu_count", lambda: 8)
        assert [threads_per_run(jobs) for jobs in (1, 2, 20)] == [None, 4, 1]
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        assert threads_per_run(2) is None

    def test_the_table_has_all_results_and_keeps_intervals_whose_predictions_are_gone(self, tmp_path, scenes):
        file, out = str(study_file(tmp_path, scenes, diagnose_images=0)), tmp_path / "out" / "tiny"

        def rows(*options):
            assert main(["study", file, "--output", str(tmp_path / "out"), *options]) == 0
            return json.loads((out / "study.json").read_text())["rows"]

        _, first = rows("--seeds", "0")
        assert list(first["images_by_seed"]) == ["0"]
        shutil.rmtree(out / "runs")  # as on another machine
        _, both = rows("--seeds", "7")
        assert both["images_by_seed"].keys() == both["scores"].keys() == {"0", "7"}
        assert both["images_by_seed"]["0"] == first["images_by_seed"]["0"]
        assert rows("--only", "base", "--seeds", "0")[1] == both  # nothing was run
        assert rows("--table")[1] == both
        assert not (out / "results" / "scenes--base--seed1.json").exists()

    def test_a_damaged_summary(self, tmp_path, scenes):
        (tmp_path / "study.json").write_text('{"rows": 3}')
        with pytest.raises(UserError, match="is not the summary of a study"):
            add_image_intervals([], [], tmp_path / "study.json")

    @pytest.mark.slow
    @pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    def test_interrupted_inside_a_run_it_resumes_to_the_same_result(self, tmp_path, scenes, number, code):
        """The running training writes a checkpoint and ends; the same command continues."""
        file = study_file(tmp_path, scenes, seeds=[0], variants={"base": {}}, set={"train.steps": 30})
        command = [sys.executable, "-m", "uniquery", "study", str(file), "--output", str(tmp_path / "out")]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        log = tmp_path / "out" / "tiny" / "runs" / "scenes--base--seed0" / "metrics.jsonl"
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and (not log.is_file() or len(log.read_text().splitlines()) < 3):
            time.sleep(0.05)
        os.kill(process.pid, number)
        assert process.wait(60) == code
        stopped = log.read_text()
        time.sleep(1)
        assert log.read_text() == stopped  # no training is left behind
        assert not (tmp_path / "out" / "tiny" / "results" / "scenes--base--seed0.json").exists()
        assert main(command[3:]) == 0
        resumed = read_result(tmp_path / "out" / "tiny" / "results" / "scenes--base--seed0.json")
        assert main(["study", str(file), "--output", str(tmp_path / "whole")]) == 0
        whole = read_result(tmp_path / "whole" / "tiny" / "results" / "scenes--base--seed0.json")
        assert resumed.evaluations == whole.evaluations


def result(variant: str | None, seed: int, score: float) -> RunResult:
    return RunResult(
        data="d",
        variant=variant,
        seed=seed,
        key="k",
        headline="AP",
        evaluations=({"step": 1, "images": 8, "metrics": {"AP": score}},),
        diagnosis={},
        seconds=1.0,
        peak_memory_gb=1.0,
        versions={},
    )


class TestComparison:
    def test_data_sets_may_have_other_metrics(self, tmp_path, scenes):
        study, runs = planned(tmp_path, scenes)
        quality = Evaluation(step=1, images=8, metrics={"PQ": 40.0})
        panoptic = result("base", 0, 0.0).model_copy(update={"data": "p", "headline": "PQ", "evaluations": (quality,)})
        rows = compare_runs(study, [result("base", 0, 5.0), panoptic])
        assert "AP, PQ" in [column.header for column in study_table(study, rows).columns]
        write_page(study, rows, runs, tmp_path / "page.html")
        page = (tmp_path / "page.html").read_text()
        assert '<th class="number">AP</th>' in page
        assert '<th class="number">PQ</th>' in page

    def test_differences_are_paired_by_seed(self, tmp_path, scenes):
        study, _ = planned(tmp_path, scenes)
        scores = {"base": [10.0, 20.0, 30.0], "wider jitter": [11.0, 21.1, 30.9]}
        rows = compare_runs(
            study, [result(v, seed, s) for v, values in scores.items() for seed, s in enumerate(values)]
        )
        assert rows[0].verdict == "control"
        assert rows[0].difference is None
        assert rows[1].difference.mean == pytest.approx(1.0)
        assert rows[1].verdict == "helps"  # although the seeds themselves spread by ten points

    def test_a_variant_may_have_a_control_of_its_own(self, tmp_path, scenes):
        variants = {"base": {}, "views": {}, "equi": {"control": "views"}}
        study, _ = planned(tmp_path, scenes, variants=variants)
        rows = compare_runs(
            study, [result(name, 0, score) for name, score in (("base", 9.0), ("views", 5.0), ("equi", 6.0))]
        )
        assert [row.control for row in rows] == [None, "base", "views"]
        assert rows[2].difference.mean == pytest.approx(1.0)

    def test_without_its_control_a_variant_waits(self, tmp_path, scenes):
        study, _ = planned(tmp_path, scenes)
        (row,) = compare_runs(study, [result("wider jitter", 0, 5.0)])
        assert row.verdict == "no run to compare with yet"

    def test_a_page_without_predictions_or_rows(self, tmp_path, scenes):
        study, runs = planned(tmp_path, scenes)
        results = [result("base", 0, 5.0), result("wider jitter", 0, 6.0)]
        rows = add_image_intervals(compare_runs(study, results), runs, tmp_path / "study.json")
        assert rows[1].images is None
        write_page(study, rows, runs, tmp_path / "page.html")
        write_page(study, [], runs, tmp_path / "empty.html")
        assert "cannot tell: run at least 3 seeds" in (tmp_path / "page.html").read_text()

    def test_curves_continue_where_their_base_ends(self, tmp_path, scenes):
        study, _ = planned(tmp_path, scenes)
        rows = compare_runs(study, [result(None, 0, 4.0), result("base", 0, 5.0), result("base", 1, 6.0)])
        curves = variant_curves(rows, "AP")
        assert [curve.name for curve in curves if not curve.background] == ["start", "base"]
        assert [curve.points.tolist() for curve in curves] == [
            [[8, 4.0]],
            *([[8, 4.0], [16, score]] for score in (5.0, 6.0, 5.5)),  # each seed, and their mean
        ]

    def test_the_table_names_data_sets_only_where_there_are_several(self, tmp_path, scenes):
        study, _ = planned(tmp_path, scenes)
        rows = compare_runs(study, [result("base", 0, 5.0), result("wider jitter", 0, 6.0)])
        other = [replace(row, data="other") for row in rows]
        assert [column.header for column in study_table(study, rows).columns][:2] == ["variant", "seeds"]
        assert [column.header for column in study_table(study, rows + other).columns][:2] == ["data", "variant"]

    def test_the_table_shows_steps_and_forwards_where_they_differ(self, tmp_path, scenes):
        study, runs = planned(tmp_path, scenes)
        rows = compare_runs(study, [result("base", 0, 5.0), result("wider jitter", 0, 6.0)])
        assert "steps, forwards" not in [column.header for column in study_table(study, rows).columns]
        longer = result("wider jitter", 0, 6.0).model_copy(
            update={"evaluations": (Evaluation(step=1, images=1600, metrics={"AP": 6.0}),)}
        )
        rows = compare_runs(study, [result("base", 0, 5.0), longer])
        lengths = study_table(study, rows).columns[-1]
        assert (lengths.header, list(lengths.cells)) == ("steps, forwards", ["1, 8", "1, 1,600"])
        write_page(study, rows, runs, tmp_path / "page.html")
        assert "1, 1,600" in (tmp_path / "page.html").read_text()

    def test_the_table_shows_our_time_and_memory_beside_the_papers(self, tmp_path, scenes):
        variants = {"base": {"paper": {"AP": 35.5, "min/epoch": 90}}}
        study, _ = planned(tmp_path, scenes, variants=variants)
        columns = study_table(study, compare_runs(study, [result("base", 0, 5.0)])).columns
        assert [column.header for column in columns][-3:] == ["paper", "time of a run", "peak memory"]

    def test_a_narrow_console_cuts_no_name(self, tmp_path, scenes):
        variants = {"base": {"paper": {"AP": 35.5, "hours/epoch": 1.5}}, "a name of several words": {}}
        study, _ = planned(tmp_path, scenes, variants=variants)
        rows = compare_runs(study, [result(name, 0, 5.0) for name in variants])
        console = Console(width=80, record=True, file=io.StringIO())
        console.print(study_table(study, rows))
        text = console.export_text()
        assert "a name of several words" in text
        assert "…" not in text

    def test_the_seed_of_a_base_is_none_of_the_variants(self, tmp_path):
        (tmp_path / "results").mkdir()
        for name in ("data--start--seed10", "data--base--seed3", "data--start-again--seed4"):
            (tmp_path / "results" / f"{name}.json").touch()
        assert result_seeds(tmp_path) == [3, 4]

    @pytest.mark.parametrize("content", ['{"data": 3', result("a", 0, 1.0).model_copy(update={"evaluations": ()})])
    def test_a_damaged_result(self, tmp_path, scenes, content):
        _, runs = planned(tmp_path, scenes)
        path = result_file(tmp_path, runs[0])
        path.parent.mkdir()
        path.write_text(content if isinstance(content, str) else content.model_dump_json())
        with pytest.raises(UserError, match="remove it to run it again"):
            read_result(path)

    def test_damaged_files_of_a_run(self, tmp_path, scenes):
        _, (planned_run, *_) = planned(tmp_path, scenes)
        folder = RunFolder(planned_run.config.folder)
        folder.last.mkdir(parents=True)
        folder.final_predictions_file.write_text("[{")
        with pytest.raises(UserError, match=r"final_predictions.json is damaged; remove it"):
            final_predictions(planned_run)
        task = tmp_path / "out" / "configs" / f"{planned_run.name}.json"
        task.parent.mkdir()
        task.write_text("[3]")
        with pytest.raises(UserError, match=rf"{planned_run.name}.json is damaged: remove it"):
            runs_left([planned_run], tmp_path / "out")
