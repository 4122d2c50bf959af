"""Queries, thresholds and views work with every segmenter, by its interface alone; and with panoptic data."""

from pathlib import Path

import pytest

from helpers.panoptic_files import write_panoptic
from helpers.small_segmenters import SMALL, small
from uniquery.backbones import BackboneConfig
from uniquery.data.augment import TestSize
from uniquery.explore.equivariance_view import Choice, compare_views
from uniquery.explore.exploration import Exploration
from uniquery.explore.query_view import QueryView
from uniquery.explore.runs import ExploredRun
from uniquery.model import Model
from uniquery.weights.model_file import ModelInfo

from .conftest import serve, work


@pytest.fixture
def data(scenes):
    return serve([], (scenes.annotations("val"), scenes.images("val"))).exploration.data


@pytest.mark.parametrize("name", SMALL)
def test_views(name, data):
    backbone = BackboneConfig(name="tiny", weights="random")
    info = ModelInfo(SMALL[name], backbone, tuple(data.categories), TestSize(short=64, longest=96))
    run = ExploredRun(Path("nowhere"), name)
    run._model = Model(small(name).eval(), info)  # kept, as there is no file
    exploration = Exploration(data, [run])
    while exploration.prepare(run):
        pass
    assert sorted(run.predictions) == sorted(run.analysis) == sorted(data.image_ids.tolist())
    view = QueryView(exploration.maps[0])
    truth = view.of_truth(0, 0)
    assert truth["searched"] == 3
    assert 0 <= truth["numbers"]["others"]["mean"] <= 1
    assert view.of_mask(0, data.instances(0)[0])["numbers"]["own"]["pixels"] == truth["numbers"]["own"]["pixels"]
    same = compare_views(run, data, 0, Choice())
    assert same["feature_error"] == pytest.approx(0, abs=1e-6)
    assert compare_views(run, data, 0, Choice(flip=True, angle=15.0))["feature_error"] > 0


def test_panoptic_data(tmp_path):
    served = serve([], write_panoptic(tmp_path))
    start = served.json("api/start")
    assert start["panoptic"]
    image_id = start["images"]["id"][0]
    assert len(served.json(f"api/masks?images={image_id}")[str(image_id)]["truth"]) == start["images"]["instances"][0]
    work(served.exploration)
