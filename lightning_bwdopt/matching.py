"""Does a saved state fit this model and optimizer? Which of its entries belong to which parameter?"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_bwdopt.selfcheck import first_state

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

Convention = Literal["model", "group"]
Pairs = list[tuple[int, Tensor, Any]]  # (index of the group, parameter, its key in the saved state)


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


class Misfit(Exception):
    """A saved optimizer state that does not fit; the arguments say why, one each."""


def matched_state(
    module: nn.Module,
    optimizer: Optimizer,
    saved: Mapping[str, Any],
    *,
    names: Mapping[int, str],
    native: Convention,
    strict: bool,
    saved_weights: Mapping[str, Any],
) -> dict[str, Any]:
    """A saved optimizer state with its parameters numbered as ``optimizer.load_state_dict`` wants them.

    A file numbers parameters in one of two ways: by their position in ``model.parameters()`` and sorted in each group
    (FSDP), or as they come in the groups (one device, DDP). A folder has names.

    Args:
        module: The model.
        optimizer: What the state is for; nothing of it is changed.
        saved: With ``state`` and ``param_groups``. Tensors may be on ``meta``.
        names: ``id(parameter) -> name`` in the order of ``module.parameters()``.
        native: How the strategy that loads would have numbered them: right where both would do.
        strict: Every parameter must be in the saved groups, and the other way round.
        saved_weights: The model's weights in the same checkpoint, by name; may be empty.

    Raises:
        Misfit: with every reason found.
    """
    try:
        groups, state = saved["param_groups"], saved["state"]
        keys = [list(group["params"]) for group in groups]
        assert all(isinstance(entry, Mapping) for entry in state.values())
    except (AssertionError, AttributeError, KeyError, TypeError):
        raise Misfit("it is no optimizer state, with `state` and with `param_groups` that have `params`") from None
    mine = [group["params"] for group in optimizer.param_groups]
    if len(groups) != len(mine):
        raise Misfit(f"it has {len(groups)} parameter groups, and the `{type(optimizer).__name__}` here {len(mine)}")
    faults = _group_faults(optimizer, groups)
    if faults:
        raise Misfit(*faults)

    file_names = _file_names(module, keys, state, saved_weights)
    expected = first_state(optimizer, groups)
    foreign = _extra_entries(optimizer.param_groups, groups)
    for pairs in _pairings(mine, keys, state, names, native, strict, file_names):
        wrong = _state_faults(pairs, state, names, expected, foreign)
        if not wrong:
            break
        faults = faults or wrong
    else:
        raise Misfit(*(faults or _membership_faults(mine, keys, state, names, file_names)))
    known = {key for group_keys in keys for key in group_keys}
    if stray := [key for key in state if key not in known]:
        raise Misfit(f"it has the state of {listed(stray)}, which none of its groups names")

    numbers = {id(param): number for number, param in enumerate(p for group in mine for p in group)}
    number_of = {key: numbers[id(param)] for _, param, key in pairs}
    return {
        "state": {number_of[key]: entry for key, entry in state.items() if key in number_of},
        "param_groups": [
            {**_missing_entries(group, own), **group, "params": [numbers[id(p)] for p in own["params"]]}
            for group, own in zip(groups, optimizer.param_groups, strict=True)
        ],
    }


def _missing_entries(group: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in own.items() if key not in group and key != "params"}


def _group_faults(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> list[str]:
    missing = {
        key
        for group, own in zip(groups, optimizer.param_groups, strict=True)
        for key in own
        if key in optimizer.defaults and key not in group and key not in OPTIONAL_ENTRIES
    }
    if not missing:
        return []
    extra = _extra_entries(optimizer.param_groups, groups)
    return [
        f"it is of another optimizer: its groups lack {listed(sorted(missing))} of `{type(optimizer).__name__}`"
        + (f", and have {listed(sorted(extra))}" if extra else "")
    ]


def _extra_entries(mine: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> set[str]:
    return {
        key
        for group, own in zip(groups, mine, strict=True)
        for key in group
        if key not in own and key not in OPTIONAL_ENTRIES
    }


# Which entry belongs to which parameter -----------------------------------------------------------------------------


def _pairings(
    mine: Sequence[Sequence[Tensor]],
    keys: Sequence[Sequence[Any]],
    state: Mapping[Any, Any],
    names: Mapping[int, str],
    native: Convention,
    strict: bool,
    file_names: Sequence[str] | None,
) -> Iterator[Pairs]:
    """The ways to read the saved numbering, likeliest first."""
    if any(isinstance(key, str) for group in keys for key in group):
        if pairs := _by_key(mine, keys, names, strict):
            yield pairs
        return
    positions = {key: position for position, key in enumerate(names)}
    by_model = _by_key(mine, keys, positions, strict=True)
    by_group = None
    if [len(group) for group in mine] == [len(group) for group in keys]:
        by_group = [
            (index, param, key)
            for index, (group, group_keys) in enumerate(zip(mine, keys, strict=True))
            for param, key in zip(group, group_keys, strict=True)
        ]
    ways = [by_model, by_group] if native == "model" else [by_group, by_model]
    if ways[0] and ways[1] and list(state) != _order(ways[0], state) and list(state) == _order(ways[1], state):
        ways.reverse()  # states are saved in the order of the groups, which tells the two apart
    yield from filter(None, ways)
    if not strict and file_names is not None:
        named = [[file_names[key] for key in group] for group in keys]
        back = {
            name: key for group, group_keys in zip(named, keys, strict=True) for name, key in zip(group, group_keys)
        }
        if pairs := _by_key(mine, named, names, strict=False):
            yield [(index, param, back[name]) for index, param, name in pairs]


def _by_key(
    mine: Sequence[Sequence[Tensor]], keys: Sequence[Sequence[Any]], key_of: Mapping[int, Any], strict: bool
) -> Pairs | None:
    pairs: Pairs = []
    for index, (group, group_keys) in enumerate(zip(mine, keys, strict=True)):
        saved = set(group_keys)
        if strict and saved != {key_of[id(param)] for param in group}:
            return None
        pairs += [(index, param, key_of[id(param)]) for param in group if key_of[id(param)] in saved]
    return pairs


def _order(pairs: Pairs, state: Mapping[Any, Any]) -> list[Any]:
    return [key for _, _, key in pairs if key in state]


def _file_names(
    module: nn.Module, keys: Sequence[Sequence[Any]], state: Mapping[Any, Any], saved_weights: Mapping[str, Any]
) -> list[str] | None:
    """The names behind the saved positions, learned from the weights beside them; ``None`` where that is unsure."""
    numbers = [key for group in keys for key in group]
    if not all(isinstance(number, int) for number in numbers):
        return None
    buffers = {name for name, _ in module.named_buffers()}
    file_names = [name for name, value in saved_weights.items() if isinstance(value, Tensor) and name not in buffers]
    if any(number >= len(file_names) for number in numbers):
        return None
    if len(keys) > 1 and numbers == sorted(numbers):
        return None  # numbered as they come in the groups, or groups that follow the model: it cannot be told
    for number in numbers:
        shapes = [
            value.shape for value in state.get(number, {}).values() if isinstance(value, Tensor) and value.ndim > 0
        ]
        if shapes and saved_weights[file_names[number]].shape not in shapes:
            return None
    return file_names


# Why they do not fit ------------------------------------------------------------------------------------------------


def _state_faults(
    pairs: Pairs,
    state: Mapping[Any, Any],
    names: Mapping[int, str],
    expected: Mapping[tuple[int, int], Mapping[str, bool]] | None,
    foreign_entries: Collection[str],
) -> list[str]:
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


def _membership_faults(
    mine: Sequence[Sequence[Tensor]],
    keys: Sequence[Sequence[Any]],
    state: Mapping[Any, Any],
    names: Mapping[int, str],
    file_names: Sequence[str] | None,
) -> list[str]:
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
