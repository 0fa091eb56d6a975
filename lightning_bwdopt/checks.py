"""What cannot work with the optimizer in backward: one function a rule, each with value, reason and remedy.

``check_…`` raises where its rule is broken; the others return the exception for the caller to raise. README's table of
limits has a row for each. What the core itself cannot do, in plain torch too, is in `refusals.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_bwdopt.sharding import class_name

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.plugins.precision import Precision


class HalfAppliedStepError(RuntimeError):
    """A checkpoint was to be saved while a step is half applied."""


# The Trainer's options --------------------------------------------------------------------------------------------


def check_one_device(devices: Sequence[torch.device]) -> None:
    """The single-device strategy with several devices."""
    if len(devices) > 1:
        raise MisconfigurationException(
            f"`devices={len(devices)}` was asked for, and `SingleDeviceOptimInBwdStrategy` trains on one. Use"
            " `strategy='fsdp_optim_in_bwd'` for several, or `devices=1`."
        )


def check_grad_scaler(plugin: Precision) -> None:
    """fp16 with loss scaling: the hooks would step scaled gradients."""
    if getattr(plugin, "scaler", None) is not None or plugin.precision == "16-mixed":
        raise MisconfigurationException(
            f"`precision='{plugin.precision}'` scales the loss, and gradients can only be unscaled once all of them are"
            " there, after the optimizer has stepped in backward. Use `precision='bf16-mixed'`."
        )


def check_double_precision(plugin: Precision) -> None:
    """`64-true` under FSDP2, as Lightning itself refuses it for instances."""
    if plugin.precision == "64-true":
        raise MisconfigurationException(
            "`precision='64-true'` is not supported with FSDP2. Use `'32-true'`, `'bf16-mixed'` or `'bf16-true'`."
        )


def check_sync_batchnorm(layer_sync: object | None) -> None:
    """`sync_batchnorm=True`, which Lightning ignores for every FSDP2 strategy."""
    if layer_sync is not None:
        raise MisconfigurationException(
            "`sync_batchnorm=True` has no effect with FSDP2 in Lightning and would be ignored silently. Convert the"
            " model yourself: `torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)` in `configure_model`."
        )


def check_weight_averaging(trainer: Trainer) -> None:
    """Callbacks that deep-copy the module, which a sharded one does not allow."""
    from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging

    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
            raise MisconfigurationException(
                f"`{type(callback).__name__}` deep-copies the LightningModule, which FSDP2 does not allow for sharded"
                " modules. Leave the callback out, or train on one device (`single_device_optim_in_bwd`)."
            )


def check_offload(device: torch.device, torch_version: str) -> None:
    """Host offload before torch 2.13: the hooks would read gradients that are still being copied."""
    if device.type != "cpu" and tuple(map(int, torch_version.split(".")[:2])) < (2, 13):
        raise MisconfigurationException(
            f"`cpu_offload` with torch `{torch_version}`: FSDP2 hands a gradient to the optimizer in backward while its"
            " copy to the host is in flight (pytorch#180666), which gives silently wrong updates. Use torch 2.13 or"
            " newer, or `enabled=False`."
        )


# The module and its optimizers ------------------------------------------------------------------------------------


def base_order(name: str) -> TypeError:
    """`OptimInBwdMixin` after `LightningModule` in the bases of a class."""
    return TypeError(
        f"`class {name}` names `LightningModule` before `OptimInBwdMixin`, so that its `automatic_optimization` would"
        f" hide the mixin's. Write `class {name}(OptimInBwdMixin, LightningModule)`."
    )


def check_wrapped(module: nn.Module) -> None:
    """Modules in a DDP or FSDP1 wrapper, whose own hooks own the gradients."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    for name, child in module.named_modules():
        if isinstance(child, DistributedDataParallel | FullyShardedDataParallel):
            raise TypeError(
                f"`{name or class_name(module)}` is wrapped in `{type(child).__name__}`, which reduces gradients in"
                " buffers of its own, after the hooks. Pass the bare module; the strategy shards it with FSDP2."
            )


def check_root_parameters(module: LightningModule) -> None:
    """A LightningModule with manual optimization that owns parameters itself, under FSDP2."""
    owned = [name for name, _ in module.named_parameters(recurse=False)]
    if owned:
        raise MisconfigurationException(
            f"`{class_name(module)}` uses manual optimization and owns the parameter `{owned[0]}` itself. FSDP2"
            " reduces gradients of modules that are called, and inside `training_step` only children are. Move the"
            " parameter into a child module, or return the loss and use automatic optimization or `OptimInBwdMixin`."
        )


def check_on_meta(names: Sequence[str]) -> None:
    """Parameters and buffers without data, which would train as garbage."""
    if names:
        raise RuntimeError(
            f"{len(names)} parameters or buffers are on the `meta` device, without data, after `configure_model`:"
            f" {', '.join(f'`{name}`' for name in names[:5])}{', …' if len(names) > 5 else ''}. Load them there"
            " (`lightning_bwdopt.load_pretrained`), or give their module a `reset_parameters` method, which is"
            " called to fill them."
        )


def check_foreign_parameters(optimizer: Optimizer, module: nn.Module) -> None:
    """An optimizer with parameters that are not the model's: they would never receive a gradient."""
    known = {id(p) for p in module.parameters()}
    foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
    if foreign:
        raise MisconfigurationException(
            f"`{type(optimizer).__name__}` holds {len(foreign)} parameters that `{class_name(module)}` does"
            f" not have, the first of shape `{tuple(foreign[0].shape)}`; they would never be trained. Build the"
            " optimizer in `configure_optimizers` from `self.parameters()`."
        )


# Clipping ---------------------------------------------------------------------------------------------------------


def check_clipping(value: float | None, treatment: str) -> None:
    """`gradient_clip_val` where it is to be an error."""
    if treatment == "error" and value:
        raise MisconfigurationException(
            f"`gradient_clip_val={value}` needs all gradients at once, and the optimizer in backward uses each as it"
            " comes. Pass `gradient_clipping='exact'` (clipping by norm then takes a second backward pass),"
            " `'disable'`, or leave `gradient_clip_val` out."
        )


def check_clipping_hook(module: LightningModule, treatment: str) -> None:
    """An override of `configure_gradient_clipping` where clipping is not disabled."""
    if treatment != "disable" and is_overridden("configure_gradient_clipping", module):
        raise MisconfigurationException(
            f"`{class_name(module)}.configure_gradient_clipping` is overridden, and it would be called when the"
            f" gradients are gone (`gradient_clipping={treatment!r}`). Remove it and use `gradient_clip_val`, or pass"
            " `gradient_clipping='disable'`."
        )


def check_retain_graph(module: LightningModule) -> None:
    """An override of `backward` that cannot be called twice, where clipping by norm walks the graph twice."""
    parameters = inspect.signature(module.backward).parameters
    if "retain_graph" not in parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        raise MisconfigurationException(
            f"`{class_name(module)}.backward` takes `{', '.join(parameters)}` and no `retain_graph`. Exact clipping by"
            " norm runs two backward passes over one graph. Declare `backward(self, loss, *args, **kwargs)` and pass"
            " them on to `loss.backward(*args, **kwargs)`, or clip by value (`gradient_clip_algorithm='value'`)."
        )


def late_clipping(value: float, algorithm: str) -> MisconfigurationException:
    """A call of `clip_gradients` that is not the Trainer's own, when the optimizer has stepped."""
    return MisconfigurationException(
        f"`clip_gradients({value}, {algorithm!r})` came after the optimizer had stepped in backward. Set"
        " `Trainer(gradient_clip_val=…)` instead, which `gradient_clipping='exact'` clips by before the step, and have"
        " `training_step` return its loss (`OptimInBwdMixin` for the manual loop): Lightning does not take it for a"
        " module that calls `manual_backward` itself."
    )


# While training ---------------------------------------------------------------------------------------------------


def check_last_backward(sharded: Iterable[Any]) -> None:
    """FSDP2's `set_is_last_backward(False)`: hooks are called, but nothing waits for them at the end."""
    for module in sharded:
        if not module._get_fsdp_state()._state_ctx.is_last_backward:  # torch 2.13, without a public getter
            raise RuntimeError(
                f"`set_is_last_backward(False)` is set on `{class_name(module)}`: FSDP2 would not wait for the steps"
                " made in this backward. Leave it at `True`, and use `accumulate_grad_batches`."
            )


def stepped_before_backward() -> RuntimeError:
    """A backward through parameters that an earlier one of the same step has stepped."""
    return RuntimeError(
        "This backward needs parameters as they were before an earlier backward of the same step, which has stepped"
        " them. Sum the losses and call backward once. (autograd says: a tensor was modified by an inplace operation.)"
    )


def stepped_in_backward(count: int) -> RuntimeError:
    """A backward in which autograd finds a tensor modified, perhaps a parameter that it has stepped."""
    return RuntimeError(
        f"A tensor that this backward needs was modified in place, and {count} parameters have been stepped in it."
        " Where the model also uses a parameter detached (`param.detach()`), use `param.detach().clone()`. Otherwise"
        " the operation is the model's own, and fails with the mode off (`enabled=False`), too."
    )


def half_applied_step() -> HalfAppliedStepError:
    """A checkpoint of weights of which some have been stepped and others not."""
    return HalfAppliedStepError(
        "Some parameters have been stepped in backward in a step that has not ended, so the weights are those of no"
        " step and are not saved. Load the last checkpoint; save in `on_train_batch_end` or later."
    )
