"""Speed of prefill and decoding: `python scripts/bench.py --help`; the same as `python -m scripts.bench`."""

import sys
from pathlib import Path

# Instead of this folder, in which the package `bench` lies beside this file.
sys.path[0] = str(Path(__file__).resolve().parents[1])

if __name__ == "__main__":
    from scripts.bench.main import main

    main()
