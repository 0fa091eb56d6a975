"""Which entry of a saved optimizer state belongs to which parameter?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_bwdopt.first_state import first_state
from lightning_bwdopt.misfits import Misfit, Pairs, extra_entries, group_faults, listed, membership_faults, state_faults

Convention = Literal["model", "group"]


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
    faults = group_faults(optimizer, groups)
    if faults:
        raise Misfit(*faults)

    file_names = _file_names(module, keys, state, saved_weights)
    expected = first_state(optimizer, groups)
    foreign = extra_entries(optimizer.param_groups, groups)
    for pairs in _pairings(mine, keys, state, names, native, strict, file_names):
        wrong = state_faults(pairs, state, names, expected, foreign)
        if not wrong:
            break
        faults = faults or wrong
    else:
        raise Misfit(*(faults or membership_faults(mine, keys, state, names, file_names)))
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
    numbers = [key for group in keys for key in group]
    if any(isinstance(number, str) for number in numbers):
        if pairs := _by_key(mine, keys, names, strict):
            yield pairs
        return
    by_model = _by_key(mine, keys, {key: position for position, key in enumerate(names)}, strict=True)
    by_group = _by_order(mine, keys) if numbers == list(range(len(numbers))) else None
    ways = [by_model, by_group] if native == "model" else [by_group, by_model]
    if ways[0] and ways[1] and list(state) != _order(ways[0], state) and list(state) == _order(ways[1], state):
        ways.reverse()  # states are saved in the order of the groups, which tells the two apart
    yield from filter(None, ways)
    if not strict and file_names is not None:
        named = [[file_names[key] for key in group] for group in keys]
        if pairs := _by_key(mine, named, names, strict=False):
            number_of = {file_names[number]: number for number in numbers}
            yield [(index, param, number_of[name]) for index, param, name in pairs]


def _by_order(mine: Sequence[Sequence[Tensor]], keys: Sequence[Sequence[Any]]) -> Pairs | None:
    if [len(group) for group in mine] != [len(group) for group in keys]:
        return None
    return [
        (index, param, key)
        for index, (group, group_keys) in enumerate(zip(mine, keys, strict=True))
        for param, key in zip(group, group_keys, strict=True)
    ]


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
