"""Settings: all mistakes at once, with the keys that the user wrote."""

from typing import Annotated, Any, Literal

import pytest
import yaml
from pydantic import Field, ValidationError, model_validator

from uniquery.cli import main
from uniquery.errors import ConfigError
from uniquery.settings import Settings, flatten, validate_settings
from uniquery.settings_reference import explain, list_settings
from uniquery.training.config import Config, load_config
from uniquery.training.config_files import shipped_configs


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


def test_a_key_of_another_table_is_not_suggested_to_itself():
    """CondInst has mask_norm, SOLOv2 does not."""
    with pytest.raises(ConfigError, match=r"model\.mask_norm: no such key\.") as caught:
        load_config("solov2_r50", ["model.mask_norm=group"])
    assert "'mask_norm'?" not in str(caught.value)


class TestReference:
    """`uniquery config explain`: every key of a configuration, from the settings models alone."""

    def test_every_key_of_a_configuration_is_listed(self):
        settings = list(list_settings(Config))
        keys = {setting.key for setting in settings}
        for name in shipped_configs():
            for key in flatten(load_config(name).model_dump(mode="json")):
                key = key.rstrip(".0123456789") if key.startswith("model.size_ranges.") else key  # a list of lists
                is_known = any(setting.matches(key) for setting in settings)
                assert is_known or key.startswith("optim.layers."), key  # names of the user's, which have dots
        assert {"train.steps", "data.augment.*.p", "optim.layers.*.lr_factor", "model.max_detections"} <= keys

    def test_defaults_are_those_of_the_configuration(self):
        defaults = flatten(Config().model_dump(mode="json"))
        listed = {s.key: s.default for s in list_settings(Config) if not s.is_table and s.variant in ("", "condinst")}
        compared = 0
        for key, default in defaults.items():
            if key in listed and not key.startswith(("backbone.", "train.epochs")):  # set by the table above them
                assert yaml.safe_load(listed[key]) == default, key
                compared += 1
        assert compared > 50

    def test_every_setting_has_a_description(self):
        assert not [setting.key for setting in list_settings(Config) if not setting.description]

    def test_limits_and_choices(self):
        (steps,) = explain(Config, "train.steps")
        assert (steps.type, steps.default) == ("int or null, above 0", "null")
        assert [s.type for s in explain(Config, "optim.name")] == ["sgd, adam, adamw"]
        assert {s.variant for s in explain(Config, "data.augment.3.axis")} == {"flip"}
        assert len({s.variant for s in explain(Config, "model.channels")}) >= 3
        assert [s.key for s in explain(Config, "data.val")] == [
            f"data.val{key}" for key in ("", ".annotations", ".images", ".panoptic_pngs")
        ]
        assert explain(Config, "data.val.images")[0].default is None

    @pytest.mark.parametrize(
        ("key", "word"), [("train.step", "Did you mean 'train.steps'"), ("lr", "There is optim.lr"), ("zzz", "zzz'.")]
    )
    def test_unknown_keys(self, key, word):
        with pytest.raises(ConfigError, match=word):
            explain(Config, key)

    def test_the_command(self, capsys):
        assert main(["config", "explain", "data.on_unreadable"]) == 0
        assert capsys.readouterr().out == (
            "data.on_unreadable: stop, skip; default stop\n"
            "    what to do when an image cannot be read; skip: train on a random other image instead\n"
        )
        assert main(["config", "explain"]) == 0
        assert "optim.betas: [float, float]; default [0.9, 0.999]" in capsys.readouterr().out
        assert main(["config", "explain", "trian"]) == 2
        assert "Did you mean 'train'" in capsys.readouterr().err
