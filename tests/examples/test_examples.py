"""The examples run and do what they say."""

import runpy
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_plug_in_your_model_learns(capsys):
    main = runpy.run_path(str(EXAMPLES / "plug_in_your_model.py"))["main"]
    sides, view_of = set(), main.__globals__["view_of"]
    main.__globals__["view_of"] = lambda *a: (sides.update(g.width for g in a[2]), view_of(*a))[1]
    history = main(steps=60)
    assert sides == {64, 96}  # some views are crops
    first, last = history[0], history[-1]
    assert last["mask"] < 0.6 * first["mask"]
    assert last["equi"] < 0.8 * first["equi"]
    assert all(value == value for line in history for value in line.values())
    assert "step" in capsys.readouterr().out
