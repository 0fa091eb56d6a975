"""The console script ``lightning-bwdopt``: a LightningCLI that knows the strategies of this package, and more."""

from __future__ import annotations

import os
import sys

from lightning.pytorch.cli import LightningCLI

_MORE = (
    "And: `lightning-bwdopt estimate --help`, the memory of a training step before it is run; `lightning-bwdopt compare"
    " --help`, the ordinary run and the one in backward side by side."
)


def main(args: list[str] | None = None) -> None:
    """Runs ``lightning-bwdopt {fit,validate,test,predict,estimate,compare} --config …``.

    Args:
        args: Command-line arguments; ``None``: those of the process.

    Raises:
        SystemExit: with the exit status of ``estimate`` or ``compare``.
    """
    sys.path.insert(0, os.getcwd())  # `class_path`s in the current folder are found, as with `python -m`
    given = sys.argv[1:] if args is None else args
    if given[:1] == ["estimate"]:
        from lightning_bwdopt import estimate

        raise SystemExit(estimate.main(given[1:]))
    if given[:1] == ["compare"]:
        from lightning_bwdopt import compare

        raise SystemExit(compare.main(given[1:]))
    LightningCLI(args=args, parser_kwargs={"epilog": _MORE})


if __name__ == "__main__":
    main()
