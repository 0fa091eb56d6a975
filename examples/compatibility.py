"""Runs every optimizer class that is installed with the optimizer in backward and without, and writes the table.

For each class the self-check gives its verdict, and then, whatever it was, an ordinary run is compared with one that
steps in backward: a small network, 100 steps at each of two learning rates. Losses, weights and the whole optimizer
state must be equal to the bit. The script fails where an accepted class differs.

    python -m examples.compatibility --write docs/optimizers.md
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_bwdopt import OptimizerInBackward
from lightning_bwdopt.views import plain_attributes

LIBRARIES = {  # import name -> distribution
    "torch.optim": "torch",
    "pytorch_optimizer": "pytorch-optimizer",
    "optimi": "torch-optimi",
    "lion_pytorch": "lion-pytorch",
    "schedulefree": "schedulefree",
    "prodigyopt": "prodigyopt",
    "bitsandbytes.optim": "bitsandbytes",
    "torchao.optim": "torchao",
}
RATES = (0.01, 1.0)
STEPS = 100
SECONDS = 10.0  # an ordinary run that has taken so long ends, and the other makes as many steps
PLAIN = (Tensor, nn.Parameter)
MATRICES_ONLY = frozenset({"torch.optim.Muon", "pytorch_optimizer.SpectralSphere"})  # they refuse vectors
SPARSE_ONLY = frozenset({"torch.optim.SparseAdam"})
ABSTRACT = frozenset({"torch.optim.Optimizer", "torchao.optim._AdamW"})


class Sparse(nn.Module):
    """A network whose trainable gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.EmbeddingBag(64, 8, sparse=True)
        self.second = nn.EmbeddingBag(64, 8, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        """Looks up rows by the size of the inputs."""
        tokens = (x.abs() * 20).long().clamp(max=63)
        return (self.first(tokens) * self.second(tokens)).sum(dim=1, keepdim=True)


def network(cls: type[Optimizer]) -> nn.Module:
    """Small, with one weight of 4096 elements: from that size on 8-bit states are used."""
    torch.manual_seed(0)
    if qualified(cls) in SPARSE_ONLY:
        return Sparse()
    return nn.Sequential(nn.Linear(8, 64), nn.LayerNorm(64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))


def build(cls: type[Optimizer], model: nn.Module, rate: float) -> Optimizer:
    """The class with its default arguments, at a rate; the few that need more get it here."""
    name = qualified(cls)
    params: Any = [p for p in model.parameters() if p.ndim == 2 or name not in MATRICES_ONLY]
    required = {
        key
        for key, parameter in inspect.signature(cls.__init__).parameters.items()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        and key not in ("self", "params")
    }
    arguments: dict[str, Any] = {}
    if "lr" in inspect.signature(cls.__init__).parameters:
        arguments["lr"] = rate
    for key, value in (
        ("base_optimizer", torch.optim.SGD),
        ("base_optimizer_cls", torch.optim.AdamW),
        ("optimizer_class", torch.optim.AdamW),
        ("num_iterations", STEPS),
        ("total_steps", STEPS),
        ("model", model),
        ("num_batches_per_epoch", 10),
        ("num_data", 16),
    ):
        if key in required:
            arguments[key] = value
    make: Callable[..., Optimizer] = cls
    if "optimizer" in required:
        return make(torch.optim.SGD(params, lr=rate))
    if "params" not in inspect.signature(cls.__init__).parameters and "model" in required:
        return make(**arguments)
    try:
        return make(params, **arguments)
    except NotImplementedError:  # "without momentum is not supported"
        return make(params, momentum=0.9, **arguments)
    except RuntimeError:  # Muon's relatives in `pytorch_optimizer` want to be told
        matrices = [p for p in params if p.ndim == 2]
        vectors = [p for p in params if p.ndim != 2]
        return make([{"params": matrices, "use_muon": True}, {"params": vectors, "use_muon": False}], **arguments)


def train(
    cls: type[Optimizer], rate: float, *, steps: int, in_backward: bool
) -> tuple[list[float], list[Tensor], dict[str, Any]]:
    """Losses, and weights, state tensors and attributes at the end, of a run on the network; of a slow one a part."""
    ends = time.perf_counter() + SECONDS
    model = network(cls)
    optimizer = build(cls, model, rate)
    if callable(switch := getattr(optimizer, "train", None)):
        switch()
    noise = torch.Generator().manual_seed(1)
    core = OptimizerInBackward(optimizer, self_check=False) if in_backward else None
    if core is not None:
        core.attach(calls_step=True)
    losses = []
    for _ in range(steps):
        if not in_backward and time.perf_counter() > ends:
            break
        x = torch.randn(16, 8, generator=noise)
        loss = nn.functional.mse_loss(model(x), x.sum(dim=1, keepdim=True).sin())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if core is not None:
        core.remove()
    state: list[Any] = []
    for entry in optimizer.state.values():
        state += entry.values() if isinstance(entry, dict) else [entry]
    tensors = [t.detach() for t in (*model.parameters(), *state) if isinstance(t, Tensor)]
    tensors = [t if type(t) in PLAIN else t.dequantize() for t in tensors]
    numbers = {f"attribute `{key}`": v for key, v in plain_attributes(optimizer).items() if key != "_opt_called"}
    for index, group in enumerate(optimizer.param_groups):
        numbers |= {f"`{key}` of group {index}": v for key, v in group.items() if isinstance(v, int | float | str)}
    return losses, tensors, numbers


@dataclass
class Row:
    """One line of the table."""

    name: str
    verdict: str  # why the self-check refuses the class; "" when it accepts
    outcome: str  # "equal", "differs", "fails", "cannot run"
    detail: str
    seconds: float  # of CPU time, which the self-check took

    @property
    def silent(self) -> bool:
        """Accepted, and yet not equal."""
        return not self.verdict and self.outcome not in ("equal", "cannot run")


def examine(cls: type[Optimizer]) -> Row:
    """The self-check's verdict on a class, and the comparison."""
    name = qualified(cls)
    verdict = ""
    seconds = 0.0
    try:
        optimizer = build(cls, network(cls), RATES[0])
    except Exception as error:
        return Row(name, "", "cannot run", brief(error), 0.0)
    started = time.process_time()
    try:
        OptimizerInBackward(optimizer)
    except (TypeError, ValueError) as error:
        verdict = str(error)
    seconds = time.process_time() - started
    largest = 0.0
    for rate in RATES:
        try:
            losses, tensors, numbers = train(cls, rate, steps=STEPS, in_backward=False)
        except Exception as error:
            return Row(name, verdict, "cannot run", brief(error), seconds)
        try:
            mine, others, my_numbers = train(cls, rate, steps=len(losses), in_backward=True)
        except Exception as error:
            return Row(name, verdict, "fails", brief(error), seconds)
        largest = max(largest, distance(torch.tensor(losses), torch.tensor(mine)))
        if len(tensors) != len(others):
            return Row(name, verdict, "differs", "number of states", seconds)
        largest = max([largest, *map(distance, tensors, others)])
        if largest == 0 and numbers != my_numbers and str(numbers) != str(my_numbers):
            differing = next(key for key in {**numbers, **my_numbers} if numbers.get(key) != my_numbers.get(key))
            return Row(name, verdict, "differs", differing, seconds)
    return Row(name, verdict, "equal" if largest == 0 else "differs", f"{largest:.2g}", seconds)


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference; 0 only when equal to the bit (two NaN are equal)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) and torch.equal(a.isnan(), b.isnan()):
        return 0.0
    gap = (a.double() - b.double()).abs().nan_to_num(float("inf")).max().item()
    return max(gap, sys.float_info.min)


def brief(error: BaseException) -> str:
    """The first sentence of an error, short enough for a table."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:100]}"


def qualified(cls: type) -> str:
    """The class's name with the module that users import it from."""
    for library in LIBRARIES:
        if library in sys.modules and getattr(sys.modules[library], cls.__name__, None) is cls:
            return f"{library}.{cls.__name__}"
    return f"{cls.__module__}.{cls.__name__}"


def classes(library: str) -> Iterator[type[Optimizer]]:
    """The optimizer classes that a library exports."""
    module = importlib.import_module(library)
    for name, value in sorted(vars(module).items()):
        if inspect.isclass(value) and issubclass(value, Optimizer) and f"{library}.{name}" not in ABSTRACT:
            yield value


def main(only: Callable[[str], bool] = lambda name: True) -> list[Row]:
    """Examines the classes whose name passes."""
    rows: list[Row] = []
    seen: set[type] = set()  # libraries export each other's classes
    for library in LIBRARIES:
        for cls in classes(library):
            if only(qualified(cls)) and cls not in seen:
                seen.add(cls)
                rows.append(examine(cls))
                print(rows[-1], flush=True)
    return rows


def markdown(rows: list[Row]) -> str:
    """The table, as a page."""
    accepted = [row for row in rows if not row.verdict and row.outcome == "equal"]
    refused = [row for row in rows if row.verdict]
    unbuilt = [row for row in rows if not row.verdict and row.outcome == "cannot run"]
    versions = ", ".join(f"{name} {version(name)}" for name in LIBRARIES.values())
    lines = [
        "# Optimizers",
        "",
        "<!-- Written by `python -m examples.compatibility --write docs/optimizers.md`; do not edit. -->",
        "",
        f"{len(accepted)} classes give the same result in backward, to the bit; {len(refused)} are refused. None of"
        f" {len(accepted) + len(refused)} gives another result without an error.",
        "",
        f"Each class was run with {versions}, on a CPU, with its default arguments: {STEPS} steps of a small network at"
        f" each of the rates {RATES[0]} and {RATES[1]}, ordinary and in backward with one view per parameter. Losses,"
        " weights, the whole state and every counter were compared. An optimizer that is not here is probed in the same"
        f" way, in short, when it is attached: {probe_times(rows)}.",
        "",
        "## Equal to the bit",
        "",
    ]
    for library in LIBRARIES:
        if names := [row.name.rsplit(".", 1)[1] for row in accepted if row.name.startswith(library + ".")]:
            lines += [f"`{library}` ({len(names)}): " + ", ".join(names), ""]
    lines += ["## Refused", "", "| class | the self-check says that it | in backward it would |", "|---|---|---|"]
    for row in refused:
        would = {"equal": "have been equal here", "fails": "fail", "cannot run": "fail, as in an ordinary step"}
        amount = f"differ by {row.detail}" if row.detail[:1].isdigit() else f"differ ({row.detail})"
        lines.append(f"| `{row.name}` | {reason(row.verdict)} | {would.get(row.outcome, amount)} |")
    lines += ["", "## Not run", "", "| class | why |", "|---|---|"]
    lines += [f"| `{row.name}` | {row.detail} |" for row in unbuilt]
    return "\n".join(lines) + "\n"


def probe_times(rows: list[Row]) -> str:
    """How long the self-check took for the classes that it probes, in words."""
    probed = [row for row in rows if row.seconds > 0.001 and row.outcome != "cannot run"]
    middle = statistics.median(row.seconds for row in probed)
    slow = [f"`{row.name}` ({row.seconds:.1f} s)" for row in probed if row.seconds > 0.3]
    return f"that took {middle:.2f} s in the median and more than 0.3 s for {', '.join(slow) or 'none'} (one core)"


def reason(verdict: str) -> str:
    """The part of a refusal that says why."""
    if verdict.startswith("`optimizer`"):
        return "has no state and groups of its own"
    text = verdict.split(", so stepping each")[0].split(": it evaluates")[0]
    return text.split("` ", 1)[1].replace("|", "\\|")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="the page to write")
    parser.add_argument("--only", default="", help="a part of the names of the classes to run")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")  # some classes compile their step
    rows = main(lambda name: options.only in name)
    if options.write:
        options.write.write_text(markdown(rows))
    if silent := [row.name for row in rows if row.silent]:
        sys.exit(f"Silently different: {', '.join(silent)}")
