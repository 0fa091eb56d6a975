"""``python -m lightning_bwdopt``."""

from lightning_bwdopt.cli import main

if __name__ == "__main__":
    main()
