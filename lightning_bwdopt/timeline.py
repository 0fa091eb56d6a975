"""The memory of a process over the time of one training step: sampled, with the step's events between the samples."""

from __future__ import annotations

import csv
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Literal, NamedTuple

from torch import Tensor

from lightning_bwdopt.memory import Phase
from lightning_bwdopt.views import local_tensor

# Milliseconds between two samples, at first. A long step is sampled more coarsely towards its end, for the samples
# themselves take memory.
_INTERVAL = 1.0
_DENSE = 2000

Event = Literal["", "gradient", "step begins", "step ends"]


class Sample(NamedTuple):
    """One moment of the step; the fields are the columns of the CSV file.

    Attributes:
        ms: Milliseconds since the step began.
        phase: The part of the step: forward, backward, the ordinary optimizer step, or nothing for what is between.
        event: Why it was taken: a gradient is complete, a step of a unit (or of a whole optimizer) begins or ends; or
            nothing: the time had come.
        unit: The parameter, unit or optimizer of the event.
        memory_bytes: On CUDA what the allocator has given out on this device; else the resident set of the process.
        gradient_bytes: The gradients of this rank that are alive.
    """

    ms: float
    phase: Phase | Literal[""]
    event: Event
    unit: str
    memory_bytes: int
    gradient_bytes: int


class Span(NamedTuple):
    """A part of the step's time."""

    name: str
    start_ms: float
    end_ms: float


class Recording:
    """Samples the memory from a thread of its own until :meth:`stop`, and notes events as they are reported.

    Args:
        read: Returns the bytes in use, as ``process_memory.memory_reader`` makes it.
        parameters: Names and parameters whose gradients are counted.

    Attributes:
        samples: What was seen, in the order of time once stopped.
    """

    def __init__(self, read: Callable[[], int], parameters: Iterable[tuple[str, Tensor]]) -> None:
        self.samples: list[Sample] = []
        self._read = read
        self._named = dict(parameters)
        self._names = {id(param): name for name, param in self._named.items()}
        self._phase: Phase | Literal[""] = "forward"
        self._held: dict[int, int] = {}  # id(parameter) -> bytes of its gradient
        self._gradients = 0
        self._start = time.perf_counter()
        self._stopped = threading.Event()
        self.count_gradients()
        self.note()
        self._thread = threading.Thread(target=self._sample, name="memory timeline", daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._stopped.wait(_INTERVAL / 1000 * (1 + len(self.samples) // _DENSE)):
            self.note()

    def note(self, event: Event = "", unit: str = "") -> None:
        """Takes a sample now."""
        ms = 1000 * (time.perf_counter() - self._start)
        self.samples.append(Sample(ms, self._phase, event, unit, self._read(), self._gradients))

    def stop(self) -> None:
        """Ends the thread."""
        if not self._stopped.is_set():
            self.count_gradients()
            self._stopped.set()
            self._thread.join()
            self.samples.sort(key=lambda sample: sample.ms)

    # What the training reports --------------------------------------------------------------------------------------

    def enter(self, phase: Phase | Literal[""]) -> None:
        """Another part of the step begins."""
        self.count_gradients()  # `zero_grad` is seen here
        if phase == "backward":
            # What lies before a backward is its forward, also where user code makes several of each in one step.
            index = len(self.samples) - 1
            while index >= 0 and self.samples[index].phase == "":
                self.samples[index] = self.samples[index]._replace(phase="forward")
                index -= 1
        self.note()
        self._phase = phase
        self.note()

    def on_gradient(self, param: Tensor) -> None:
        """Post-accumulate-grad hook."""
        if param.grad is None:
            self.count_gradients()  # its unit is done: stepped, or dropped without a step (clipping's first pass)
        else:
            self._look_at([param])
        self.note("gradient", self._names[id(param)])

    def before_step(self, params: Sequence[Tensor]) -> None:
        """A unit's gradients are about to be used."""
        self._look_at(params)
        self.note("step begins", self._name(params))

    def after_step(self, params: Sequence[Tensor]) -> None:
        """A unit has been stepped, and its gradients dropped."""
        self._look_at(params)
        self.note("step ends", self._name(params))

    def count_gradients(self) -> None:
        """Looks at every parameter."""
        self._look_at(self._named.values())

    def _look_at(self, params: Iterable[Tensor]) -> None:
        for param in params:
            size = _nbytes(param.grad)
            self._gradients += size - self._held.get(id(param), 0)
            self._held[id(param)] = size

    def _name(self, params: Sequence[Tensor]) -> str:
        names = [self._names.get(id(param), "?") for param in params]
        common = os.path.commonprefix([name.split(".") for name in names])  # works on lists, too
        return ".".join(common) or f"{names[0]}, …"


def _nbytes(gradient: Tensor | None) -> int:
    if gradient is None:
        return 0
    if gradient.is_sparse:
        return gradient._indices().nbytes + gradient._values().nbytes
    return local_tensor(gradient).nbytes


# Files ----------------------------------------------------------------------------------------------------------------


def write_csv(samples: Sequence[Sample], file: Path) -> None:
    """Writes one row a sample under the names of its fields, aside first: the other mode's run may read it."""
    aside = file.with_name(f".{file.name}.partial")
    with aside.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(Sample._fields)
        for sample in samples:
            writer.writerow(sample._replace(ms=round(sample.ms, 4)))
    aside.replace(file)


def read_csv(file: Path) -> list[Sample]:
    """Reads what :func:`write_csv` wrote."""
    with file.open(newline="") as stream:
        rows = list(csv.reader(stream))[1:]
    return [
        Sample(float(ms), phase, event, unit, int(memory), int(gradients))  # type: ignore[arg-type]
        for ms, phase, event, unit, memory, gradients in rows
    ]


# What there is to see -------------------------------------------------------------------------------------------------


def phases(samples: Sequence[Sample]) -> list[Span]:
    """The parts of the step, in the order of time."""
    parts = (list(part) for _, part in groupby(samples, key=lambda sample: sample.phase))
    return [Span(part[0].phase, part[0].ms, part[-1].ms) for part in parts if part[0].phase]


def steps(samples: Sequence[Sample]) -> Iterator[Span]:
    """The steps of units, or of whole optimizers in an ordinary run."""
    begun: dict[str, float] = {}
    for sample in samples:
        if sample.event == "step begins":
            begun[sample.unit] = sample.ms
        elif sample.event == "step ends":
            yield Span(sample.unit, begun.pop(sample.unit, sample.ms), sample.ms)
