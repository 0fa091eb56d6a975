"""Why a saved state does not fit a model and its optimizer, in words that name parameters."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

Pairs = list[tuple[int, Tensor, Any]]  # (index of the group, parameter, its key in the saved state)

# Group entries that not every version of torch has, or that schedulers add: they may be missing, or be too many.
OPTIONAL_ENTRIES = frozenset(
    {
        "amsgrad",
        "base_momentum",
        "capturable",
        "decoupled_weight_decay",
        "differentiable",
        "foreach",
        "fused",
        "initial_lr",
        "max_lr",
        "max_momentum",
        "maximize",
        "min_lr",
        "nesterov",
        "param_names",
        "swa_lr",
    }
)
SHOWN = 8  # how many names an error lists


class Misfit(Exception):
    """A saved optimizer state that does not fit; the arguments say why, one each."""


def listed(names: Iterable[object]) -> str:
    """Some names for a message, in backticks."""
    names = list(names)
    rest = len(names) - SHOWN
    return ", ".join(f"`{name}`" for name in names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def model_faults(current: Mapping[str, Any], saved: Mapping[str, Any], *, strict: bool) -> list[str]:
    """Why saved weights do not fit a model; both by name."""
    faults = []
    missing = [name for name in current if name not in saved]
    extra = [name for name in saved if name not in current]
    if strict and missing:
        faults.append(f"it lacks the model's {listed(missing)}")
    if strict and extra:
        faults.append(f"it has {listed(extra)}, which the model has not")
    other = [
        f"{name}: {list(saved[name].shape)} instead of {list(current[name].shape)}"
        for name in current
        if isinstance(current[name], Tensor)
        and isinstance(saved.get(name), Tensor)
        and saved[name].shape != current[name].shape
    ]
    if other:
        faults.append(f"weights have other shapes: {listed(other)}")
    return faults


def group_faults(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Which of an optimizer's settings the saved groups lack."""
    missing = {
        key
        for group, own in zip(groups, optimizer.param_groups, strict=True)
        for key in own
        if key in optimizer.defaults and key not in group and key not in OPTIONAL_ENTRIES
    }
    if not missing:
        return []
    extra = extra_entries(optimizer.param_groups, groups)
    return [
        f"it is of another optimizer: its groups lack {listed(sorted(missing))} of `{type(optimizer).__name__}`"
        + (f", and have {listed(sorted(extra))}" if extra else "")
    ]


def extra_entries(mine: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> set[str]:
    """Which settings the saved groups have and an optimizer's own have not."""
    return {
        key
        for group, own in zip(groups, mine, strict=True)
        for key in group
        if key not in own and key not in OPTIONAL_ENTRIES
    }


def state_faults(
    pairs: Pairs,
    state: Mapping[Any, Any],
    names: Mapping[int, str],
    expected: Mapping[tuple[int, int], Mapping[str, bool]] | None,
    foreign_entries: Collection[str],
) -> list[str]:
    """Why saved states are not those that an optimizer keeps for its parameters.

    Args:
        pairs: Which is whose.
        state: The saved states by key.
        names: ``id(parameter) -> name``.
        expected: What :func:`lightning_bwdopt.first_state.first_state` tells; ``None``: anything may do.
        foreign_entries: What :func:`extra_entries` tells.
    """
    if expected is None:
        return []
    lacking: dict[str, list[str]] = {}
    foreign: set[str] = set()
    misshapen: list[str] = []
    for index, param, key in pairs:
        if key not in state:
            continue  # never stepped: frozen, or unused so far
        entry, kept = state[key], expected[index, param.ndim]
        for missing in kept.keys() - entry.keys():
            lacking.setdefault(missing, []).append(names[id(param)])
        foreign |= entry.keys() - kept.keys()
        for name, value in entry.items():
            if kept.get(name) and isinstance(value, Tensor) and value.shape != param.shape:
                shapes = f"{list(value.shape)} instead of {list(param.shape)}"
                misshapen.append(f"{name} of {names[id(param)]}: {shapes}")
    faults = [f"it lacks the state `{key}` of {listed(where)}" for key, where in lacking.items()]
    # An entry or a setting of its own may have come with another version; both together are another optimizer's.
    if foreign and foreign_entries:
        faults.append(
            f"it is of another optimizer: its states have {listed(sorted(foreign))} and its groups"
            f" {listed(sorted(foreign_entries))}, which the one here does not know"
        )
    if misshapen:
        faults.append(f"states have other shapes: {listed(misshapen)}")
    return faults


def membership_faults(
    mine: Sequence[Sequence[Tensor]],
    keys: Sequence[Sequence[Any]],
    state: Mapping[Any, Any],
    names: Mapping[int, str],
    file_names: Sequence[str] | None,
) -> list[str]:
    """Which parameters the saved groups have too many or too few.

    Args:
        mine: The optimizer's groups.
        keys: The saved ones, by number or name.
        state: The saved states by key.
        names: ``id(parameter) -> name``.
        file_names: The names behind the saved numbers, where they are known.
    """
    faults = []
    for index, (group, group_keys) in enumerate(zip(mine, keys, strict=True)):
        here = [names[id(param)] for param in group]
        there = [str(key) if file_names is None or isinstance(key, str) else file_names[key] for key in group_keys]
        if file_names is not None or any(isinstance(key, str) for key in group_keys):
            only_here = [name for name in here if name not in set(there)]
            only_there = [name for name in there if name not in set(here)]
        elif len(here) == len(there):
            continue
        else:
            only_here, only_there = _unaligned(group, here, group_keys, state)
        if only_here or only_there:
            faults.append(
                f"group {index} has {len(there)} parameters in it and {len(here)} here"
                + (f"; not in it: {listed(only_here)}" if only_here else "")
                + (f"; only in it: {listed(only_there)}" if only_there else "")
            )
    return faults or ["which of its states belongs to which parameter cannot be told"]


def _unaligned(
    group: Sequence[Tensor], here: Sequence[str], keys: Sequence[Any], state: Mapping[Any, Any]
) -> tuple[list[str], list[str]]:
    """The names here and the numbers there that are too many, where only shapes tell who is who."""
    shapes = [
        max((tuple(v.shape) for v in state.get(key, {}).values() if isinstance(v, Tensor)), key=len, default=())
        for key in keys
    ]
    only_here: list[str] = []
    only_there: list[str] = []
    matcher = difflib.SequenceMatcher(None, [tuple(param.shape) for param in group], shapes, autojunk=False)
    for kind, i, j, k, m in matcher.get_opcodes():
        if kind != "equal":
            only_here += here[i:j]
            only_there += [f"{key} of shape {list(shape)}" for key, shape in zip(keys[k:m], shapes[k:m], strict=True)]
    return only_here, only_there
