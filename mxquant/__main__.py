"""`python -m mxquant`."""

import sys

from mxquant.cli import main

if __name__ == "__main__":
    sys.exit(main())
