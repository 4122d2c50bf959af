"""`python -m uniquery`, for torchrun."""

import os
import sys

from uniquery.cli import main

if __name__ == "__main__":
    try:
        status = main()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # DistributedDataParallel keeps a reference to the process group, so its threads live until the very end. If one
        # of them frees a tensor while Python shuts down, the process aborts, although everything is done and saved.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
