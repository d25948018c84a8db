"""`python -m scripts.bench`."""

from scripts.bench.main import main

if __name__ == "__main__":
    main()
