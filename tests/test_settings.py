"""Settings: all mistakes at once, with the keys that the user wrote."""

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, ValidationError, model_validator

from uniquery.errors import ConfigError
from uniquery.settings import Settings, flatten, validate_settings


class Circle(Settings):
    shape: Literal["circle"] = "circle"
    radius: float = Field(gt=0)


class Square(Settings):
    shape: Literal["square"] = "square"
    side: float = 1.0

    @model_validator(mode="after")
    def _not_unlucky(self) -> "Square":
        if self.side == 13:
            raise ValueError("13 is not a side")
        return self


Shape = Annotated[Circle | Square, Field(discriminator="shape")]


class Drawing(Settings):
    name: str = "drawing"
    first: Shape = Square()
    shapes: tuple[Shape, ...] = ()
    limit: int = 3

    @model_validator(mode="after")
    def _not_too_many(self) -> "Drawing":
        if len(self.shapes) > self.limit:
            raise ValueError("more shapes than limit")
        return self


def mistakes(content: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        validate_settings(Drawing, content, where="here.yaml")
    first, *lines = str(caught.value).split("\n")
    assert first == f"here.yaml has {len(lines)} mistake{'s' if len(lines) > 1 else ''}:"
    assert all(line.startswith("  ") for line in lines)
    return [line.strip() for line in lines]


def test_valid_content_gives_the_model():
    drawing = validate_settings(Drawing, {"first": {"shape": "circle", "radius": 2}}, where="here.yaml")
    assert drawing == Drawing(first=Circle(radius=2))
    with pytest.raises(ValidationError, match="frozen"):
        drawing.limit = 4


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"nmae": "x"}, "nmae: no such key. Did you mean 'name'?"),
        ({"first": {"shape": "circle", "radius": 1, "rdius": 2}}, "first.rdius: no such key. Did you mean 'radius'?"),
        ({"first": {"shape": "circle"}}, "first.radius: Field required."),
        ({"first": {"shape": "square", "side": 13}}, "first: 13 is not a side."),
        ({"first": {"shape": "sqare"}}, "first: 'sqare' is not one of 'circle', 'square'. Did you mean 'square'?"),
        ({"shapes": [{"side": 2}]}, "shapes.0: the key 'shape' is missing."),
        ({"shapes": [{"shape": "square"}, {"shape": "circle", "radius": "x"}]}, "shapes.1.radius: Input should be a "),
        ({"limit": "many"}, "limit: Input should be a valid integer, unable to parse string as an integer (given: "),
        ({"limit": 0, "shapes": [{"shape": "square"}]}, "more shapes than limit."),
        ([1], "Input should be a valid dictionary or instance of Drawing."),
        ("text", "Input should be a valid dictionary or instance of Drawing (given: 'text')."),
    ],
)
def test_one_mistake_is_one_sentence_with_its_key(content, sentence):
    (line,) = mistakes(content)
    assert line.startswith(sentence)


def test_all_mistakes_are_reported():
    lines = mistakes({"limit": None, "x": 1, "shapes": [{"shape": "circle", "radius": -1}]})
    assert [line.split(":")[0] for line in lines] == ["shapes.0.radius", "limit", "x"]


@pytest.mark.parametrize("content", [{}, [], None, 3])
def test_nothing_to_flatten(content):
    assert flatten(content) == {}


def test_flatten_expands_lists_of_tables_only():
    content = {"a": [[1, 2], {"b": []}], "c": [1, None], 5: {"d": {}}}
    assert flatten(content) == {"a.0": [1, 2], "a.1.b": [], "c": [1, None], "5.d": {}}
