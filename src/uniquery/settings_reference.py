"""Every setting with its type, default and meaning, read from the settings models."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from uniquery.errors import ConfigError, did_you_mean

ANY = "*"
"""Stands for a position in a list, or for a name that the user chooses."""
_LIMITS = {Gt: ("above", "gt"), Ge: ("at least", "ge"), Lt: ("below", "lt"), Le: ("at most", "le")}
_TAGS = ("name", "op")  # the fields by which a table is chosen among others
_NAMES = {"NoneType": "null", "str": "text", "bool": "true or false", "Path": "path"}


@dataclass(frozen=True)
class Setting:
    """One key of a configuration.

    Attributes:
        key: the dotted key; `*` is a position in a list, or a name of the user's.
        variant: the name of the table that has it, if there is a choice of tables: condinst, flip.
        type: what values it takes.
        default: its value as yaml if it is not set; None if it must be set.
        description: what it is.
        is_table: whether there are keys below it.
    """

    key: str
    variant: str
    type: str
    default: str | None
    description: str
    is_table: bool

    def matches(self, key: str) -> bool:
        """Whether it is this key, or one below it; a number stands for any position."""
        own, asked = self.key.split("."), key.split(".")
        return len(asked) <= len(own) and all(a == b or b == ANY for a, b in zip(asked, own, strict=False))


def list_settings(model: type[BaseModel], prefix: str = "", variant: str = "") -> Iterator[Setting]:
    """The settings of a model and of the models inside it, in order."""
    documented = _documented_attributes(model)
    for name, field in model.model_fields.items():
        key, tables = f"{prefix}{name}", _tables(field.annotation)
        table = tables[0] if len(tables) == 1 else model if name in _TAGS else None
        sentence = field.description or documented.get(name) or (_first_line(table) if table else "")
        yield Setting(key, variant, _type_text(field), _default_text(field), sentence, bool(tables))
        inside = f"{key}." if not _is_collection(field.annotation) else f"{key}.{ANY}."
        for table in tables:
            yield from list_settings(table, inside, _tag(table) if len(tables) > 1 else variant)


def explain(model: type[BaseModel], key: str) -> list[Setting]:
    """A setting, in each table that has it, and the settings below it.

    Raises:
        ConfigError: there is no such key.
    """
    settings = list(list_settings(model))
    found = [setting for setting in settings if setting.matches(key)]
    if not found:
        keys = [setting.key for setting in settings]
        same_name = [k for k in dict.fromkeys(keys) if k.rpartition(".")[2] == key.rpartition(".")[2]]
        hint = did_you_mean(key, keys) or (f" There is {', '.join(same_name[:4])}." if same_name else "")
        raise ConfigError(f"There is no setting '{key}'.{hint}")
    return found


def _tables(annotation: Any) -> list[type[BaseModel]]:
    """The settings models in an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [table for inner in get_args(annotation) for table in _tables(inner)]


def _is_collection(annotation: Any) -> bool:
    """Whether the models of an annotation are in a list or under names of the user's."""
    if get_origin(annotation) in (types.UnionType, typing.Union, typing.Annotated):
        return any(_is_collection(inner) for inner in get_args(annotation))
    return get_origin(annotation) in (tuple, list, dict)


def _tag(table: type[BaseModel]) -> str:
    """The name by which a table is chosen among others: the default of its tag."""
    fields = [table.model_fields[tag] for tag in _TAGS if tag in table.model_fields]
    return str(fields[0].default) if fields else table.__name__


def _type_text(field: FieldInfo) -> str:
    limits = [
        f"{word} {getattr(limit, attribute):g}"
        for kind, (word, attribute) in _LIMITS.items()
        for limit in field.metadata
        if isinstance(limit, kind)
    ]
    return ", ".join([_annotation_text(field.annotation), *limits])


def _annotation_text(annotation: Any) -> str:
    """A type in words.

    >>> _annotation_text(int | None), _annotation_text(typing.Literal["a", "b"]), _annotation_text(tuple[str, ...])
    ('int or null', 'a, b', 'list of text')
    """
    origin, inner = get_origin(annotation), get_args(annotation)
    if _tables(annotation):
        return "list of tables" if _is_collection(annotation) and origin is not dict else "table"
    if origin is typing.Literal:
        return ", ".join(map(str, inner))
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_annotation_text(one) for one in inner)
    if origin is typing.Annotated:
        return _annotation_text(inner[0])
    if origin is tuple:
        texts = [_annotation_text(one) for one in inner if one is not Ellipsis]
        return f"list of {texts[0]}" if Ellipsis in inner else f"[{', '.join(texts)}]"
    name = getattr(annotation, "__name__", str(annotation))
    return _NAMES.get(name, name)


def _default_text(field: FieldInfo) -> str | None:
    if field.is_required():
        return None
    return yaml.safe_dump(
        _plain(field.get_default(call_default_factory=True)), default_flow_style=True, width=999
    ).split("\n")[0]


def _plain(value: Any) -> Any:
    """The value as yaml can hold it."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return str(value) if isinstance(value, Path) else value


def _first_line(table: type[BaseModel]) -> str:
    return (inspect.getdoc(table) or "").partition("\n")[0]


def _documented_attributes(model: type[BaseModel]) -> dict[str, str]:
    """Name → text of the section 'Attributes' of a docstring."""
    _, _, section = (inspect.getdoc(model) or "").partition("Attributes:\n")
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section, flags=re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}
