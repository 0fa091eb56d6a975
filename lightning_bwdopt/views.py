"""Step views: optimizers of the user's class that step a few of the real optimizer's parameters, on its state."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.optim import Optimizer

_MISSING = object()
# Entries of a view's group that may differ from the real group's without being a counter to write back.
OWN_ENTRIES = frozenset({"params", "foreach"})
# Entries that hold a rate, maybe as a tensor. Other tensors in a group are counters (`optimi`: `step`).
_RATES = frozenset({"lr", "initial_lr"})
# The group index under which `StepView` reports an attribute that a step has changed.
ATTRIBUTES = -1

# Classes whose step is element by element, so that stepping a rank's shards as plain tensors gives the same bits as
# stepping the DTensors, without their dispatch. Only these exact classes: a subclass may look at whole tensors.
ELEMENTWISE_OPTIMIZERS: frozenset[type[Optimizer]] = frozenset(
    {
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.Adamax,
        torch.optim.AdamW,
        torch.optim.ASGD,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)


class StepView:
    """Steps some parameters of an optimizer as that optimizer would, without touching the others.

    The view holds no state and no hyperparameter of its own: both are read from the real optimizer at each step, since
    schedulers and ``load_state_dict`` change or replace them.

    Args:
        optimizer: The real optimizer.
        params: The parameters to step; tensors that the optimizer does not hold are ignored.
        written: Filled with ``(group index, key) -> value`` for group entries that a step changes, such as the counter
            of a schedule-free optimizer, and with ``(ATTRIBUTES, name) -> value`` for numbers and flags on the
            optimizer itself. The caller writes them back once per step, so that all views of one step read the same
            values.
        used: Filled with ``group index -> group`` as the last step read it.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        params: Sequence[Tensor],
        written: dict[tuple[int, str], Any],
        used: dict[int, dict[str, Any]],
    ) -> None:
        self._real = optimizer
        self._written = written
        self._used = used
        wanted = {id(p) for p in params}
        self._members: list[tuple[int, list[Tensor]]] = []  # (index of the real group, its parameters here)
        for index, group in enumerate(optimizer.param_groups):
            if members := [p for p in group["params"] if id(p) in wanted]:
                self._members.append((index, members))
        self._params = [p for _, members in self._members for p in members]
        elementwise = type(optimizer) in ELEMENTWISE_OPTIMIZERS
        self._on_shards = elementwise and any(isinstance(p, DTensor) for p in params)
        # torch.optim.optimizer._default_to_fused_or_foreach never picks foreach for a group with DTensors. For what is
        # stepped as plain tensors it would, on an accelerator, and round differently from the ordinary run.
        self._never_foreach = {
            index
            for index, _ in self._members
            if elementwise and any(isinstance(p, DTensor) for p in optimizer.param_groups[index]["params"])
        }
        self._shards: list[_ShardState] = []  # of the DTensors
        self._plain: list[Tensor] = []  # the other parameters
        self._view = same_class(optimizer, [{"params": members} for _, members in self._members])
        self._step = without_hooks(type(optimizer).step)
        self._has_attributes = not type(optimizer).__module__.startswith("torch.optim.")

    def step(self) -> list[Tensor]:
        """Steps every parameter of the view that has a gradient, and returns these. The gradients stay."""
        self._read_groups()
        if self._on_shards:
            return self._step_shards()  # none of these classes writes to its groups
        self._view.state = self._real.state
        stepped = [p for p in self._params if p.grad is not None]
        self._step(self._view)
        self._collect_written()
        return stepped

    def _read_groups(self) -> None:
        if self._has_attributes:
            vars(self._view).update(plain_attributes(self._real))
        for mine, (index, _) in zip(self._view.param_groups, self._members):
            real = self._real.param_groups[index]
            if len(mine) > len(real):
                for key in mine.keys() - real.keys():
                    del mine[key]
            for key, value in real.items():
                if key == "foreach" and value is None and index in self._never_foreach and not real.get("fused"):
                    value = False
                if mine.get(key, _MISSING) is not value and key != "params":
                    mine[key] = value.clone() if isinstance(value, Tensor) and key not in _RATES else value
            rate = mine.get("lr")
            self._used[index] = {**mine, "lr": rate.detach().clone()} if isinstance(rate, Tensor) else mine

    def _collect_written(self) -> None:
        if self._has_attributes:
            mine, real = vars(self._view), vars(self._real)
            for name in {**plain_attributes(self._real), **plain_attributes(self._view)}:
                if mine.get(name, _MISSING) is not real.get(name, _MISSING):
                    self._written[ATTRIBUTES, name] = mine[name]
        for mine, (index, _) in zip(self._view.param_groups, self._members):
            real = self._real.param_groups[index]
            for key, value in mine.items():
                if real.get(key, _MISSING) is not value and key not in OWN_ENTRIES:
                    self._written[index, key] = value

    def _step_shards(self) -> list[Tensor]:
        shards = self._shards
        # Loading or moving a module replaces a parameter's local tensor.
        if not shards or any(shard.param._local_tensor is not shard.local for shard in shards):
            shards = self._find_shards()
        real, mine = self._real.state, self._view.state
        mine.real = real  # type: ignore[attr-defined]  # `load_state_dict` replaces it
        stepped = [p for p in self._plain if p.grad is not None]
        try:
            # One look at each parameter: a DTensor's `grad` and a dict keyed by tensors are slow.
            for shard in shards:
                gradient = aligned_gradient(shard.param)
                if gradient is not None:
                    shard.local.grad = local_tensor(gradient)
                    shard.entry = real.get(shard.param)
                    if shard.entry is None:
                        mine.pop(shard.local, None)
                    stepped.append(shard.param)
            self._step(self._view)
        finally:
            for shard in shards:
                shard.local.grad = None
        return stepped

    def _find_shards(self) -> list[_ShardState]:
        self._plain = [p for p in self._params if not isinstance(p, DTensor)]
        self._shards = [_ShardState(p) for p in self._params if isinstance(p, DTensor)]
        self._view.state = _StateByShard(self._real.state, self._shards)  # type: ignore[assignment]
        for mine, (_, members) in zip(self._view.param_groups, self._members):
            mine["params"] = [local_tensor(p) for p in members]
        return self._shards


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, sharing its storage; any other tensor as it is."""
    # `DTensor.to_local` makes an autograd view; the optimizer needs the very tensor that FSDP gathers from.
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def aligned_gradient(param: Tensor) -> Tensor | None:
    """A parameter's gradient, lying on the ranks as the parameter does, which it is not before a DTensor operation.

    FSDP2 reduces and shards gradients itself. Where a DTensor is used without it, as in tensor parallelism by hand, the
    gradient of a replicated weight is a partial sum on each rank.
    """
    gradient = param.grad
    if not isinstance(gradient, DTensor) or not isinstance(param, DTensor) or gradient._spec is param._spec:
        return gradient
    if gradient.placements != param.placements:
        param.grad = gradient.redistribute(placements=param.placements)
    return param.grad


def shard_like(local: Tensor, param: Tensor) -> DTensor:
    """A DTensor that is sharded as ``param`` is and has ``local`` as this rank's shard."""
    assert isinstance(param, DTensor)
    # Not `DTensor.from_local`: it moves `local` to the mesh's type of device, away from a parameter that is offloaded
    # to the host. The global shape and stride are the parameter's: they cannot be inferred from uneven shards.
    meta = TensorMeta(param.shape, param.stride(), local.dtype)
    return DTensor(local, DTensorSpec(param.device_mesh, param.placements, tensor_meta=meta), requires_grad=False)


def same_class(optimizer: Optimizer, param_groups: list[dict[str, Any]]) -> Optimizer:
    """An optimizer of the same class and attributes with other groups, made without running its constructor."""
    view: Optimizer = object.__new__(type(optimizer))
    vars(view).update(vars(optimizer))
    vars(view).pop("step", None)  # schedulers and `OptimizerInBackward` put theirs on the real instance
    view._optimizer_step_pre_hooks = OrderedDict()  # a `step` that calls its parent's may run them yet
    view._optimizer_step_post_hooks = OrderedDict()
    view.param_groups = param_groups
    return view


def without_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """An optimizer class's ``step`` as its author wrote it.

    The first object of a class has torch wrap ``step`` (``Optimizer._patch_step_function``) to run step hooks, also
    those for all optimizers, and to mark the profile: once a step, with the real optimizer, and not once a view.
    """
    return step.__wrapped__ if getattr(step, "__code__", None) is _HOOKS_WRAPPER else step  # type: ignore[attr-defined]


_HOOKS_WRAPPER = Optimizer.profile_hook_step(lambda *_: None).__code__


def plain_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """The numbers, flags and strings that are attributes of an optimizer."""
    return {key: value for key, value in vars(optimizer).items() if isinstance(value, int | float | str | None)}


class _StateByShard(dict[Tensor, Any]):
    """The real optimizer's state, looked up by a rank's shards instead of by the DTensors.

    It holds what has been looked up before; what has not is found, or made, in the real state.
    """

    def __init__(self, real: MutableMapping[Tensor, Any], shards: Sequence[_ShardState]) -> None:
        self.real = real
        self._shards = {shard.local: shard for shard in shards}

    def __missing__(self, local: Tensor) -> Any:
        shard = self._shards.get(local)
        if shard is None:  # a parameter that is no DTensor
            return self.real[local]
        shard.entry = self.real[shard.param]
        self[local] = shard
        return shard


class _ShardState(MutableMapping[str, Any]):
    """One parameter's entry in the real state: reads give shards, writes of a shard's shape become DTensors."""

    __slots__ = ("entry", "local", "param")

    def __init__(self, param: DTensor) -> None:
        self.param = param
        self.local = local_tensor(param)
        self.entry: Any = None

    def __getitem__(self, key: str) -> Any:
        value = self.entry[key]
        return value._local_tensor if type(value) is DTensor else value

    def __setitem__(self, key: str, value: Any) -> None:
        if key in self.entry and self[key] is value:
            return  # torch's SGD enters its momentum at every step
        if isinstance(value, Tensor) and value.shape == self.local.shape:
            value = shard_like(value, self.param)
        self.entry[key] = value

    def __delitem__(self, key: str) -> None:
        del self.entry[key]

    def __contains__(self, key: object) -> bool:
        return key in self.entry

    def __iter__(self) -> Iterator[str]:
        return iter(self.entry)

    def __len__(self) -> int:
        return len(self.entry)
