"""Optimizers like the user's for small tensors, to learn what the class does without touching the user's own."""

from __future__ import annotations

import copy
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_bwdopt.views import same_class

OF_PARAMS = ("params", "param_names")  # entries of a group that are not hyperparameters


def like(optimizer: Optimizer, groups: list[dict[str, Any]], memo: dict[int, Any] | None = None) -> Optimizer:
    """An optimizer like this one for other parameters, without what its state keeps for them."""
    trial = same_class(optimizer, groups)
    for key, value in vars(optimizer).items():
        if key not in ("param_groups", "state", "step") and not key.startswith("_optimizer_"):
            setattr(trial, key, copy.deepcopy(value, memo))
    own = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    trial.state = defaultdict(dict, copy.deepcopy(own, memo))
    if callable(switch := getattr(trial, "train", None)):  # schedule-free classes step in this mode only
        switch()
    return trial


@contextmanager
def undisturbed(optimizer: Optimizer) -> Iterator[None]:
    """Leaves the random generators of the CPU and of the parameters' device as they are, and compiles nothing."""
    params = (param for group in optimizer.param_groups for param in group["params"])
    device = next((param.device for param in params), torch.device("cpu"))
    with ExitStack() as stack:
        devices = [] if device.type == "cpu" else [device.index or 0]
        stack.enter_context(torch.random.fork_rng(devices, device_type="cuda" if device.type == "cpu" else device.type))
        if "torch._dynamo" in sys.modules:  # a class that compiles its step would take seconds
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield
