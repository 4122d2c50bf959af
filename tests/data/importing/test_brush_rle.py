"""Label Studio's brush strokes, against an encoder written from the description of the format."""

import numpy as np
import pytest

from helpers.foreign_sets import pack_rle
from uniquery.data.importing.brush_rle import decode_brush


def test_size_of_the_encoder_example():
    """The example in the documentation of thi.ng/rle-pack has 30 bytes."""
    values = [0] * 1024
    values[512:541] = [1, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 4, 4, 5, 4, 4, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 1]
    assert len(pack_rle(values)) == 30


@pytest.mark.parametrize("density", [0.0, 0.02, 0.5, 0.98, 1.0])
@pytest.mark.parametrize("sizes", [(3, 4, 8, 16), (1, 2, 3, 4), (16, 16, 16, 16)])
def test_random_pictures(density, sizes):
    rng = np.random.default_rng(int(100 * density))
    rgba = rng.integers(0, 256, (13, 17, 4), dtype=np.uint8)  # colors do not matter, and make blocks of single values
    rgba[..., 3] = np.where(rng.random((13, 17)) < density, rng.integers(1, 256, (13, 17)), 0)
    decoded = decode_brush(pack_rle(rgba.flatten().astype(np.int64), sizes), 13, 17)
    assert np.array_equal(decoded, rgba[..., 3] > 0)


def test_long_runs():
    """A run of more than 65536 values is several blocks."""
    rgba = np.zeros((200, 300, 4), np.int64)
    rgba[150:] = 255
    decoded = decode_brush(pack_rle(rgba.flatten()), 200, 300)
    assert decoded[:150].sum() == 0
    assert decoded[150:].all()


def test_every_cut_is_found():
    codes = pack_rle(np.tile([0, 0, 0, 255], 20))
    for length in range(len(codes)):
        with pytest.raises(ValueError, match=r"cut off"):
            decode_brush(codes[:length], 4, 5)


def test_other_word_sizes_and_too_many_values():
    codes = pack_rle([0] * 80)
    with pytest.raises(ValueError, match="of 80 values"):
        decode_brush(codes, 4, 6)
    with pytest.raises(ValueError, match="7 bits"):
        decode_brush([*codes[:4], codes[4] - 8, *codes[5:]], 4, 5)
    bits = f"{80:032b}{7:05b}" + "1111" * 4 + "100" + f"{200:016b}" + "0" * 16
    with pytest.raises(ValueError, match="more values"):
        decode_brush([int(bits[i : i + 8], 2) for i in range(0, len(bits) // 8 * 8, 8)], 4, 5)
