"""`python -m uniquery`, for torchrun."""

import os
import sys

from uniquery.cli import main

if __name__ == "__main__":
    try:
        status = main()
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else 1
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # torch's averaging of gradients holds on to the process group, whose threads then outlive everything else: one
        # that is still letting go of a tensor while Python shuts down aborts a process whose work is done and saved.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
