"""The Dockerfiles copy what exists and install what the project has; there is no Docker here to build them with."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [ROOT / "Dockerfile", ROOT / "Dockerfile.gpu"]


def instructions(file: Path) -> list[tuple[str, str]]:
    """Name and arguments of each instruction, without comments and line breaks."""
    lines = [line for line in file.read_text().splitlines() if line.strip() and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(name, arguments) for name, _, arguments in (line.partition(" ") for line in joined)]


def copied(file: Path) -> set[str]:
    return {source for name, arguments in instructions(file) if name == "COPY" for source in arguments.split()[:-1]}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_dockerfile_fits_the_project(file):
    known = {"FROM", "WORKDIR", "COPY", "RUN", "USER", "ENTRYPOINT", "CMD"}
    names = [name for name, _ in instructions(file)]
    assert set(names) <= known
    assert names[0] == "FROM"
    assert all((ROOT / source).exists() for source in copied(file))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {project["project"]["readme"], *project["project"]["license-files"], *included["force-include"], "src"}
    assert needed | {"pyproject.toml", "constraints.txt"} == copied(file)
    extras = re.search(r"\.\[([\w,]+)\]", file.read_text())
    assert set(extras[1].split(",")) <= set(project["project"]["optional-dependencies"])
    assert names.index("USER") < names.index("ENTRYPOINT")  # not as root


def test_nothing_that_is_copied_is_ignored():
    ignored = set((ROOT / ".dockerignore").read_text().split())
    assert not ignored & copied(FILES[0])
