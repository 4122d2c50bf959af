"""What `import uniquery` offers: typed, and without the cost of importing torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import uniquery

ROOT = Path(__file__).parents[1]
SNIPPET = """
from pathlib import Path
from uniquery import UniqueQuerying, evaluate, load, load_config, train
import uniquery

model = load("runs/mine")
reveal_type(model)
reveal_type(model.predict("photo.jpg"))
reveal_type(model.predict([Path("a.jpg"), "b.jpg"]))
reveal_type(model.classes)
reveal_type(train(load_config("demo")))
reveal_type(uniquery.load)
reveal_type(uniquery.Instances.to_coco)
reveal_type(UniqueQuerying)
reveal_type(evaluate)
uniquery.no_such_name
load(3)
"""


def test_every_public_name_can_be_imported():
    for name in uniquery.__all__:
        assert getattr(uniquery, name) is not None
    assert set(uniquery.__all__) <= set(dir(uniquery))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = uniquery.nothing


def test_importing_does_not_import_torch():
    code = "import sys, uniquery; assert 'torch' not in sys.modules; uniquery.Images; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_mypy_sees_the_types(tmp_path):
    (tmp_path / "snippet.py").write_text(SNIPPET)
    command = [sys.executable, "-m", "mypy", str(tmp_path / "snippet.py")]
    environment = {**os.environ, "MYPYPATH": str(ROOT / "src")}
    out = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False).stdout
    revealed = [line.partition("Revealed type is ")[2].strip('"') for line in out.splitlines() if "Revealed" in line]
    assert revealed[:5] == [
        "uniquery.model.Model",
        "uniquery.structures.Instances",
        "list[uniquery.structures.Instances]",
        "tuple[str, ...]",
        "pathlib.Path",
    ], out
    assert not [text for text in revealed if text in ("Any", "object")], out
    errors = [line for line in out.splitlines() if " error: " in line]
    assert len(errors) == 2, out
    assert '"no_such_name"' in errors[0]
    assert "incompatible type" in errors[1]
