import ctypes
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from helpers.coco_files import assert_one_sentence
from helpers.processes import means_and_gradients, run_in_processes, whole_batch
from uniquery.errors import ConfigError
from uniquery.parallel import all_gather_rows, all_reduce_mean, choose_device, loss_normalizer


def test_alone_everything_is_its_own_mean():
    value = torch.tensor([1.0, 2.0], requires_grad=True)
    mean = all_reduce_mean(value)
    assert mean.tolist() == [1, 2]
    assert not mean.requires_grad
    mean += 1
    assert value.tolist() == [1, 2]


def test_alone_rows_are_gathered_from_oneself():
    rows = torch.rand(3, 2)
    assert torch.equal(all_gather_rows([rows])[0], rows)


def test_a_normalizer_is_at_least_one():
    assert loss_normalizer(torch.tensor(0.0)).item() == 1
    assert loss_normalizer(torch.tensor(7.0)).item() == 7


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_in_processes(means_and_gradients, 2, tmp_path_factory.mktemp("processes"))


@pytest.mark.distributed
def test_the_mean_is_the_same_in_both_processes(results):
    for rank, result in enumerate(results):
        assert result["mean"].tolist() == [2, 10]
        assert not result["requires_grad"]
        assert result["own"].tolist() == [1 + 2 * rank, 10]


@pytest.mark.distributed
def test_two_halves_learn_like_the_whole(results):
    """One half holds four instances and the other five, so their own normalizers would not do."""
    whole = whole_batch()
    for name, loss in whole["losses"].items():
        torch.testing.assert_close((results[0]["losses"][name] + results[1]["losses"][name]) / 2, loss)
    for name, gradient in whole["gradients"].items():
        for result in results:
            torch.testing.assert_close(result["gradients"][name], gradient, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.distributed
def test_what_is_taken_from_the_first(results):
    assert [result["taken"].tolist() for result in results] == [[0, 0], [0, 0]]


@pytest.mark.distributed
def test_rows_are_gathered_in_order_whatever_their_number(results):
    for result in results:
        rows, flags = result["gathered"]
        assert rows.tolist() == [[100, 101, 102], [103, 104, 105]]
        assert flags.tolist() == [True, True]
        assert flags.dtype == torch.bool


@pytest.mark.distributed
def test_every_memory_holds_the_scenes_of_all(results):
    whole = whole_batch()["stored"]
    assert len(whole.unique()) > 2
    for result in results:
        assert torch.equal(result["stored"], whole)


@pytest.mark.distributed
def test_without_gather_a_memory_holds_the_scenes_of_its_own_process(results):
    """The first half of the batch are images 0 and 1, the second 2 and 3; image 2 has no instance."""
    assert [result["stored_without_gather"].tolist() for result in results] == [[0, 1], [3]]


def test_choosing_a_device(monkeypatch):
    assert choose_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == torch.device("cpu")
    for name in ("gpu", "cuda:99", ""):
        with pytest.raises(ConfigError) as caught:
            choose_device(name)
        assert_one_sentence(caught.value)
        assert f"The device '{name}' cannot be used: " in str(caught.value)


def test_cuda_without_an_index_is_the_gpu_of_the_local_rank(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", lambda *_, device: SimpleNamespace(device=torch.device(device)))
    for name in ("cuda", "auto"):
        assert choose_device(name) == torch.device("cuda:3")
    assert choose_device("cuda:1") == torch.device("cuda:1")


_ALLOCATIONS = """
import resource, torch
from uniquery.parallel import keep_freed_memory
keep_freed_memory(torch.device("{device}"))
for step in range(30):
    if step == 20:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallopt"), reason="for glibc's allocator only"
)
class TestKeepFreedMemory:
    PAGES = 10 * 2**26 // os.sysconf("SC_PAGE_SIZE") if sys.platform == "linux" else 0

    def page_faults(self, device, **variables):
        code = _ALLOCATIONS.format(device=device)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment | variables, capture_output=True, text=True, check=True
        )
        return int(done.stdout)

    def test_a_tensor_reuses_the_memory_of_the_one_before(self):
        assert self.page_faults("cpu") < self.PAGES / 10

    def test_without_it_the_system_clears_every_page_again(self):
        assert self.page_faults("meta") > self.PAGES / 2

    def test_environment_variables_are_obeyed(self):
        assert self.page_faults("cpu", MALLOC_MMAP_THRESHOLD_="1000000") > self.PAGES / 2
