from dataclasses import replace

import pytest
import torch

from uniquery.querying.sampling import PixelSampling, instance_cells, sample_pixels
from uniquery.structures import PixelMap, Targets


def scene(image_id=7):
    masks = torch.zeros(3, 32, 32, dtype=torch.bool)
    masks[0, :16, :16] = True  # four cells of stride 8
    masks[1, 17:20, 25:27] = True  # owns no cell's center
    masks[2, 8:32, 16:32] = True
    return Targets(torch.tensor([4, 5, 6]), torch.zeros(3, 4), masks, image_id)


def test_owned_cells_and_the_small_instance():
    owned = instance_cells(scene().masks, 8)
    assert owned.sum(1).tolist() == [4, 1, 6]
    assert owned[1].nonzero().flatten().tolist() == [2 * 4 + 3]


@pytest.mark.parametrize(
    ("sampler", "counts"),
    [
        (PixelSampling(count=3), [3, 1, 3]),
        (PixelSampling(name="dense"), [4, 1, 6]),
        (PixelSampling(), [4, 1, 6]),
    ],
)
def test_samplers_count(sampler, counts):
    owned = instance_cells(scene().masks, 8)
    instance, cell = sampler(owned, torch.Generator().manual_seed(0))
    assert torch.bincount(instance, minlength=3).tolist() == counts
    assert owned[instance, cell].all()
    assert len(set(zip(instance.tolist(), cell.tolist(), strict=True))) == len(cell)


def test_sparse_takes_n_of_the_image_and_seeds_repeat():
    owned = instance_cells(scene().masks, 8)
    draws = [PixelSampling(name="sparse", count=5)(owned, torch.Generator().manual_seed(s)) for s in (0, 0, 1)]
    assert len(draws[0][0]) == 5
    assert torch.equal(draws[0][1], draws[1][1])
    assert not torch.equal(draws[0][1], draws[2][1])
    assert len(PixelSampling(name="sparse", count=1000)(owned)[0]) == 11


def test_sampling_is_uniform_over_an_instance():
    owned = instance_cells(scene().masks, 8)
    generator = torch.Generator().manual_seed(0)
    hits = torch.zeros(16)
    for _ in range(600):
        instance, cell = PixelSampling(count=2)(owned, generator)
        hits[cell[instance == 0]] += 1
    assert (hits[owned[0]] - 300).abs().max() < 60


def test_sample_pixels_carries_everything():
    embeddings = torch.randn(2, 5, 4, 4, requires_grad=True)
    empty = Targets(torch.zeros(0, dtype=torch.int64), torch.zeros(0, 4), torch.zeros(0, 32, 32, dtype=torch.bool), 9)
    stored = sample_pixels(PixelMap(embeddings, 8), [scene(), empty], PixelSampling(name="dense"))
    assert len(stored) == 11
    assert not stored.embeddings.requires_grad
    assert set(stored.image_ids.tolist()) == {7}
    assert set(stored.labels.tolist()) == {4, 5, 6}
    assert stored.is_thing.all()
    x, y = (stored.locations / 8).long().T
    torch.testing.assert_close(stored.embeddings, embeddings.detach()[0, :, y, x].T)


def test_a_map_of_another_size_than_the_masks():
    with pytest.raises(ValueError, match=r"masks of image 7 are \(32, 32\), its map at stride 8 spans \(40, 32\)"):
        sample_pixels(PixelMap(torch.zeros(1, 4, 5, 4), 8), [scene()], PixelSampling(name="dense"))


def test_nothing_is_sampled_where_targets_are_not_valid():
    valid = torch.ones(32, 32, dtype=torch.bool)
    valid[:16, :8] = False  # two of the first instance's cells
    valid[16:24, 24:32] = False  # the cell of the small one, which the third also owns
    target = replace(scene(), valid=valid)
    owned = instance_cells(target.masks, 8, target.valid)
    assert owned.sum(1).tolist() == [2, 0, 5]
    stored = sample_pixels(PixelMap(torch.randn(1, 5, 4, 4), 8), [target], PixelSampling(name="dense"))
    x, y = stored.locations.long().T
    assert len(stored) == 7
    assert valid[y, x].all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"count": 0}, "greater than 0"),
        ({"name": "sparse", "count": 0}, "greater than 0"),
        ({"name": "dense", "count": 5}, "leave count out"),
        ({"name": "random"}, "'instance_balanced', 'sparse' or 'dense'"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        PixelSampling(**settings)
