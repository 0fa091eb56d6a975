"""The memory of a training step, counted storage by storage: on real tensors, or on fake ones that have none.

What torch has for this is private, or for its own tests: without it the rest of the package works.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from lightning_bwdopt.views import local_tensor

_MISSING: ImportError | None = None
try:
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
        UnsupportedOperatorException,
    )
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves, tree_map_only
except ImportError as error:  # the rest of the package works without
    _MISSING = error
    TorchDispatchMode = object  # type: ignore[assignment,misc]

MIB = 2**20
Category = Literal[
    "parameters",
    "gradients",
    "optimizer_state",
    "activations",
    "unsharded_parameters",
    "communication",
    "temporaries",
]
CATEGORIES: tuple[Category, ...] = get_args(Category)


# The parts of a training step, in their order.
Phase = Literal["forward", "backward", "optimizer step"]
PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclass(frozen=True)
class Peak:
    """The moment at which a phase of the step held the most.

    Attributes:
        bytes: How much.
        categories: What of; adds up to ``bytes``.
        after: The block of the model that came last before it, or nothing.
    """

    bytes: int
    categories: dict[Category, int]
    after: str = ""


def highest(peaks: Mapping[Phase, Peak]) -> Phase:
    """The phase with the highest peak. Peaks within 1% are level; the latest of those is meant.

    An ordinary Lightning step often has two: the end of forward, where it still holds the last step's gradients, and
    the end of backward, where it holds the new ones. The second is what stepping in backward is about.
    """
    most = max(peak.bytes for peak in peaks.values())
    return [phase for phase in PHASES if phase in peaks and peaks[phase].bytes >= 0.99 * most][-1]


class _Storage:
    """One live storage."""

    __slots__ = ("category", "reference", "size")

    def __init__(self, reference: weakref.ref, size: int, category: Category) -> None:
        self.reference = reference
        self.size = size
        self.category = category


class MemoryTracker(TorchDispatchMode):
    """Counts the bytes of every storage that operations inside the mode make, by what it is for.

    It may be entered again and again; what it knows stays. What was made outside is counted once it is given to
    :meth:`watch`. Works on plain tensors, on FSDP2's and DTensor's local ones, and on fake ones.

    Attributes:
        current: Bytes that are alive, by category.
        peaks: The most in each phase since the last :meth:`restart`.
        curve: The phase, and the total in bytes, after each operation since then.
        phase: Which part of the step runs now; the caller sets it.
        after: The block of the model that came last; the caller sets it, and it is kept with the peak.

    Note:
        Memory that kernels take for themselves (workspaces), and what an allocator loses to fragments, is not seen.
    """

    def __init__(self) -> None:
        need_private_torch()
        super().__init__()
        self.current: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
        self.total = 0
        self.peaks: dict[Phase, Peak] = {}
        self.curve: list[tuple[Phase, int]] = []
        self.phase: Phase = "forward"
        self.after = ""
        self._storages: dict[int, _Storage] = {}  # id of the storage
        self._filled: dict[int, _Storage] = {}  # unsharded parameters that FSDP2 has not emptied

    def restart(self) -> None:
        """Starts a new measurement; what is alive stays counted."""
        self.peaks = {}
        self.curve = []

    def watch(self, tensor: Tensor, category: Category) -> None:
        """Counts a tensor's storage, from now on under this category."""
        storage = local_tensor(tensor).untyped_storage()
        known = self._storages.get(id(storage))
        if known is None:
            self._add(storage, category)
        elif known.category != category:
            self.current[known.category] -= known.size
            self.current[category] += known.size
            known.category = category

    # Storages come, change their size, and go -----------------------------------------------------------------------

    def _add(self, storage: torch.UntypedStorage, category: Category) -> None:
        key = id(storage)  # torch keeps the Python object of a storage as long as the storage
        self._storages[key] = _Storage(weakref.ref(storage, lambda _: self._remove(key)), 0, category)
        self._measure(storage)

    def _remove(self, key: int) -> None:
        gone = self._storages.pop(key)
        self._filled.pop(key, None)
        self.current[gone.category] -= gone.size
        self.total -= gone.size

    def _measure(self, storage: torch.UntypedStorage) -> None:
        known = self._storages[id(storage)]
        change = storage.nbytes() - known.size
        known.size += change
        self.current[known.category] += change
        self.total += change

    # FSDP2 makes room for unsharded parameters, and frees them, by `UntypedStorage.resize_` (_fsdp_param.py,
    # `alloc_storage` and `free_storage`), which no dispatch sees. What fills them is seen; that they have been emptied
    # is found at the next operation.

    def _fill(self, unsharded: Tensor) -> None:
        self.watch(unsharded, "unsharded_parameters")
        storage = unsharded.untyped_storage()
        self._measure(storage)
        self._filled[id(storage)] = self._storages[id(storage)]

    def _find_emptied(self) -> None:
        for known in list(self._filled.values()):
            storage = known.reference()
            if storage is not None and storage.nbytes() == 0:
                self._measure(storage)
                del self._filled[id(storage)]

    def _note(self) -> None:
        self.curve.append((self.phase, self.total))
        if self.phase not in self.peaks or self.total > self.peaks[self.phase].bytes:
            self.peaks[self.phase] = Peak(self.total, dict(self.current), self.after)

    # The mode -------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor first: what it makes of the operation comes here again
        if func is torch.ops._c10d_functional.wait_tensor.default and isinstance(args[0], FakeTensor):
            return args[0]  # as the real one, which returns its argument; the fake one makes a copy
        result = func(*args, **(kwargs or {}))
        name = func.name()
        if name == "c10d::_allgather_base_":
            self.watch(args[0], "communication")
        elif name == "c10d::_reduce_scatter_base_":
            self.watch(args[1], "communication")
        elif name == "fsdp::all_gather_copy_in":
            each_tensor(result, lambda t: self.watch(t, "communication"))
        elif name == "fsdp::split_with_sizes_copy":
            each_tensor((kwargs or {}).get("out"), self._fill)
        # In backward autograd runs without gradients, except where a forward pass is recomputed.
        category: Category = "activations" if torch.is_grad_enabled() else "temporaries"
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if id(storage) in self._storages:
                    self._measure(storage)
                else:
                    self._add(storage, category)
        self._find_emptied()
        self._note()
        return result


def need_private_torch() -> None:
    """Checks that this torch has what simulating needs.

    Raises:
        RuntimeError: it has not.
    """
    if _MISSING is not None:
        raise RuntimeError(
            f"Memory cannot be simulated with torch `{torch.__version__}`, which lacks a name that this needs"
            f" (`{_MISSING}`). Estimate with torch 2.13; training does not need it."
        ) from _MISSING


def fake_mode() -> FakeTensorMode:
    """The mode to which fake tensors belong; they have shapes, dtypes and storages of a size, and no data."""
    need_private_torch()
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def fake_tensors(mode: FakeTensorMode) -> Iterator[None]:
    """Makes every new tensor a fake one."""
    with mode, _DeepCopies():
        yield


class _DeepCopies(TorchFunctionMode):
    """Copies fake tensors as tensors: `Tensor.__deepcopy__` would go on to copy their mode and what else they hold."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__ and isinstance(args[0], FakeTensor):
            tensor, memo = args
            copy: Tensor = tensor.detach().clone()
            if isinstance(tensor, nn.Parameter):
                copy = nn.Parameter(copy, requires_grad=tensor.requires_grad)
            memo[id(tensor)] = copy
            return copy
        return func(*args, **(kwargs or {}))


def fake_copy(tree: Any, mode: FakeTensorMode) -> Any:
    """A nested container with every tensor replaced by a fake one of the same kind."""
    return tree_map_only(Tensor, lambda t: t if isinstance(t, FakeTensor) else mode.from_tensor(t), tree)


def each_tensor(tree: Any, do: Callable[[Tensor], Any]) -> None:
    """Calls a function on every tensor of a nested container."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            do(leaf)


def drop_data(module: nn.Module, mode: FakeTensorMode) -> None:
    """Replaces parameters and buffers that have data by fake ones; those that are shared stay shared."""
    replaced: dict[int, Tensor] = {}
    for child in module.modules():
        for tensors in (child._parameters, child._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and not isinstance(tensor, FakeTensor):
                    if id(tensor) not in replaced:
                        replaced[id(tensor)] = mode.from_tensor(tensor)
                    tensors[name] = replaced[id(tensor)]  # type: ignore[assignment]


def convert_parameters(module: nn.Module, convert: Callable[[Tensor], Tensor]) -> nn.Module:
    """`Module._apply` for fake parameters: what ``convert`` changes is replaced, and not swapped.

    torch swaps the contents of fake parameters, which a weak reference to one of them forbids.
    """
    replaced: dict[int, nn.Parameter] = {}
    for child in module.modules():
        for name, param in child._parameters.items():
            if param is not None:
                if id(param) not in replaced:
                    with torch.no_grad():
                        new = convert(param)
                    replaced[id(param)] = param if new is param else nn.Parameter(new, param.requires_grad)
                child._parameters[name] = replaced[id(param)]
        for name, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[name] = convert(buffer)
    return module


def impossible_operation(error: BaseException) -> str | None:
    """The name of the operation that fake tensors cannot do, when that is what an error is about."""
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException | UnsupportedOperatorException):
        return str(error.func)
    return None


@contextmanager
def fake_process_group(world_size: int) -> Iterator[None]:
    """Makes this process rank 0 of ``world_size`` for torch, without the others: collectives return at once.

    Raises:
        RuntimeError: the process is in a process group already.
    """
    need_private_torch()
    if dist.is_initialized():
        raise RuntimeError(
            f"This process is rank {dist.get_rank()} of a `{dist.get_backend()}` process group, and an estimate"
            " pretends to be one of other ranks. Run it in a process of its own: `lightning-bwdopt estimate`."
        )
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
