"""What cannot work with the optimizer in backward: one function a rule, each with value, reason and remedy."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_bwdopt.sharding import class_name

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.plugins.precision import Precision

# Arguments of Lightning's `FSDPStrategy` (FSDP1) that this FSDP2 strategy does not take, and what to write instead.
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
    "activation_checkpointing": "use `activation_checkpointing_policy`, a set of module classes",
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


def choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """An option that takes one of a few words."""
    if value not in choices:
        hint = difflib.get_close_matches(str(value), choices, n=1)
        raise ValueError(
            f"`{name}={value!r}` is unknown."
            + (f" Did you mean `{hint[0]!r}`?" if hint else "")
            + f" Choose one of {', '.join(map(repr, choices))}."
        )


def unknown_arguments(arguments: Collection[str], known: Collection[str]) -> None:
    """Arguments of FSDP1's strategy, and typing errors."""
    for name in arguments:
        if name in FSDP1_ARGUMENTS:
            raise TypeError(
                f"`{name}` is an argument of `FSDPStrategy` (FSDP1); this strategy is FSDP2: {FSDP1_ARGUMENTS[name]}."
            )
        hint = difflib.get_close_matches(name, known, n=1)
        raise TypeError(
            f"`{name}` is not an argument of this strategy."
            + (f" Did you mean `{hint[0]}`?" if hint else f" It takes {', '.join(known)}.")
        )


def no_shard() -> None:
    """`sharding_strategy="NO_SHARD"`, which FSDP2 does not have."""
    raise ValueError(
        "`sharding_strategy='NO_SHARD'` does not exist in FSDP2: with nothing sharded there is no strategy for several"
        " devices here. Use `'SHARD_GRAD_OP'`, or `strategy='single_device_optim_in_bwd'` on one device."
    )


def parallel_sizes(data_parallel_size: int, tensor_parallel_size: int, world_size: int) -> None:
    """Each rank has one place in the mesh of data-parallel and tensor-parallel ranks."""
    if data_parallel_size < 1 or tensor_parallel_size < 1 or data_parallel_size * tensor_parallel_size != world_size:
        raise ValueError(
            f"`data_parallel_size={data_parallel_size}` times `tensor_parallel_size={tensor_parallel_size}` is"
            f" {data_parallel_size * tensor_parallel_size} ranks, and there are {world_size}. Choose sizes whose"
            f" product is {world_size}; `data_parallel_size='auto'` is the world size over `tensor_parallel_size`."
        )


def hybrid_on_one_node(num_nodes: int, num_processes: int) -> None:
    """`HYBRID_SHARD` without sizes replicates across nodes, and there is one."""
    if num_nodes == 1:
        raise ValueError(
            f"`sharding_strategy='HYBRID_SHARD'` without `device_mesh` shards inside each node and replicates across"
            f" nodes, and there is one node of {num_processes} ranks: nothing would be replicated. Pass"
            " `device_mesh=(replicate, shard)`, or use `'FULL_SHARD'`."
        )


def hybrid_tensor_parallel(sharding_strategy: str, tensor_parallel_size: object) -> None:
    """`HYBRID_SHARD` takes all ranks for its two mesh dimensions."""
    if sharding_strategy == "HYBRID_SHARD" and tensor_parallel_size != 1:
        raise ValueError(
            f"`sharding_strategy='HYBRID_SHARD'` and `tensor_parallel_size={tensor_parallel_size}` would need a mesh of"
            " three dimensions. Use `'FULL_SHARD'` beside tensor parallelism, or apply `fully_shard` with a mesh of"
            " your own in `configure_model`."
        )


def offload_race(device: torch.device, torch_version: str) -> None:
    """Host offload before torch 2.13: the hooks would read gradients that are still being copied."""
    if device.type != "cpu" and tuple(map(int, torch_version.split(".")[:2])) < (2, 13):
        raise MisconfigurationException(
            f"`cpu_offload` with torch `{torch_version}`: FSDP2 hands a gradient to the optimizer in backward while its"
            " copy to the host is in flight (pytorch#180666), which gives silently wrong updates. Use torch 2.13 or"
            " newer, or `enabled=False`."
        )


def hybrid_mesh(sharding_strategy: str, device_mesh: Sequence[int] | None, world_size: int | None = None) -> None:
    """`HYBRID_SHARD` and its `(replicate, shard)` sizes belong together and multiply to the world size."""
    if sharding_strategy != "HYBRID_SHARD":
        if device_mesh is not None:
            raise ValueError(
                f"`device_mesh={device_mesh!r}` goes with `sharding_strategy='HYBRID_SHARD'`, and it is"
                f" `{sharding_strategy!r}`. Leave `device_mesh` out, or choose `'HYBRID_SHARD'`."
            )
        return
    if device_mesh is not None and (len(device_mesh) != 2 or any(size < 1 for size in device_mesh)):
        raise ValueError(
            f"`device_mesh={device_mesh!r}` is not a pair of positive sizes. Pass `(replicate, shard)`, as in `(2, 4)`."
        )
    if world_size is not None and device_mesh is not None and device_mesh[0] * device_mesh[1] != world_size:
        raise ValueError(
            f"`device_mesh={tuple(device_mesh)}` is {device_mesh[0]} x {device_mesh[1]} ="
            f" {device_mesh[0] * device_mesh[1]} ranks, and there are {world_size}. Choose sizes whose product is"
            f" {world_size}."
        )


def one_device(devices: Sequence[torch.device]) -> None:
    """The single-device strategy with several devices."""
    if len(devices) > 1:
        raise MisconfigurationException(
            f"`devices={len(devices)}` was asked for, and `SingleDeviceOptimInBwdStrategy` trains on one. Use"
            " `strategy='fsdp_optim_in_bwd'` for several, or `devices=1`."
        )


def grad_scaler(plugin: Precision) -> None:
    """fp16 with loss scaling: the hooks would step scaled gradients."""
    if getattr(plugin, "scaler", None) is not None or plugin.precision == "16-mixed":
        raise MisconfigurationException(
            f"`precision='{plugin.precision}'` scales the loss, and gradients can only be unscaled once all of them are"
            " there, after the optimizer has stepped in backward. Use `precision='bf16-mixed'`."
        )


def double_precision(plugin: Precision) -> None:
    """`64-true` under FSDP2, as Lightning itself refuses it for instances."""
    if plugin.precision == "64-true":
        raise MisconfigurationException(
            "`precision='64-true'` is not supported with FSDP2. Use `'32-true'`, `'bf16-mixed'` or `'bf16-true'`."
        )


def sync_batchnorm(layer_sync: object | None) -> None:
    """Lightning ignores the option for every FSDP2 strategy."""
    if layer_sync is not None:
        raise MisconfigurationException(
            "`sync_batchnorm=True` has no effect with FSDP2 in Lightning and would be ignored silently. Convert the"
            " model yourself: `torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)` in `configure_model`."
        )


def weight_averaging_callbacks(trainer: Trainer) -> None:
    """Callbacks that deep-copy the module, which a sharded one does not allow."""
    from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging

    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
            raise MisconfigurationException(
                f"`{type(callback).__name__}` deep-copies the LightningModule, which FSDP2 does not allow for sharded"
                " modules. Leave the callback out, or train on one device (`single_device_optim_in_bwd`)."
            )


def wrapped_module(module: nn.Module) -> None:
    """Modules in a DDP or FSDP1 wrapper, whose own hooks own the gradients."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    for name, child in module.named_modules():
        if isinstance(child, DistributedDataParallel | FullyShardedDataParallel):
            raise TypeError(
                f"`{name or class_name(module)}` is wrapped in `{type(child).__name__}`, which reduces gradients in"
                " buffers of its own, after the hooks. Pass the bare module; the strategy shards it with FSDP2."
            )


def not_last_backward(sharded: Iterable[Any]) -> None:
    """FSDP2's `set_is_last_backward(False)`: hooks are called, but nothing waits for them at the end."""
    for module in sharded:
        if not module._get_fsdp_state()._state_ctx.is_last_backward:  # torch 2.13, without a public getter
            raise RuntimeError(
                f"`set_is_last_backward(False)` is set on `{class_name(module)}`: FSDP2 would not wait for the steps"
                " made in this backward. Leave it at `True`, and use `accumulate_grad_batches`."
            )


def directly_owned_parameters(module: LightningModule) -> None:
    """A LightningModule with manual optimization cannot own parameters under FSDP2."""
    owned = [name for name, _ in module.named_parameters(recurse=False)]
    if owned:
        raise MisconfigurationException(
            f"`{class_name(module)}` uses manual optimization and owns the parameter `{owned[0]}` itself. FSDP2"
            " reduces gradients of modules that are called, and inside `training_step` only children are. Move the"
            " parameter into a child module, or return the loss and use automatic optimization or `OptimInBwdMixin`."
        )


def parameters_on_meta(names: Sequence[str]) -> None:
    """Parameters and buffers without data, which would train as garbage."""
    if names:
        raise RuntimeError(
            f"{len(names)} parameters or buffers are on the `meta` device, without data, after `configure_model`:"
            f" {', '.join(f'`{name}`' for name in names[:5])}{', …' if len(names) > 5 else ''}. Load them there"
            " (`lightning_bwdopt.loading.load_pretrained`), or give their module a `reset_parameters` method, which is"
            " called to fill them."
        )


def foreign_parameters(optimizer: Optimizer, module: nn.Module) -> None:
    """An optimizer with parameters that are not the model's: they would never receive a gradient."""
    known = {id(p) for p in module.parameters()}
    foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
    if foreign:
        raise MisconfigurationException(
            f"`{type(optimizer).__name__}` holds {len(foreign)} parameters that `{class_name(module)}` does"
            f" not have, the first of shape `{tuple(foreign[0].shape)}`; they would never be trained. Build the"
            " optimizer in `configure_optimizers` from `self.parameters()`."
        )


def trainable(optimizer: Optimizer) -> None:
    """An optimizer in which everything is frozen."""
    params: Iterable[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(p.requires_grad for p in params):
        raise MisconfigurationException(
            f"`{type(optimizer).__name__}` holds {len(list(params))} parameters and none requires a gradient: nothing"
            " would be trained. Unfreeze some, or set `enabled=False`."
        )


def clipping(value: float | None, treatment: str) -> None:
    """`gradient_clip_val` where it is to be an error."""
    if treatment == "error" and value:
        raise MisconfigurationException(
            f"`gradient_clip_val={value}` needs all gradients at once, and the optimizer in backward uses each as it"
            " comes. Pass `gradient_clipping='exact'` (clipping by norm then takes a second backward pass),"
            " `'disable'`, or leave `gradient_clip_val` out."
        )


def takes_retain_graph(module: LightningModule) -> None:
    """An override of ``backward`` where clipping by norm walks the graph twice."""
    parameters = inspect.signature(module.backward).parameters
    if "retain_graph" not in parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        raise MisconfigurationException(
            f"`{class_name(module)}.backward` takes `{', '.join(parameters)}` and no `retain_graph`. Exact clipping by"
            " norm runs two backward passes over one graph. Declare `backward(self, loss, *args, **kwargs)` and pass"
            " them on to `loss.backward(*args, **kwargs)`, or clip by value (`gradient_clip_algorithm='value'`)."
        )
