"""Colors for instances: the same in every picture, and neighbors in the list look very different."""

from __future__ import annotations

Color = tuple[int, int, int]

# Chosen one after another from 144 colors, each as far as possible in OKLab from those before it.
# fmt: off
COLORS: tuple[Color, ...] = (
    (230, 46, 46), (25, 255, 25), (25, 25, 255), (128, 191, 255), (217, 25, 255), (16, 158, 63),
    (255, 178, 25), (16, 111, 158), (111, 16, 158), (255, 128, 191), (128, 255, 212), (255, 255, 25),
    (158, 111, 16), (158, 16, 87), (128, 128, 255), (16, 16, 158), (140, 25, 255), (255, 25, 179),
    (16, 158, 158), (158, 158, 16), (25, 102, 255), (46, 230, 138), (158, 63, 16), (213, 128, 255),
    (255, 102, 25), (255, 149, 128), (168, 230, 46), (158, 16, 158), (46, 168, 230), (46, 230, 230),
    (255, 234, 128), (25, 140, 255), (191, 255, 128), (16, 63, 158), (255, 25, 102), (230, 138, 46),
    (76, 46, 230), (63, 16, 158), (46, 199, 230), (255, 191, 128), (179, 25, 255), (158, 16, 40),
    (230, 230, 46), (255, 25, 255), (16, 134, 158), (25, 255, 178), (230, 46, 138), (255, 128, 255),
)
# fmt: on


def color(index: int) -> Color:
    """The color of the index-th instance; colors repeat after 48.

    >>> color(0), color(0) == color(48)
    ((230, 46, 46), True)
    """
    return COLORS[index % len(COLORS)]


def text_color_on(background: Color) -> Color:
    """Black on light backgrounds, white on dark ones.

    >>> text_color_on((255, 240, 0)), text_color_on((0, 0, 160))
    ((0, 0, 0), (255, 255, 255))
    """
    red, green, blue = background
    brightness = 0.299 * red + 0.587 * green + 0.114 * blue  # ITU-R BT.601
    return (0, 0, 0) if brightness > 140 else (255, 255, 255)
