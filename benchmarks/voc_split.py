"""The splits of the studies on PASCAL VOC: tuning images, few training images, and all of them.

    python benchmarks/voc_split.py data/voc/train.json data/voc

Takes VOC 2012's 1464 images of `train` with instance masks as a COCO json, and writes tuning.json (364 images, on which
settings are chosen), few.json (300) and many.json (all but the tuning images).
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

TUNING, FEW = 364, 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("annotations", type=Path)
    parser.add_argument("output", type=Path)
    args = parser.parse_args()
    data = json.loads(args.annotations.read_bytes())
    ids = sorted(image["id"] for image in data["images"])
    random.Random(0).shuffle(ids)
    rest = ids[TUNING:]
    args.output.mkdir(parents=True, exist_ok=True)
    for name, kept in {"tuning": ids[:TUNING], "few": rest[:FEW], "many": rest}.items():
        chosen = set(kept)
        rows = {
            "images": [image for image in data["images"] if image["id"] in chosen],
            "annotations": [row for row in data["annotations"] if row["image_id"] in chosen],
        }
        (args.output / f"{name}.json").write_text(json.dumps(data | rows))
        print(f"{name}: {len(rows['images'])} images, {len(rows['annotations'])} instances")


if __name__ == "__main__":
    main()
