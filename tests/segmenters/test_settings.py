import pytest
from pydantic import ValidationError

from uniquery.segmenters import DEFAULT_SEGMENTER, SEGMENTERS, read_segmenter_config
from uniquery.segmenters.settings import SegmenterSettings

MASK_THRESHOLDS = {"sparseinst": 0.45}  # of the others 0.5
ALL = {name: read_segmenter_config(f'{{"name": "{name}"}}') for name in SEGMENTERS}


@pytest.mark.parametrize("name", sorted(ALL))
class TestEverySegmenter:
    def test_has_the_common_settings(self, name):
        settings = ALL[name]
        assert isinstance(settings, SegmenterSettings)
        assert (settings.name, settings.max_detections) == (name, 100)
        assert settings.mask_threshold == MASK_THRESHOLDS.get(name, 0.5)
        for wrong in ({"max_detections": 0}, {"mask_threshold": 0.0}, {"mask_threshold": 1.0}, {"unknown": 1}):
            with pytest.raises(ValidationError, match=next(iter(wrong))):
                type(settings)(**wrong)

    def test_names_existing_settings(self, name):
        """What it says about limits and memory must be keys that a user can set."""
        settings = ALL[name]
        key = settings.memory_advice.removeprefix("a smaller model.")
        assert getattr(settings, key) > 1
        if settings.instance_limit is not None:
            limited, limit = settings.instance_limit
            assert getattr(settings, limited.removeprefix("model.")) == limit


def test_limits_of_the_instances():
    limits = {name: settings.instance_limit for name, settings in ALL.items()}
    assert limits == {
        "condinst": None,
        "solov2": None,
        "sotr": None,
        "mask2former": ("model.queries", 100),
        "sparseinst": ("model.queries", 100),
        "solq": ("model.queries", 300),
    }


def test_the_default_is_in_the_table():
    assert type(DEFAULT_SEGMENTER) is type(ALL[DEFAULT_SEGMENTER.name])


def test_the_base_is_no_segmenter():
    with pytest.raises(TypeError, match="abstract"):
        SegmenterSettings(name="condinst")
