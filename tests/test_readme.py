"""What the README says runs."""

import re
import shlex
from pathlib import Path

import pytest

from uniquery.cli import build_parser

README = (Path(__file__).parents[1] / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[str]:
    inline = re.findall(r"`(uniquery [^`]*)`", README)
    return [line for block in blocks("bash") for line in block.splitlines() if line.startswith("uniquery ")] + inline


def test_there_is_something_to_check():
    assert len(commands()) >= 8
    assert blocks("python")


@pytest.mark.parametrize("command", commands())
def test_commands_parse(command):
    build_parser().parse_args(shlex.split(command)[1:])


@pytest.mark.parametrize("code", blocks("python"))
def test_python_runs(code, capsys):
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out
