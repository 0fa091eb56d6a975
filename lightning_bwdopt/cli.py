"""The console script ``lightning-bwdopt``: a LightningCLI that knows the strategies of this package."""

from __future__ import annotations

import os
import sys

from lightning.pytorch.cli import LightningCLI


def main(args: list[str] | None = None) -> None:
    """Runs ``lightning-bwdopt {fit,validate,test,predict} --config …``.

    Args:
        args: Command-line arguments; ``None``: those of the process.
    """
    sys.path.insert(0, os.getcwd())  # `class_path`s in the current folder are found, as with `python -m`
    LightningCLI(args=args)


if __name__ == "__main__":
    main()
