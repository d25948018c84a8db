"""Trains a decoder by the settings of a gin file; the same as `kvjax train`.

python scripts/train.py --gin bytes --out runs/bytes
"""

import sys

from kvjax.commands.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
