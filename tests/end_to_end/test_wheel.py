"""The package as users install it: a wheel, built from the sdist, in an environment outside the repository."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from uniquery.training.config_files import shipped_configs

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "uniquery"

pytestmark = pytest.mark.slow


def run(*command: object, folder: Path) -> str:
    """The output of a program that knows nothing of the repository."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    words = [str(word) for word in command]
    done = subprocess.run(words, check=False, cwd=folder, env=environment, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with `environment/`, `dist/` with sdist and wheel; the wheel is installed."""
    place = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "venv", place / "environment", folder=place)
    pip = (place / "environment" / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "-q")
    run(*pip, "install", "hatchling", folder=place)
    build = "import sys, hatchling.build as b; b.build_sdist(sys.argv[1])"
    run(place / "environment" / "bin" / "python", "-c", build, place / "dist", folder=ROOT)
    (sdist,) = (place / "dist").glob("*.tar.gz")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", place / "dist", sdist, folder=place)
    (wheel,) = (place / "dist").glob("*.whl")
    run(*pip, "install", "-c", ROOT / "constraints.txt", f"{wheel}[pretrained]", folder=place)
    return place


def uniquery(place: Path, *arguments: object) -> str:
    return run(place / "environment" / "bin" / "uniquery", *arguments, folder=place)


def test_the_wheel_has_every_file_of_the_package(place):
    (wheel,) = (place / "dist").glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = [path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    configs = list((ROOT / "configs").rglob("*.yaml"))
    expected = {f"uniquery/{path.relative_to(PACKAGE)}" for path in sources}
    expected |= {f"uniquery/configs/{path.relative_to(ROOT / 'configs')}" for path in configs}
    assert expected <= names
    others = {name for name in names - expected if ".dist-info/" not in name}
    assert not others
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_sdist_has_sources_tests_and_docs(place):
    (sdist,) = (place / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "mkdocs.yml", "docs/index.md", "tests/conftest.py", "configs/demo.yaml"} <= names
    assert not [name for name in names if name.startswith((".venv", "runs/", "data/", "site/"))]


def test_it_is_the_installed_package_that_runs(place):
    code = "import uniquery; print(uniquery.__file__)"
    file = run(place / "environment" / "bin" / "python", "-c", code, folder=place)
    assert Path(file.strip()).is_relative_to(place / "environment")


def test_its_lists(place):
    listed = uniquery(place, "config", "list")
    assert all(name in listed for name in shipped_configs() if not name.startswith("paper/"))
    assert "solov2-r50" in uniquery(place, "paper")
    assert "learning rate after the warm-up" in uniquery(place, "config", "explain", "optim.lr")


def test_the_quick_demo_runs(place):
    out = uniquery(place, "demo", "--quick")
    assert "Open runs/demo/report.html" in out
    page = (place / "runs" / "demo" / "report.html").read_text()
    assert "far too short to learn" in page
    assert page.count("<svg") > 1
    image = next((place / "data" / "scenes_quick" / "images" / "val").iterdir())
    assert "in 1 images" in uniquery(place, "predict", "runs/demo/plain", image, "--score", "0", "-o", "out")


def test_what_needs_an_extra_says_so(place):
    code = "import uniquery; uniquery.load('hf://someone/cells')"
    command = [place / "environment" / "bin" / "python", "-c", code]
    done = subprocess.run(
        command, check=False, cwd=place, capture_output=True, text=True, env={"PATH": os.environ["PATH"]}
    )
    assert "pip install 'uniquery[hub]'" in done.stderr
