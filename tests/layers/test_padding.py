import pytest
import torch
import torch.nn.functional as F

from uniquery.layers.padding import GroupNorm, repeat_border, upsample, valid_cells, valid_tokens, without_padding

SIZES = ((16, 24), (9, 32))  # of a padded 24 × 32, at stride 8: 2 × 3 and 2 × 4 cells of 3 × 4


@pytest.fixture
def x():
    return torch.randn(2, 8, 3, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def valid(x):
    return valid_cells(SIZES, 8, x)


def test_cells_that_hold_a_part_of_their_image(valid):
    expected = torch.zeros(2, 1, 3, 4, dtype=torch.bool)
    expected[0, :, :2, :3] = True
    expected[1, :, :2] = True
    assert torch.equal(valid, expected)


def test_the_border_is_repeated_in_the_padding(x):
    filled = repeat_border(x, SIZES, 8)
    assert torch.equal(filled[0, :, :2, :3], x[0, :, :2, :3])
    assert torch.equal(filled[0, :, :2, 3], x[0, :, :2, 2])
    assert torch.equal(filled[0, :, 2, 3], x[0, :, 1, 2])
    assert torch.equal(filled[1, :, 2], x[1, :, 1])
    assert repeat_border(x, ((24, 32), (24, 32)), 8) is x


def test_no_mask_where_all_is_valid(x):
    assert valid_cells(((24, 32), (17, 25)), 8, x) is None
    assert without_padding(x, None) is x
    assert valid_tokens([None, None], [x, x]) is None


def test_tokens_of_several_maps(x, valid):
    tokens = valid_tokens([None, valid], [x[:, :, :1], x])
    assert torch.equal(tokens, torch.cat([torch.ones(2, 4, dtype=torch.bool), valid.flatten(1)], dim=1))


def test_without_padding(x, valid):
    cut = without_padding(x, valid)
    assert torch.equal(cut[0, :, :2, :3], x[0, :, :2, :3])
    assert not cut[0, :, 2:].any()
    assert not cut[0, :, :, 3:].any()


class TestGroupNorm:
    def test_is_that_of_each_image_alone(self, x, valid):
        norm = GroupNorm(8)
        torch.nn.init.normal_(norm.weight)
        torch.nn.init.normal_(norm.bias)
        y = norm(x, valid)
        for i, (height, width) in enumerate(((2, 3), (2, 4))):
            torch.testing.assert_close(y[i, :, :height, :width], norm(x[i : i + 1, :, :height, :width])[0])
        assert not y.masked_select(~valid).any()

    def test_nothing_padded(self, x):
        norm = GroupNorm(8)
        torch.testing.assert_close(norm(x), norm(x, torch.ones(2, 1, 3, 4, dtype=torch.bool)))
        assert torch.equal(norm(x), F.group_norm(x, 4, norm.weight, norm.bias))

    def test_gradient(self, x, valid):
        norm = GroupNorm(8).double()
        assert torch.autograd.gradcheck(lambda t: norm(t, valid), x.double().requires_grad_())

    def test_as_many_groups_as_the_original_where_it_can(self):
        assert [GroupNorm(channels).num_groups for channels in (8, 64, 256)] == [4, 32, 32]


def test_upsampling_ends_where_the_image_does(x, valid):
    y = upsample(x, (6, 8), valid)
    for i, (height, width) in enumerate(((2, 3), (2, 4))):
        alone = F.interpolate(x[i : i + 1, :, :height, :width], scale_factor=2, mode="bilinear", align_corners=False)
        torch.testing.assert_close(y[i, :, : 2 * height, : 2 * width], alone[0])
    assert torch.equal(upsample(x, (6, 8), None), F.interpolate(x, size=(6, 8), mode="bilinear", align_corners=False))
