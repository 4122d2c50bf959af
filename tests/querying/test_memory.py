"""The ring buffer: order, overflow, state; and what enters it."""

import pytest
import torch

from uniquery.querying.memory import PixelMemory, StoredPixels
from uniquery.querying.sampling import dense, instance_balanced, owned_cells, sample_pixels, sparse
from uniquery.structures import PixelMap, Targets


def rows(*ids, width=3):
    column = torch.tensor(ids)
    return StoredPixels(
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


def test_capacity_zero_is_the_last_push():
    memory = PixelMemory(capacity=0)
    memory.push(rows(1, 2))
    memory.push(rows(3))
    assert memory.read().image_ids.tolist() == [3]


def test_reading_does_not_write_and_keeps_no_graph():
    memory = PixelMemory(capacity=4)
    pixels = rows(1, 2)
    hot = StoredPixels(
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
    with pytest.raises(ValueError, match="at least 1"):
        instance_balanced(0)
    with pytest.raises(ValueError, match="at least 1"):
        sparse(0)
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


def scene(image_id=7):
    masks = torch.zeros(3, 32, 32, dtype=torch.bool)
    masks[0, :16, :16] = True  # four cells of stride 8
    masks[1, 17:20, 25:27] = True  # owns no cell's center
    masks[2, 8:32, 16:32] = True
    return Targets(torch.tensor([4, 5, 6]), torch.zeros(3, 4), masks, image_id)


def test_owned_cells_and_the_small_instance():
    owned = owned_cells(scene().masks, 8)
    assert owned.sum(1).tolist() == [4, 1, 6]
    assert owned[1].nonzero().flatten().tolist() == [2 * 4 + 3]


@pytest.mark.parametrize(
    ("sampler", "counts"), [(instance_balanced(3), [3, 1, 3]), (dense(), [4, 1, 6]), (instance_balanced(50), [4, 1, 6])]
)
def test_samplers_count(sampler, counts):
    owned = owned_cells(scene().masks, 8)
    instance, cell = sampler(owned, torch.Generator().manual_seed(0))
    assert torch.bincount(instance, minlength=3).tolist() == counts
    assert owned[instance, cell].all()
    assert len(set(zip(instance.tolist(), cell.tolist(), strict=True))) == len(cell)


def test_sparse_takes_n_of_the_image_and_seeds_repeat():
    owned = owned_cells(scene().masks, 8)
    draws = [sparse(5)(owned, torch.Generator().manual_seed(s)) for s in (0, 0, 1)]
    assert len(draws[0][0]) == 5
    assert torch.equal(draws[0][1], draws[1][1])
    assert not torch.equal(draws[0][1], draws[2][1])
    assert len(sparse(1000)(owned, None)[0]) == 11


def test_sampling_is_uniform_over_an_instance():
    owned = owned_cells(scene().masks, 8)
    generator = torch.Generator().manual_seed(0)
    hits = torch.zeros(16)
    for _ in range(600):
        instance, cell = instance_balanced(2)(owned, generator)
        hits[cell[instance == 0]] += 1
    assert (hits[owned[0]] - 300).abs().max() < 60


def test_sample_pixels_carries_everything():
    embeddings = torch.randn(2, 5, 4, 4, requires_grad=True)
    empty = Targets(torch.zeros(0, dtype=torch.int64), torch.zeros(0, 4), torch.zeros(0, 32, 32, dtype=torch.bool), 9)
    stored = sample_pixels(PixelMap(embeddings, 8), [scene(), empty], dense())
    assert len(stored) == 11
    assert not stored.embeddings.requires_grad
    assert set(stored.image_ids.tolist()) == {7}
    assert set(stored.labels.tolist()) == {4, 5, 6}
    assert stored.is_thing.all()
    x, y = (stored.locations / 8).long().T
    torch.testing.assert_close(stored.embeddings, embeddings.detach()[0, :, y, x].T)


def test_a_map_of_another_size_than_the_masks():
    with pytest.raises(ValueError, match=r"masks of image 7 are \(32, 32\), its map at stride 8 spans \(40, 32\)"):
        sample_pixels(PixelMap(torch.zeros(1, 4, 5, 4), 8), [scene()], dense())
