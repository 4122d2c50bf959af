"""Where the reference data lies, for the tests that use it: they skip without it."""

import os
from pathlib import Path

import pytest

_ROOT = Path(os.environ.get("UNIQUERY_REFERENCE", Path(__file__).parents[3] / "shared"))


def reference(*parts: str) -> Path:
    """A file or folder of the reference data; skips the test if it is not there."""
    path = _ROOT.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"no reference data: {'/'.join(parts)}")
    return path
