"""What mkdocs does when it builds the site, besides its own: the page of all settings, links into the repository.

The settings models are the one source of that page.
"""

import re
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from uniquery.settings_reference import Setting, list_settings
from uniquery.training.config import Config

PAGE = "settings.md"
INTRO = """# Every setting

A configuration is a yaml file with these keys, or a shipped one (`uniquery config list`) with changes:
`--set train.steps=1000`. `uniquery config explain train` prints a part of this page, `uniquery config show NAME` a
configuration with all defaults in place. A `*` stands for a position in a list, or for a name that you choose.
"""


def on_files(files: Any, config: Any) -> Any:
    """Adds the page to those of the folder."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, PAGE, content=settings_page()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to files of the repository lead nowhere on the site: only their text stays."""
    return re.sub(r"\[([^\]]+)\]\(\.\./[^)]*\)", r"\1", markdown)


def settings_page() -> str:
    """The page as Markdown: a section for each table of settings, and one for each choice of a table."""
    return "\n".join([INTRO, *_lines(list(list_settings(Config)))]) + "\n"


def _lines(settings: list[Setting]) -> Iterator[str]:
    single = [setting for setting in settings if "." not in setting.key and not setting.is_table]
    yield from ("## The run", "", *_table(single))
    tables = [setting for setting in settings if "." not in setting.key and setting.is_table]
    for table in tables:
        inside = [setting for setting in settings if setting.key.startswith(f"{table.key}.")]
        yield from (f"## {table.key}", "", f"{_sentence(table.description)}", "")
        for variant, rows in groupby(inside, key=lambda setting: setting.variant):
            title = [f"### {table.key}: {variant}", ""] if variant else []
            yield from (*title, *_table(list(rows)))


def _table(settings: list[Setting]) -> list[str]:
    rows = [
        f"| `{setting.key}` | {_cell(setting.type)} | {_default(setting)} | {_cell(setting.description)} |"
        for setting in settings
    ]
    return ["| key | values | default | meaning |", "| --- | --- | --- | --- |", *rows, ""]


def _default(setting: Setting) -> str:
    if setting.default is None:
        return "must be set"
    return "" if setting.is_table and setting.default != "null" else f"`{_cell(setting.default)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."
