"""An image with 600 instances trains within bounds: its masks never exist as one stack of floats."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.crowded_step import FLOAT_STACK

PROGRAM = Path(__file__).parents[1] / "helpers" / "crowded_step.py"


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="asks linux for the peak of memory")
@pytest.mark.parametrize(
    ("work", "share"), [("load", 0.9), ("resampled", 0.75), pytest.param("exact", 0.75, marks=pytest.mark.slow)]
)
def test_six_hundred_instances(work, share):
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(PROGRAM.parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, PROGRAM, work]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) < share * FLOAT_STACK
