"""Predicted instances of an image in the formats of other tools; outlines are exact, along the edges of pixels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from uniquery.masks.contours import Part, Ring, mask_parts, single_ring
from uniquery.structures import Instances

LABELME_VERSION = "5.5.0"


def to_yolo(instances: Instances) -> str:
    """One line `class x y x y …` for each instance, in fractions of the image; classes are numbers from 0.

    Several parts and holes are joined to one polygon by bridges without area.
    """
    height, width = instances.size
    lines = []
    for index, parts in _outlines(instances):
        corners = single_ring(parts).tolist()
        values = " ".join(f"{x / width:.7g} {y / height:.7g}" for x, y in corners)
        lines.append(f"{int(instances.labels[index])} {values}\n")
    return "".join(lines)


def to_labelme(instances: Instances, image_path: str) -> dict[str, Any]:
    """The content of a labelme json: a polygon for each part; those of one instance have the same group_id.

    Args:
        instances: what was found.
        image_path: the path of the image, relative to the json.
    """
    height, width = instances.size
    names, shapes = instances.names, list[dict[str, Any]]()
    for index, parts in _outlines(instances):
        shapes += [
            {
                "label": names[index],
                "points": [[float(x), float(y)] for x, y in single_ring([part]).tolist()],
                "group_id": index + 1 if len(parts) > 1 else None,
                "description": f"score {float(instances.scores[index]):.3f}",
                "shape_type": "polygon",
                "flags": {},
            }
            for part in parts
        ]
    return {
        "version": LABELME_VERSION,
        "flags": {},
        "shapes": shapes,
        "imagePath": image_path,
        "imageData": None,
        "imageHeight": height,
        "imageWidth": width,
    }


def to_geojson(instances: Instances) -> dict[str, Any]:
    """A GeoJSON FeatureCollection, in pixels, with holes; QuPath reads the properties."""
    names, features = instances.names, []
    for index, parts in _outlines(instances):
        polygons = [[_closed(part.exterior), *map(_closed, part.holes)] for part in parts]
        is_one = len(polygons) == 1
        geometry = {
            "type": "Polygon" if is_one else "MultiPolygon",
            "coordinates": polygons[0] if is_one else polygons,
        }
        properties = {
            "objectType": "annotation",
            "classification": {"name": names[index]},
            "score": float(instances.scores[index]),
        }
        features.append({"type": "Feature", "geometry": geometry, "properties": properties})
    return {"type": "FeatureCollection", "features": features}


def _outlines(instances: Instances) -> Iterator[tuple[int, list[Part]]]:
    """The index and the outlines of each instance whose mask is not empty."""
    for index, mask in enumerate(instances.rles):
        parts = mask_parts(mask)
        if parts:
            yield index, parts


def _closed(ring: Ring) -> list[list[int]]:
    """GeoJSON repeats the first corner at the end."""
    corners: list[list[int]] = ring.tolist()
    return [*corners, corners[0]]
