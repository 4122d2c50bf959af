"""Configuration files as plain tables: shipped names, `base:` inheritance, `a.b=c` overrides."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from uniquery.errors import ConfigError, did_you_mean

STUDIES, PAPER = "studies", "paper"  # subfolders of the configurations

Tables = dict[str, Any]
Override = str | tuple[str, Any]  # "a.b=c" with a yaml value, or the key and the value

_EITHER_OR = {"train.steps": "epochs", "train.epochs": "steps"}  # setting one of these removes the other
_NAME_KEYS = {"model": "name", "backbone": "name", "querying": "preset"}  # the key that the others depend on


def config_folder() -> Path:
    """The folder of the shipped configurations, inside the package or beside its sources."""
    inside = Path(__file__).parents[1] / "configs"
    return inside if inside.is_dir() else Path(__file__).parents[3] / "configs"


def shipped_configs() -> dict[str, Path]:
    """Name → file of the shipped configurations; studies are not among them."""
    files = {str(p.relative_to(config_folder()).with_suffix("")): p for p in sorted(config_folder().rglob("*.yaml"))}
    return {name: path for name, path in files.items() if not name.startswith(f"{STUDIES}/")}


def find_config(source: str | Path) -> Path:
    """The file of a configuration given by path or by shipped name.

    Raises:
        ConfigError: there is no such configuration.
    """
    file = _find(source, Path())
    if file is None:
        raise ConfigError(f"No configuration '{source}': it is neither a file nor a shipped name.{_hint(str(source))}")
    return file


def _find(source: str | Path, folder: Path) -> Path | None:
    return folder / source if (folder / source).is_file() else shipped_configs().get(str(source))


def _hint(name: str) -> str:
    return did_you_mean(name, shipped_configs()) or " 'uniquery config list' shows the shipped names."


def read_yaml(path: Path) -> Tables:
    """The tables of a yaml file.

    Raises:
        ConfigError: the file cannot be read, or holds no table.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid yaml: {' '.join(str(error).split())}.") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold keys and values.")
    return content


def read_with_bases(path: Path, children: tuple[Path, ...] = ()) -> Tables:
    """The tables of a yaml file, merged into those of the file that its key `base` names.

    Args:
        path: the file.
        children: the files whose bases led to this one.

    Raises:
        ConfigError: a file cannot be read, a base does not exist, or a file is its own base.
    """
    content = read_yaml(path)
    if "base" not in content:
        return content
    base = content.pop("base")
    if not isinstance(base, str):
        raise ConfigError(f"{path}: 'base' must be a shipped name or a path (given: {base!r}).")
    file = _find(base, path.parent)
    if file is None:
        raise ConfigError(f"{path}: base '{base}' is neither a file in {path.parent} nor a shipped name.{_hint(base)}")
    chain = (*children, path)
    if file.resolve() in [p.resolve() for p in chain]:
        raise ConfigError(f"{path}: base '{base}' leads back to itself: {' → '.join(map(str, (*chain, file)))}.")
    return merge(read_with_bases(file, chain), content)


def merge(base: Tables, changes: Mapping[str, Any], path: str = "") -> Tables:
    """Tables with changes: tables merge key by key, everything else is replaced.

    A `model` or `backbone` with another name, or `querying` with another preset, replaces the whole table.

    >>> merge({"model": {"name": "a", "x": 1}, "seed": 0}, {"model": "b"})
    {'model': 'b', 'seed': 0}
    """
    merged = dict(base)
    for key, value in changes.items():
        before, place = base.get(key), f"{path}{key}"
        if place in _NAME_KEYS:
            before = _same_name(before, value, _NAME_KEYS[place], _default_name(place))
        if isinstance(before, dict) and isinstance(value, dict):
            merged[key] = merge(before, value, f"{place}.")
        else:
            merged[key] = value
        other = _EITHER_OR.get(place)
        if other is not None and value is not None and other not in changes:
            merged.pop(other, None)
    return merged


def _same_name(before: Any, value: Any, name_key: str, default: str | None) -> Any:
    """The value before, as a table, if it has the name of the new value or none; else None."""
    before = {name_key: before} if isinstance(before, str) else before
    if not isinstance(before, dict) or not isinstance(value, dict):
        return None
    name = before.get(name_key, default)
    return before if name in (None, value.get(name_key, name)) else None


def _default_name(table: str) -> str | None:
    from uniquery.segmenters import DEFAULT_SEGMENTER  # imports torch, which listing configurations does not need

    return {"model": DEFAULT_SEGMENTER.name, "querying": "none"}.get(table)


def parse_override(text: str) -> tuple[str, Any]:
    """Key and value of `a.b=c`; the value is yaml.

    >>> parse_override("train.steps=100")
    ('train.steps', 100)
    """
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise ConfigError(f"--set {text}: write key=value, for example --set train.steps=100.")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError:
        return key, value


def apply_override(content: Tables, override: Override) -> None:
    """Sets one value in tables.

    Raises:
        ConfigError: the key leads nowhere.
    """
    key, value = parse_override(override) if isinstance(override, str) else override
    if key == "base":
        raise ConfigError("--set base: overrides come after the base; write 'base' into a yaml file.")
    *parents, last = key.split(".")
    node: Any = content
    for parent in parents:
        node = _child(node, parent)
    if isinstance(node, list) and last.isdigit() and int(last) < len(node):
        node[int(last)] = value
    elif isinstance(node, dict):
        node[last] = value
    else:
        raise ConfigError(f"--set {key}: there is no such key.")
    if key in _EITHER_OR and value is not None:
        node.pop(_EITHER_OR[key], None)


def _child(node: Any, key: str) -> Any:
    if isinstance(node, list) and key.isdigit() and int(key) < len(node):
        return node[int(key)]
    if isinstance(node, dict):
        if isinstance(node.get(key), str):  # `backbone: resnet50` becomes a table when a key below it is set
            node[key] = {_NAME_KEYS.get(key, "name"): node[key]}
        if node.get(key) is None:
            node[key] = {}
        return node[key]
    return None
