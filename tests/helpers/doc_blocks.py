"""The code blocks of README.md and docs/.

A block that no test runs has a comment in the line above it, with the reason; so has one of which some commands are
not run, with the beginnings of these:

    <!-- not run: needs a GPU -->
    <!-- not run (pip install; uniquery demo): tests install and run the wheel -->
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = {
    str(path.relative_to(ROOT)): path.read_text() for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
}
SHELL = ("bash", "sh")
_BLOCK = re.compile(
    r"^(?: *<!-- not run(?: \((?P<parts>[^)]*)\))?:(?P<reason>.*?)-->\n)? *```(?P<kind>\w*)\n(?P<code>.*?)^ *```$",
    re.DOTALL | re.MULTILINE,
)


def blocks(name: str, *kinds: str) -> list[re.Match[str]]:
    """The fenced blocks of a file, with the groups parts, reason, kind and code."""
    return [block for block in _BLOCK.finditer(FILES[name]) if not kinds or block["kind"] in kinds]


def shell_lines(block: re.Match[str]) -> list[str]:
    """Its commands, one a line, without comments."""
    lines = [line.strip() for line in block["code"].replace("\\\n", " ").splitlines()]
    return [part.strip() for line in lines if not line.startswith("#") for part in line.split("&&") if part.strip()]


def left_out(block: re.Match[str]) -> tuple[str, ...]:
    """The beginnings of the commands that its comment names; of all of them if it names none."""
    if block["reason"] is None:
        return ()
    return tuple(part.strip() for part in (block["parts"] or "").split(";"))


def lines_to_run(name: str) -> list[str]:
    """The commands of a file's shell blocks that a test has to run."""
    found = []
    for block in blocks(name, *SHELL):
        skipped = left_out(block)
        found += [line for line in shell_lines(block) if not line.startswith(skipped)]
    return found
