"""The ring buffer: order, overflow, state; and what enters it."""

import pytest
import torch

from uniquery.querying.memory import InstancePixels, PixelMemory


def rows(*ids, width=3):
    column = torch.tensor(ids)
    return InstancePixels(
        column[:, None].float().expand(-1, width), column[:, None].expand(-1, 2).float(), column, column, column > 0
    )


def test_ring_keeps_the_newest():
    memory = PixelMemory(capacity=4)
    assert memory.read() is None
    assert len(memory) == 0
    kept = []
    for start in range(0, 21, 3):
        memory.push(rows(start, start + 1, start + 2))
        kept = [*kept, start, start + 1, start + 2][-4:]
        assert sorted(memory.read().image_ids.tolist()) == kept
        assert len(memory) == len(kept)
        assert torch.equal(memory.read().embeddings[:, 0].long(), memory.read().image_ids)


@pytest.mark.parametrize("before", [0, 1, 4])
def test_overflow_in_one_push(before):
    memory = PixelMemory(capacity=4)
    for i in range(before):
        memory.push(rows(100 + i))
    memory.push(rows(*range(10)))
    assert sorted(memory.read().image_ids.tolist()) == [6, 7, 8, 9]


@pytest.mark.parametrize("capacity", [0, 4, 100])
def test_newest_are_the_pixels_of_the_last_push(capacity):
    memory = PixelMemory(capacity)
    assert memory.newest() is None
    for ids in ((1, 2), (3,), (4, 5, 6)):
        memory.push(rows(*ids))
        assert sorted(memory.newest().image_ids.tolist()) == list(ids)


def test_capacity_zero_is_the_last_push():
    memory = PixelMemory(capacity=0)
    memory.push(rows(1, 2))
    memory.push(rows(3))
    assert memory.read().image_ids.tolist() == [3]


def test_reading_does_not_write_and_keeps_no_graph():
    memory = PixelMemory(capacity=4)
    pixels = rows(1, 2)
    hot = InstancePixels(
        pixels.embeddings.clone().requires_grad_() * 2,
        pixels.locations,
        pixels.image_ids,
        pixels.labels,
        pixels.is_thing,
    )
    memory.push(hot)
    assert not memory.read().embeddings.requires_grad
    before = memory.state_dict()
    memory.read()
    after = memory.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before)


@pytest.mark.parametrize("capacity", [0, 4, 100])
def test_a_restored_memory_goes_on_the_same(capacity):
    first = PixelMemory(capacity)
    for i in range(5):
        first.push(rows(i, i + 50, i + 100))
    second = PixelMemory(capacity)
    second.load_state_dict({k: v.clone() for k, v in first.state_dict().items()})
    for i in range(7, 12):
        for memory in (first, second):
            memory.push(rows(i, i + 1))
        assert torch.equal(first.read().image_ids, second.read().image_ids)
        assert torch.equal(first.read().embeddings, second.read().embeddings)
        assert first.mean_age() == second.mean_age()


def test_bfloat16_storage_age_and_clear():
    memory = PixelMemory(capacity=4, dtype="bfloat16")
    memory.push(rows(1, 2))
    memory.push(rows(3, 4))
    assert memory.read().embeddings.dtype == torch.bfloat16
    assert memory.mean_age() == 0.5
    memory.clear()
    assert len(memory) == 0


def test_bad_settings():
    with pytest.raises(ValueError, match="negative"):
        PixelMemory(-1)
    with pytest.raises(ValueError, match="'float16'"):
        PixelMemory(4, "float16")


@pytest.mark.parametrize("capacity", [2, 8, 0])
def test_a_state_of_another_capacity_does_not_fit(capacity):
    memory, other = PixelMemory(4), PixelMemory(capacity)
    memory.push(rows(1, 2, 3))
    memory.push(rows(4, 5))
    other.push(rows(9))
    with pytest.raises(ValueError, match=f"of 4 pixels, this one of {capacity}"):
        other.load_state_dict(memory.state_dict())
    assert len(other) == 1  # as it was


def test_which_pixels_are_a_querys_negatives():
    memory = PixelMemory(4)
    memory.push(rows(1, 2, 1))
    assert memory.read().of_other_images(torch.tensor([1, 3])).tolist() == [[False, True, False], [True] * 3]
