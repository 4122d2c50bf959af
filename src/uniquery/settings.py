"""The base of every settings model, and validation errors as sentences."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from uniquery.errors import ConfigError, did_you_mean


class Settings(BaseModel):
    """Base of all settings: unknown keys are errors, and values do not change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def by_name(value: Any) -> Any:
    """Lets a plain name stand for a table of settings: `model: condinst` means `model: {name: condinst}`."""
    return {"name": value} if isinstance(value, str) else value


S = TypeVar("S", bound=BaseModel)


def validate_settings(model: type[S], content: Any, *, where: str) -> S:
    """A settings model from plain tables.

    Args:
        model: the settings class.
        content: tables, lists and values, as yaml or json gives them.
        where: the source of the content, for the error message.

    Raises:
        ConfigError: everything that is wrong, one line each.

    >>> class Size(Settings):
    ...     width: int
    >>> validate_settings(Size, {"widht": 3, "width": 2}, where="size.yaml")
    Traceback (most recent call last):
    uniquery.errors.ConfigError: size.yaml has 1 mistake:
      widht: no such key. Did you mean 'width'?
    """
    try:
        return model.model_validate(content)
    except ValidationError as error:
        lines = [f"  {_sentence(dict(e), model, content)}" for e in error.errors()]
        raise ConfigError("\n".join([f"{where} has {len(lines)} mistake{'s' * (len(lines) > 1)}:", *lines])) from None


def _sentence(error: dict[str, Any], model: type[BaseModel], content: Any) -> str:
    keys = _keys(error["loc"], error["type"], content)
    prefix = f"{'.'.join(keys)}: " if keys else ""
    if error["type"] == "extra_forbidden":
        return f"{prefix}no such key.{did_you_mean(keys[-1], _all_keys(model) - {keys[-1]})}"
    given = "" if isinstance(error["input"], dict | list | BaseModel) else f" (given: {error['input']!r})"
    message = error["msg"].removeprefix("Value error, ")
    hint = ""
    if error["type"] == "union_tag_not_found":
        message = f"the key {error['ctx']['discriminator']} is missing"
    if error["type"] in ("literal_error", "union_tag_invalid"):
        choices = str(error["ctx"].get("expected") or error["ctx"].get("expected_tags"))
        value = error["ctx"].get("tag", error["input"])
        if error["type"] == "union_tag_invalid":
            message = f"'{value}' is not one of {choices}"
        hint = did_you_mean(str(value), [c.strip(" '") for c in choices.replace(" or ", ",").split(",")])
    sentence = f"{prefix}{message}{given}"
    return sentence if sentence.endswith("?") else f"{sentence}.{hint}"


def _keys(location: tuple[int | str, ...], error_type: str, content: Any) -> list[str]:
    """The keys of an error's location; pydantic also puts the tags of unions there, which are not keys."""
    keys = []
    for index, item in enumerate(location):
        is_missing = error_type == "missing" and index == len(location) - 1
        if isinstance(content, dict) and (item in content or is_missing):
            content = content.get(item)
        elif isinstance(content, list | tuple) and isinstance(item, int):
            content = content[item] if item < len(content) else None
        else:
            continue
        keys.append(str(item))
    return keys


def _all_keys(model: type[BaseModel]) -> set[str]:
    """The names of all fields of a model and of the models inside it."""
    models: set[type[BaseModel]] = set()

    def walk(annotation: Any) -> None:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel) and annotation not in models:
            models.add(annotation)
            for field in annotation.model_fields.values():
                walk(field.annotation)
        for inner in get_args(annotation):
            walk(inner)

    walk(model)
    return {key for each in models for key in each.model_fields}


def flatten(content: Any, prefix: str = "") -> dict[str, Any]:
    """Nested tables as one table with dotted keys; lists are kept whole unless they hold tables or lists.

    >>> flatten({"a": {"b": 1, "c": [1, 2]}, "d": [{"e": None}], "f": {}})
    {'a.b': 1, 'a.c': [1, 2], 'd.0.e': None, 'f': {}}
    """
    items: Iterable[tuple[Any, Any]]
    if isinstance(content, dict) and content:
        items = content.items()
    elif isinstance(content, list) and any(isinstance(value, dict | list) for value in content):
        items = enumerate(content)
    else:
        return {prefix: content} if prefix else {}
    flat: dict[str, Any] = {}
    for key, value in items:
        flat |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return flat
