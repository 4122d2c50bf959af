"""Writes the tables and curves of docs/evidence.md from the results of studies in benchmarks/results.

    python benchmarks/evidence.py

A folder of results holds study.yaml (the study as it was run), the result of each run, and study.json with the
intervals over images, which need predictions that are not kept. `<!-- results: FOLDER -->` in the page says where the
table of a folder belongs; variants after a colon limit it to these. `<!-- differences: VARIANT, CONTROL: FOLDERS -->`
stands before a table of the differences of two variants over seeds. `<!-- curves: FOLDER: VARIANTS -->` stands before
the picture of their AP, with the base that they start from. `<!-- memory age -->` stands before the table of
memory_age.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from uniquery.evaluation.compare import paired_difference
from uniquery.report.charts import line_chart
from uniquery.report.tables import format_interval
from uniquery.study.page import row_cells, variant_curves
from uniquery.study.plan import StudySettings
from uniquery.study.results import Row, RunResult, compare_runs, read_result

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "evidence.md"
TABLE = re.compile(r"<!-- results: ([\w-]+)(?:: ([^>]+?))? -->\n+(?:\|.*\n)*\n*")
DIFFERENCES = re.compile(r"<!-- differences: ([^>,]+), ([^>:]+): ([^>]+?) -->\n+(?:\|.*\n)*\n*")
MEMORY_AGE = re.compile(r"<!-- memory age -->\n+(?:\|.*\n)*\n*")
CURVES = re.compile(r"<!-- curves: ([\w-]+): ([^>]+?) -->\n+!\[[^]]*\]\(([^)]+)\)")
COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2")
STYLE = """text { font: 11px sans-serif; fill: #666; } .gridline { stroke: #ddd; } .axis { stroke: #999; }
.line { fill: none; stroke-width: 2; stroke: var(--color); } .background { stroke-width: 1; opacity: 0.3; }
.line.dashed { stroke-dasharray: 5 4; } .dot { fill: white; stroke: var(--color); }"""
COLUMNS = {
    "variant": "variant",
    "seeds": "seeds",
    "score": "AP",
    "control": "control",
    "difference": "difference (95 %, seeds)",
    "images": "difference (95 %, images)",
    "own": "response on own",
    "others": "on others",
}


def main() -> None:
    page = with_tables(PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(page, encoding="utf-8")
    for folder, variants, picture in CURVES.findall(page):
        (PAGE.parent / picture).write_text(_curves(_rows(RESULTS / folder, _names(variants))), encoding="utf-8")


def with_tables(page: str) -> str:
    """The page with every table made anew."""
    page = TABLE.sub(_marked_table, page)
    page = DIFFERENCES.sub(lambda match: f"{_marker(match)}\n\n{_differences(*match.groups())}\n\n", page)
    return MEMORY_AGE.sub(lambda _: f"<!-- memory age -->\n\n{_memory_table()}\n\n", page)


def _marked_table(match: re.Match[str]) -> str:
    wanted = _names(match[2]) if match[2] else None
    return f"{_marker(match)}\n\n{_table(RESULTS / match[1], wanted)}\n\n"


def _marker(match: re.Match[str]) -> str:
    return match[0].split("\n", 1)[0]


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _read_study(folder: Path) -> StudySettings:
    return StudySettings.model_validate(yaml.safe_load((folder / "study.yaml").read_text(encoding="utf-8")))


def _rows(folder: Path, wanted: Sequence[str] | None) -> list[Row]:
    results = [result for file in sorted(folder.glob("*--seed*.json")) if (result := read_result(file))]
    rows = [row for row in compare_runs(_read_study(folder), results) if wanted is None or row.variant in wanted]
    missing = set(wanted or ()) - {row.variant for row in rows}
    if missing:
        raise SystemExit(f"error: {folder} has no results of {', '.join(sorted(missing))}.")
    return rows


def _table(folder: Path, wanted: Sequence[str] | None) -> str:
    summary = json.loads((folder / "study.json").read_bytes())
    summaries = {row["variant"]: row for row in summary["rows"]}
    lines = [list(COLUMNS.values()), ["---"] * len(COLUMNS)]
    for row in _rows(folder, wanted):
        of_variant = summaries.get(row.variant, {"scores": {}, "images": ""})
        if [int(seed) for seed in of_variant["scores"]] != [result.seed for result in row.results]:
            raise SystemExit(f"error: {folder}/study.json is older than the results of {row.variant}.")
        cells = row_cells(_read_study(folder), row) | {"images": of_variant["images"]}
        cells |= {"own": _mean_response(row.results, "own"), "others": _mean_response(row.results, "mean")}
        lines.append([cells[name] for name in COLUMNS])
    return _markdown(lines)


def _differences(variant: str, control: str, folders: str) -> str:
    """The difference of two variants over seeds: one line for each study."""
    lines = [["study", f"{variant} − {control} (95 %, seeds)"], ["---"] * 2]
    for folder in _names(folders):
        rows = {row.variant: row for row in _rows(RESULTS / folder, [variant, control])}
        scores = [{result.seed: result.score for result in rows[name].results} for name in (control, variant)]
        difference = paired_difference(*scores)
        lines.append([f"`{folder}`", format_interval(difference.mean, difference.low, difference.high)])
    return _markdown(lines)


def _memory_table() -> str:
    """The response by age of a stored pixel: one line for each variant, the mean over its seeds."""
    measured = json.loads((RESULTS / "memory_age.json").read_bytes())
    by_variant: dict[tuple[str, str], list[list[float]]] = {}
    for row in measured["rows"]:
        _, variant, _ = row["run"].split("--")
        by_variant.setdefault((row["study"], variant), []).append(row["responses"])
    lines = [["study", "variant", "seeds", *measured["columns"]], ["---"] * (3 + len(measured["columns"]))]
    for (study, variant), responses in by_variant.items():
        means = [f"{fmean(column):.2f}" for column in zip(*responses, strict=True)]
        lines.append([f"`{study}`", variant.replace("-", " "), str(len(responses)), *means])
    return _markdown(lines)


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _mean_response(results: Sequence[RunResult], key: str) -> str:
    responses: list[dict[str, Any]] = [result.diagnosis["cross_scene"] for result in results]
    return f"{100 * fmean(response[key] for response in responses):.1f} %"


def _curves(rows: Sequence[Row]) -> str:
    """A picture of AP over image forwards."""
    series = variant_curves(rows, "AP")
    figure = str(line_chart(series, title="", x_label="image forwards", y_label="mask AP on held-out images"))
    plot = figure[figure.index("<svg") : figure.index("<ul")]
    legend = [
        f'<path class="line {one.css_class}" d="M530 {y}h18"/><text x="554" y="{y + 4}">{one.name}</text>'
        for y, one in zip(range(30, 260, 18), (one for one in series if not one.background), strict=False)
    ]
    colors = " ".join(f".color{i} {{ --color: {color}; }}" for i, color in enumerate(COLORS))
    outer = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 700 260" width="700" height="260">'
    inner = plot.replace("<svg ", '<svg width="520" height="260" ', 1)
    return f"{outer}<style>{STYLE} {colors}</style>{inner}{''.join(legend)}</svg>\n"


if __name__ == "__main__":
    main()
