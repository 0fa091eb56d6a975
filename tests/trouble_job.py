"""What test_two_ranks.py starts: pairs of ranks, of which one comes into trouble in training, or both by Ctrl-C."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import Tensor

from helpers import Lit, loader, seeded, trainer
from lightning_bwdopt import FSDPOptimInBwdStrategy
from observing import LOOPS, with_mixin
from test_life_cycle import Interrupted

TIMEOUT = timedelta(seconds=10)


def _value_error() -> None:
    raise ValueError("only here")


TROUBLES: dict[str, Callable[[], None] | None] = {
    "Ctrl-C": None,
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "ValueError": _value_error,
    "None": None,
}


class Troubled(Lit):
    trouble: Callable[[], None] | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        if self.global_rank == 0 or batch_idx < 2:
            return loss
        if self.trouble is None:
            return None
        self.trouble()
        return loss


class CtrlC(Interrupted):
    """As a terminal sends it, to all ranks; in the middle of a backward."""

    error = KeyboardInterrupt


def rank(number: int, port: int, trouble: str, loop: str, log: Path) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    warnings.simplefilter("ignore")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(number), "LOCAL_RANK": str(number)}
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "trouble"}
    kind = CtrlC if trouble == "Ctrl-C" else Troubled
    module = seeded(with_mixin(kind) if loop == "manual" else kind)
    if isinstance(module, Troubled):
        module.trouble = TROUBLES[trouble]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    try:
        run = trainer(devices=2, strategy=FSDPOptimInBwdStrategy(timeout=TIMEOUT))
        run.fit(module, loader(ranks=2), loader(2, ranks=2))
    except SystemExit:  # after Ctrl-C Lightning ends the process in order
        print("SystemExit", run.strategy.step_half_applied, flush=True)
        raise
    except BaseException as error:
        print(type(error).__name__, str(error)[:300], flush=True)
        os._exit(1)


def main(folder: Path) -> None:
    """Starts all pairs at once, forked from this process, which has imported torch; notes their exit statuses."""
    fork = multiprocessing.get_context("fork")
    ranks = {}
    for trouble in TROUBLES:
        for loop in LOOPS:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            for number in range(2):
                name = f"{trouble} {loop} {number}"
                ranks[name] = fork.Process(target=rank, args=(number, port, trouble, loop, folder / name))
                ranks[name].start()
    for process in ranks.values():
        process.join(60)
        process.kill()  # one that hangs has the status -9 then
        process.join()
    print(json.dumps({name: process.exitcode for name, process in ranks.items()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
