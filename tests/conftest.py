import pytest
import torch

from helpers.small_runs import small_scenes


@pytest.fixture(scope="session", autouse=True)
def _few_threads():
    """Small tensors gain nothing from threads, and tests must not depend on how many there are."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def scenes(tmp_path_factory):
    return small_scenes(tmp_path_factory.mktemp("scenes"))
