"""The strategies against Lightning's own, to the bit: one device and two FSDP2 ranks, automatic loop and mixin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import lightning_bwdopt
from helpers import Lit, Net, assert_equal, loader, observables, run_distributed, seeded, trainer
from lightning_bwdopt import (
    FSDPOptimInBwdStrategy,
    OptimInBwdMixin,
    OptimizerInBackward,
    SingleDeviceOptimInBwdStrategy,
)
from lightning_bwdopt.clipping import total_norm


class HandSharded(Lit):
    """What a user of the stock strategy writes."""

    def configure_model(self) -> None:
        if isinstance(self.net, FSDPModule):
            return
        mesh = self.device_mesh["data_parallel"]
        for block in self.net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.net, mesh=mesh)


class Mixed(OptimInBwdMixin, Lit):
    """The manual-optimization path."""


class ThroughForward(Lit):
    """Calls itself in `training_step`, as many modules do."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.losses.append(loss.detach().clone())
        self.rates.append([group["lr"] for group in self.trainer.optimizers[0].param_groups])
        return loss


class Watch(Callback):
    """Records the rates that the hooks used, and how many gradients are alive when they run and afterwards."""

    def __init__(self) -> None:
        self.used: list[list[float]] = []
        self.alive: list[int] = []
        self.left = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        params = list(pl_module.parameters())
        for param in params:
            param.register_post_accumulate_grad_hook(
                lambda _: self.alive.append(sum(p.grad is not None for p in params))
            )

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.left += sum(p.grad is not None for p in pl_module.parameters())

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        (core,) = trainer.strategy.optimizers_in_backward
        self.used.append([group["lr"] for group in core.used_groups])


def fit(make: type[LightningModule], strategy: Any, devices: int = 1, **kwargs: Any) -> dict[str, Any]:
    module = seeded(make)
    run = trainer(strategy=strategy, devices=devices, **kwargs)
    run.fit(module, loader(ranks=devices))
    cores = getattr(run.strategy, "optimizers_in_backward", [])
    assert [core.optimizer for core in cores] == (run.strategy.optimizers if cores else [])
    assert not any(core.attached for core in cores)
    if kwargs.get("callbacks"):  # the watch's hooks stay, ours must not
        assert all(len(p._post_accumulate_grad_hooks) == 1 for p in module.parameters())
    else:
        assert all(not p._post_accumulate_grad_hooks for p in module.parameters())
    return observables(module, run)


STEPS = 8
MODULES = [Lit, Mixed, ThroughForward]
MODES: list[dict[str, Any]] = [{"enabled": False}, {"granularity": "unit"}, {"granularity": "parameter"}]


def compare(make_strategy: Callable[..., Any], expected: dict[str, Any], devices: int) -> None:
    for make in MODULES:
        for mode in MODES:
            watch = Watch()
            enabled = mode.get("enabled", True)
            callbacks = [watch] if enabled else []
            actual = fit(make, make_strategy(**mode), devices, callbacks=callbacks, max_steps=STEPS)
            assert_equal(actual, expected, f"{make.__name__} {mode}")
            if enabled:
                assert watch.left == 0
                assert watch.used == expected["rates"]
                assert watch.used[0] == [0.0, 0.0]
                assert max(watch.alive) == (6 if mode["granularity"] == "unit" else 1)


def test_one_device_equals_lightnings_strategy() -> None:
    expected = fit(Lit, "auto", max_steps=STEPS)
    assert expected["global_step"] == STEPS
    compare(SingleDeviceOptimInBwdStrategy, expected, devices=1)


def check_two_ranks() -> dict[str, Any]:
    stock = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    expected = fit(HandSharded, stock, devices=2, max_steps=STEPS)
    torch.manual_seed(3)
    start = dict(Net().named_parameters(prefix="net"))
    assert all(not torch.equal(weight, start[name]) for name, weight in expected["weights"].items())
    compare(FSDPOptimInBwdStrategy, expected, devices=2)
    return expected


def test_two_ranks_equal_stock_model_parallel() -> None:
    first, second = run_distributed(check_two_ranks)
    assert_equal(first["weights"], second["weights"])
    assert first["losses"] != second["losses"]  # each rank had its own data


class TiedLit(LightningModule):
    """An embedding tied to the head, repeated blocks between, one layer that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 10)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(10, 10), nn.Tanh()) for _ in range(2))
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(10, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.losses: list[Tensor] = []
        self.rates: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens = (batch[0][:, 0] * 5).long() % 11
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        loss = nn.functional.cross_entropy(self.head(x), (tokens + 1) % 11)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def check_tied(devices: int) -> None:
    make: Any = FSDPOptimInBwdStrategy if devices > 1 else SingleDeviceOptimInBwdStrategy
    expected = fit(TiedLit, make(enabled=False), devices)
    for granularity in ("unit", "parameter"):
        module = seeded(TiedLit)
        run = trainer(strategy=make(granularity=granularity), devices=devices)
        run.fit(module, loader(ranks=devices))
        assert module.head.weight is module.embedding.weight
        actual = observables(module, run)
        assert_equal(actual, expected)
        steps = [entry["step"].item() for _, entry in actual["state"][0]]
        assert steps == [16.0] * 5  # the tied weight once; no state for the unused layer


def test_tied_weights_step_once_and_stay_tied() -> None:
    check_tied(devices=1)
    run_distributed(check_tied, devices=2)


def test_registered_names() -> None:
    names = {"fsdp_optim_in_bwd", "fsdp_optim_in_bwd_offload", "single_device_optim_in_bwd"}
    assert names <= set(StrategyRegistry.available_strategies())
    lightning_bwdopt.strategies.register_strategies()  # again is harmless
    assert trainer(strategy="fsdp_optim_in_bwd_offload").strategy.cpu_offload
    assert not trainer(strategy="fsdp_optim_in_bwd").strategy.cpu_offload
    single = trainer(strategy="single_device_optim_in_bwd").strategy
    assert isinstance(single, SingleDeviceOptimInBwdStrategy)
    assert single.root_device == torch.device("cpu")
    assert set(lightning_bwdopt.__all__) == {
        "CheckpointError",
        "FSDPOptimInBwdStrategy",
        "OptimInBwdMixin",
        "OptimizerInBackward",
        "SingleDeviceOptimInBwdStrategy",
        "consolidate",
        "get_lr",
        "load_pretrained",
    }


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"use_orig_params": True}, TypeError, "`use_orig_params` is an argument of `FSDPStrategy`.*leave it out"),
        ({"mixed_precision": None}, TypeError, "`mixed_precision`.*use `mp_policy`"),
        ({"granularty": "unit"}, TypeError, "Did you mean `granularity`"),
        ({"granularity": "layer"}, ValueError, "granularity='layer'"),
        ({"enabled": "false"}, TypeError, "`enabled='false'` is neither `True` nor `False`"),
        ({"gradient_clipping": "exactly"}, ValueError, "Did you mean `'exact'`"),
        ({"on_nonfinite": "stop"}, ValueError, "on_nonfinite='stop'"),
        ({"sharding_strategy": "NO_SHARD"}, ValueError, "does not exist in FSDP2"),
        ({"sharding_strategy": "full"}, ValueError, "sharding_strategy='full'"),
        ({"state_dict_type": "folder"}, ValueError, "state_dict_type='folder'"),
        ({"device_mesh": (2, 2)}, ValueError, "goes with `sharding_strategy='HYBRID_SHARD'`"),
        ({"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 0)}, ValueError, "pair of positive sizes"),
        ({"mp_policy": {"param_dtype": "bfloat"}}, ValueError, "no torch dtype"),
        ({"mp_policy": {"parameter_dtype": "bfloat16"}}, ValueError, "has no field `parameter_dtype`"),
        ({"mp_policy": {"param_dtype": 16}}, TypeError, "`param_dtype: 16`, which is no torch dtype"),
        ({"mp_policy": {"cast_forward_inputs": "no"}}, TypeError, "cast_forward_inputs='no'` is neither"),
        ({"mp_policy": MixedPrecisionPolicy("bf16")}, ValueError, "`param_dtype: bf16`"),  # type: ignore[arg-type]
        ({"mp_policy": "bf16"}, TypeError, "`mp_policy='bf16'` is neither.*leave it out to follow"),
        ({"mp_policy": fsdp.MixedPrecision()}, TypeError, "FSDP1's `MixedPrecision` is another class"),
        ({"cpu_offload": fsdp.CPUOffload(offload_params=False)}, TypeError, "offload_params=False.*Pass one of them"),
        ({"cpu_offload": fsdp.OffloadPolicy()}, TypeError, "is neither `True` nor `False`"),
        ({"cpu_offload": "false"}, TypeError, "`cpu_offload='false'` is neither"),
        ({"timeout": 5}, TypeError, "`timeout=5` is not a `datetime.timedelta`"),
        ({"auto_wrap_policy": "Block"}, TypeError, "`auto_wrap_policy='Block'` is neither a set.*import paths"),
        ({"auto_wrap_policy": nn.Linear}, TypeError, "is the class `Linear`. Pass a set of classes"),
        ({"activation_checkpointing_policy": {"Linear"}}, TypeError, "the entry `'Linear'`, which is not a module"),
    ],
)
def test_refused_arguments(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        FSDPOptimInBwdStrategy(**arguments)
    if set(arguments) <= {"granularity", "granularty", "gradient_clipping", "on_nonfinite"}:
        with pytest.raises(error, match=match):
            SingleDeviceOptimInBwdStrategy(**arguments)


def train_two_roots(in_backward: bool) -> Any:
    """A bare loop over two FSDP roots: the second reduces in a callback that is queued late in backward."""
    torch.manual_seed(3)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    encoder, decoder = Net(dropout=0.0), nn.Sequential(nn.Linear(1, 5), nn.Linear(5, 1))
    for root in (encoder, decoder):
        fully_shard(root, mesh=mesh)
    params = [*encoder.parameters(), *decoder.parameters()]
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    core = OptimizerInBackward(optimizer, [list(encoder.parameters()), list(decoder.parameters())], grad_norm=True)
    if in_backward:
        core.attach()
    norms = []
    for batch in torch.randn(4, 3, 6):
        decoder(encoder(batch)).square().mean().backward()
        norms.append(core.grad_norm if in_backward else total_norm([p.grad for p in params]))
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(norms), [p.full_tensor() for p in params]


def check_two_roots() -> None:
    norms, weights = train_two_roots(in_backward=True)
    expected_norms, expected_weights = train_two_roots(in_backward=False)
    assert_equal(weights, expected_weights)
    torch.testing.assert_close(norms, expected_norms, rtol=1e-6, atol=0)


def test_two_fsdp_roots() -> None:
    run_distributed(check_two_roots)
