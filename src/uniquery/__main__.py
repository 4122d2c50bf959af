"""`python -m uniquery`, for torchrun."""

import sys

from uniquery.cli import main

if __name__ == "__main__":
    sys.exit(main())
