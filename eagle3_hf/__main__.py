"""`python -m eagle3_hf`: the command `eagle3-hf`."""

import sys

from .cli import main


if __name__ == "__main__":
    sys.exit(main())
