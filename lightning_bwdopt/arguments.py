"""What arguments may be: one of a few words, sizes that fit the ranks, and FSDP1's names with what replaces them."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

Granularity = Literal["unit", "parameter"]
GradientClipping = Literal["disable", "error", "exact"]
NonFinite = Literal["ignore", "error", "skip"]
ShardingStrategy = Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"]
StateDictType = Literal["full", "sharded"]

# Arguments of Lightning's `FSDPStrategy` (FSDP1) that the FSDP2 strategy does not take, and what to write instead.
FSDP1_ARGUMENTS = {
    "mixed_precision": "use `mp_policy`, a `torch.distributed.fsdp.MixedPrecisionPolicy` or a dict of its fields",
    "use_orig_params": "leave it out: FSDP2 always keeps the original parameters",
    "ignored_states": "freeze them, or apply `fully_shard(..., ignored_params=...)` yourself in `configure_model`",
    "ignored_parameters": "freeze them, or apply `fully_shard(..., ignored_params=...)` yourself in `configure_model`",
    "ignored_modules": "apply `fully_shard` in `configure_model` to the modules that you want sharded",
    "limit_all_gathers": "leave it out: FSDP2 limits them by itself",
    "forward_prefetch": "call `set_modules_to_forward_prefetch` on the sharded modules in `configure_model`",
    "backward_prefetch": "leave it out: FSDP2 prefetches in backward by itself",
    "sync_module_states": "leave it out: seed every rank alike, or load a checkpoint",
    "activation_checkpointing": "use `activation_checkpointing_policy`, a set of module classes or a callable",
    "save_distributed_checkpoint": "use `state_dict_type`: `'sharded'` or `'full'`",
    "process_group": "use `device_mesh` with `sharding_strategy='HYBRID_SHARD'`",
    "param_init_fn": "build the model in `configure_model`",
    "accelerator": "pass it to the Trainer",
    "device_id": "pass `devices` to the Trainer",
    "parallel_devices": "pass `devices` to the Trainer",
    "cluster_environment": "pass it to the Trainer, `plugins=[...]`",
    "checkpoint_io": "pass it to the Trainer, `plugins=[...]`",
    "precision_plugin": "pass `precision` or `plugins=[...]` to the Trainer",
}


def check_choice(name: str, value: Any, choices: Any) -> None:
    """An argument that takes one of a few words.

    Args:
        name: The argument.
        value: What was passed.
        choices: A ``Literal`` of the words.

    Raises:
        ValueError: it is none of them.
    """
    words = get_args(choices)
    if value not in words:
        hint = difflib.get_close_matches(str(value), words, n=1)
        raise ValueError(
            f"`{name}={value!r}` is unknown."
            + (f" Did you mean `{hint[0]!r}`?" if hint else "")
            + f" Choose one of {', '.join(map(repr, words))}."
        )


def check_flag(name: str, value: Any) -> None:
    """An argument that is on or off; the text ``"false"`` would be on.

    Raises:
        TypeError: it is neither ``True`` nor ``False``.
    """
    if not isinstance(value, bool):
        raise TypeError(f"`{name}={value!r}` is neither `True` nor `False`. Pass one of them.")


def check_size(name: str, value: Any) -> None:
    """A number of ranks.

    Raises:
        TypeError: it is no whole number.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"`{name}={value!r}` is not a whole number. Pass how many ranks there are in this direction.")


def check_names(unknown: Collection[str], known: Collection[str], replaced: Mapping[str, str] | None = None) -> None:
    """Arguments that a strategy does not have: a typing error, or one of FSDP1's.

    Args:
        unknown: The names that were passed beside those of the strategy.
        known: The strategy's own.
        replaced: What to write instead of FSDP1's.

    Raises:
        TypeError: there is one.
    """
    for name in unknown:
        if replaced and name in replaced:
            raise TypeError(
                f"`{name}` is an argument of `FSDPStrategy` (FSDP1); this strategy is FSDP2: {replaced[name]}."
            )
        hint = difflib.get_close_matches(name, known, n=1)
        raise TypeError(
            f"`{name}` is not an argument of this strategy."
            + (f" Did you mean `{hint[0]}`?" if hint else f" It takes {', '.join(known)}.")
        )


def check_sharding_strategy(value: str) -> None:
    """The words of FSDP1, without the one that has no meaning in FSDP2."""
    if value == "NO_SHARD":
        raise ValueError(
            "`sharding_strategy='NO_SHARD'` does not exist in FSDP2: with nothing sharded there is no strategy for"
            " several devices here. Use `'SHARD_GRAD_OP'`, or `strategy='single_device_optim_in_bwd'` on one device."
        )
    check_choice("sharding_strategy", value, ShardingStrategy)


def check_parallel_sizes(data_parallel_size: int, tensor_parallel_size: int, world_size: int) -> None:
    """Each rank has one place in the mesh of data-parallel and tensor-parallel ranks."""
    if data_parallel_size < 1 or tensor_parallel_size < 1 or data_parallel_size * tensor_parallel_size != world_size:
        raise ValueError(
            f"`data_parallel_size={data_parallel_size}` times `tensor_parallel_size={tensor_parallel_size}` is"
            f" {data_parallel_size * tensor_parallel_size} ranks, and the world size is {world_size}. Choose sizes with"
            " that product; `data_parallel_size='auto'` is the world size over `tensor_parallel_size`."
        )


def check_hybrid_mesh(sharding_strategy: str, device_mesh: Sequence[int] | None, world_size: int | None = None) -> None:
    """`HYBRID_SHARD` and its `(replicate, shard)` sizes belong together and multiply to the world size."""
    if sharding_strategy != "HYBRID_SHARD":
        if device_mesh is not None:
            raise ValueError(
                f"`device_mesh={device_mesh!r}` goes with `sharding_strategy='HYBRID_SHARD'`, and it is"
                f" `{sharding_strategy!r}`. Leave `device_mesh` out, or choose `'HYBRID_SHARD'`."
            )
        return
    sizes = device_mesh if isinstance(device_mesh, list | tuple) else ()
    whole = len(sizes) == 2 and all(isinstance(size, int) and size >= 1 for size in sizes)
    if device_mesh is not None and not whole:
        raise ValueError(
            f"`device_mesh={device_mesh!r}` is not a pair of positive sizes. Pass `(replicate, shard)`, as in `(2, 4)`."
        )
    if world_size is not None and device_mesh is not None and device_mesh[0] * device_mesh[1] != world_size:
        raise ValueError(
            f"`device_mesh={tuple(device_mesh)}` is {device_mesh[0]} x {device_mesh[1]} ="
            f" {device_mesh[0] * device_mesh[1]} ranks, and there are {world_size}. Choose sizes whose product is"
            f" {world_size}."
        )


def check_hybrid_nodes(num_nodes: int, num_processes: int) -> None:
    """`HYBRID_SHARD` without sizes replicates across nodes, so there must be several."""
    if num_nodes == 1:
        raise ValueError(
            f"`sharding_strategy='HYBRID_SHARD'` without `device_mesh` shards inside each node and replicates across"
            f" nodes, and there is one node of {num_processes} ranks: nothing would be replicated. Pass"
            " `device_mesh=(replicate, shard)`, or use `'FULL_SHARD'`."
        )


def check_hybrid_tensor_parallel(sharding_strategy: str, tensor_parallel_size: object) -> None:
    """`HYBRID_SHARD` takes all ranks for its two mesh dimensions."""
    if sharding_strategy == "HYBRID_SHARD" and tensor_parallel_size != 1:
        raise ValueError(
            f"`sharding_strategy='HYBRID_SHARD'` and `tensor_parallel_size={tensor_parallel_size}` would need a mesh of"
            " three dimensions. Use `'FULL_SHARD'` beside tensor parallelism, or apply `fully_shard` with a mesh of"
            " your own in `configure_model`."
        )


def unit_lists(units: Any) -> list[list[Tensor]] | None:
    """The ``units`` of a core as lists.

    Raises:
        TypeError: they are no lists of tensors; anything else would be passed over in silence.
    """
    if units is None:
        return None
    remedy = "Pass a list of lists of parameters, `[list(block.parameters()) for block in blocks]`, or `None`."
    if not isinstance(units, Iterable):
        raise TypeError(f"`units={units!r}` is not a list. {remedy}")
    lists = []
    for unit in units:
        if isinstance(unit, Tensor | str) or not isinstance(unit, Iterable):
            raise TypeError(f"`units` has a `{type(unit).__name__}` in the place of a list. {remedy}")
        lists.append(list(unit))
        if wrong := [entry for entry in lists[-1] if not isinstance(entry, Tensor)]:
            raise TypeError(f"`units` has `{wrong[0]!r}` in the place of a parameter. {remedy}")
    return lists


def check_timeout(value: Any) -> None:
    """How long a collective call may take.

    Raises:
        TypeError: it is no ``timedelta``; a number would not say of what.
    """
    if value is not None and not isinstance(value, timedelta):
        raise TypeError(f"`timeout={value!r}` is not a `datetime.timedelta`. Pass one, as in `timedelta(minutes=30)`.")


def check_offload_policy(value: Any) -> None:
    """Whether parameters stay on the host, or how; any other object would count as ``True``.

    Raises:
        TypeError: it is neither a flag nor FSDP2's policy.
    """
    if not isinstance(value, bool | CPUOffloadPolicy):
        raise TypeError(
            f"`cpu_offload={value!r}` is neither `True` nor `False` nor a `torch.distributed.fsdp.CPUOffloadPolicy`"
            " (FSDP1's class is another one). Pass one of them."
        )


def mixed_precision_policy(policy: Any) -> MixedPrecisionPolicy | None:
    """FSDP2's policy, of what was passed: itself, or a dict of its fields with dtypes by name, as YAML has it.

    Raises:
        TypeError: it is neither, or a field has a value of another type.
        ValueError: a field or a dtype that there is not.
    """
    if policy is None:
        return None
    if not isinstance(policy, MixedPrecisionPolicy | dict):
        raise TypeError(
            f"`mp_policy={policy!r}` is neither a `torch.distributed.fsdp.MixedPrecisionPolicy` (FSDP1's"
            " `MixedPrecision` is another class) nor a dict of its fields. Pass, say,"
            " `MixedPrecisionPolicy(param_dtype=torch.bfloat16)`, or leave it out to follow `Trainer(precision=…)`."
        )
    parsed = dict(policy if isinstance(policy, dict) else vars(policy))
    known = MixedPrecisionPolicy.__dataclass_fields__
    for key, value in parsed.items():
        if key not in known:
            raise ValueError(f"`mp_policy` has no field `{key}`. It has {', '.join(known)}.")
        if not key.endswith("dtype"):
            check_flag(f"mp_policy.{key}", value)
        elif isinstance(value, str):
            dtype = getattr(torch, value.removeprefix("torch."), None)
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"`mp_policy` has `{key}: {value}`, which is no torch dtype. Write `bfloat16`, say.")
            parsed[key] = dtype
        elif not (value is None or isinstance(value, torch.dtype)):
            raise TypeError(f"`mp_policy` has `{key}: {value!r}`, which is no torch dtype. Write `bfloat16`, say.")
    return MixedPrecisionPolicy(**parsed)
