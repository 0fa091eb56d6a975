"""Stepping a rank's shards as plain tensors is stepping the DTensors: weights and whole state equal to the bit."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from helpers import assert_equal, run_distributed
from lightning_bwdopt import OptimizerInBackward
from lightning_bwdopt.clipping import total_norm
from lightning_bwdopt.sharding import find_blocks, shard
from lightning_bwdopt.units import units_of
from lightning_bwdopt.views import ELEMENTWISE_OPTIMIZERS

OWN_FLAGS: dict[str, list[dict[str, Any]]] = {
    "Adagrad": [{"initial_accumulator_value": 0.5, "lr_decay": 0.1}],
    "Adam": [{"amsgrad": True, "weight_decay": 0.1}, {"fused": True}, {"fused": True, "amsgrad": True}],
    "AdamW": [{"amsgrad": True}, {"fused": True}, {"fused": True, "amsgrad": True, "maximize": True}],
    "ASGD": [{"t0": 2.0, "weight_decay": 0.1}],
    "NAdam": [{"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RAdam": [{"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RMSprop": [{"momentum": 0.9, "centered": True}],
    "SGD": [{"momentum": 0.9, "nesterov": True}, {"momentum": 0.5, "dampening": 0.1, "weight_decay": 0.1}],
}
# torch 2.13 cannot step DTensors with these: here the shards are compared with whole plain tensors.
NOT_FOR_DTENSORS: list[tuple[str, dict[str, Any]]] = [
    ("Adagrad", {"fused": True}),
    ("Rprop", {}),
    ("Rprop", {"maximize": True}),
    ("SGD", {"fused": True}),
    ("SGD", {"fused": True, "momentum": 0.9, "nesterov": True}),
]
CLASSES = {kind.__name__: kind for kind in ELEMENTWISE_OPTIMIZERS}


def variants() -> Iterator[tuple[str, dict[str, Any]]]:
    for name in sorted(CLASSES):
        if name != "Rprop":
            common = [{}, {"maximize": True, "lr": torch.tensor(0.1)}, {"foreach": True}]
            yield from ((name, flags) for flags in [*common, *OWN_FLAGS.get(name, [])])


class Uneven(nn.Module):
    """On two ranks its matrices split 3 to 2 rows and 1 to 0."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)) for _ in range(2))
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def portrait(value: Any) -> Any:
    if isinstance(value, DTensor):
        kind = (tuple(value.shape), value.stride(), tuple(value.placements))
        return ("DTensor", kind, value._local_tensor.detach().clone())
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: portrait(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [portrait(part) for part in value]
    return value


SHAPES = [(5, 3), (1, 4), (7,), (1,)]  # on two ranks: 3 to 2, 1 to 0, 4 to 3, 1 to 0 rows


@cache
def two_ranks() -> DeviceMesh:
    return init_device_mesh("cpu", (2,))


def sharded_like(values: list[Tensor]) -> list[nn.Parameter]:
    return [nn.Parameter(distribute_tensor(value, two_ranks(), [Shard(0)], src_data_rank=None)) for value in values]


def in_two_groups(name: str, params: list[nn.Parameter], flags: dict[str, Any]) -> tuple[Optimizer, LambdaLR]:
    rate = flags.get("lr", 0.1)
    groups = [{"params": params[::2], "lr": copy.deepcopy(rate)}, {"params": params[1::2], "lr": rate / 4}]
    optimizer = CLASSES[name](groups, **{k: v for k, v in flags.items() if k != "lr"})
    return optimizer, LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))


def sharded_values(optimizer: Optimizer) -> list[Tensor]:
    return [v for entry in optimizer.state.values() for v in entry.values() if isinstance(v, DTensor)]


def check_same_as_dtensors() -> int:
    noise = torch.Generator().manual_seed(0)
    checked = 0
    for name, flags in variants():
        values = [torch.randn(shape, generator=noise) for shape in SHAPES]
        expected, ours = sharded_like(values), sharded_like(values)
        assert any(p.to_local().numel() == 0 for p in ours) == (torch.distributed.get_rank() == 1)
        optimizer, scheduler = in_two_groups(name, expected, flags)
        optimizer_of_ours, scheduler_of_ours = in_two_groups(name, ours, flags)
        with OptimizerInBackward(optimizer_of_ours, [ours[:2], ours[2:]]) as core:
            assert all(unit.view._on_shards for unit in core._units)
            held: list[Tensor] = []
            for step in range(4):
                for one, other, shape in zip(expected, ours, SHAPES, strict=True):
                    gradient = torch.randn(shape, generator=noise)
                    if step != 0 or shape != (7,):  # a gradient may be missing
                        one.grad, other.grad = (p.detach() for p in sharded_like([gradient, gradient.clone()]))
                for part in (optimizer, optimizer_of_ours, scheduler, scheduler_of_ours):
                    part.step()
                optimizer.zero_grad()
                assert all(p.grad is None for p in ours)
                assert_equal(portrait(ours), portrait(expected), f"{name} {flags} step {step}")
                states = portrait(optimizer_of_ours.state_dict()), portrait(optimizer.state_dict())
                assert_equal(*states, f"{name} {flags} step {step}")
                before, held = held, sharded_values(optimizer_of_ours)
                assert step < 2 or [id(value) for value in before] == [id(value) for value in held], f"{name} {flags}"
        checked += 1
    plain, (sharded,) = nn.Parameter(torch.ones(2)), sharded_like([torch.ones(4, 2)])
    optimizer = torch.optim.Adam([sharded, plain])
    with OptimizerInBackward(optimizer) as core:
        plain.grad = torch.ones(2)
        optimizer.step()
        # Of a group with DTensors torch steps no parameter with foreach, whatever the device.
        assert core.used_groups[0]["foreach"] is False
    return checked


def test_every_elementwise_class_on_uneven_and_empty_shards() -> None:
    assert run_distributed(check_same_as_dtensors) == [len(list(variants()))] * 2
    covered = {name for name, _ in variants()} | {name for name, _ in NOT_FOR_DTENSORS}
    assert covered == set(CLASSES)


def check_partial_gradients() -> None:
    """DTensors without FSDP2, as in tensor parallelism by hand: each rank has a part of a replicated weight's sum."""
    noise = torch.Generator().manual_seed(torch.distributed.get_rank())
    batches = [DTensor.from_local(torch.randn(4, 3, generator=noise), two_ranks(), [Shard(0)]) for _ in range(3)]
    for kind, clip in (
        (torch.optim.SGD, None),
        (torch.optim.AdamW, ("norm", 0.5)),
        (torch.optim.AdamW, ("value", 0.1)),
    ):
        results = []
        for in_backward in (False, True):
            weight = nn.Parameter(distribute_tensor(torch.ones(3, 2), two_ranks(), [Replicate()]))
            optimizer = kind([weight], lr=0.1)
            core = OptimizerInBackward(optimizer, clip=clip, grad_norm=True)
            if in_backward:
                core.attach()
            norms = []
            for batch in batches:
                loss = (batch @ weight).square().sum().full_tensor()
                if in_backward:
                    core.backward(loss)
                    norms.append(core.grad_norm)
                    continue
                loss.backward()
                assert weight.grad is not None
                assert weight.grad.placements[0].is_partial()
                norms.append(total_norm([weight.grad]))
                if clip == ("norm", 0.5):
                    nn.utils.clip_grad_norm_([weight], 0.5)
                elif clip:
                    # torch clamps each rank's part of a partial sum.
                    weight.grad = weight.grad.redistribute(placements=[Replicate()])
                    nn.utils.clip_grad_value_([weight], 0.1)
                optimizer.step()
                optimizer.zero_grad()
            results.append((norms, weight._local_tensor.detach(), portrait(optimizer.state_dict())))
        if clip == ("norm", 0.5):
            torch.testing.assert_close(results[1][1], results[0][1], rtol=0, atol=1e-6)
        else:
            assert_equal(results[1], results[0], f"{kind.__name__} {clip}")


def test_gradients_that_are_partial_sums() -> None:
    run_distributed(check_partial_gradients)


class Training:
    """A sharded model and its optimizer in two groups with a scheduler, stepped one way or the other."""

    def __init__(self, name: str, flags: dict[str, Any], in_backward: bool) -> None:
        torch.manual_seed(5)
        self.model = Uneven()
        shard(self.model, find_blocks(self.model), mesh=two_ranks(), reshard_after_forward=True)
        self.optimizer, self.scheduler = in_two_groups(name, list(self.model.parameters()), flags)
        self.core: OptimizerInBackward | None = None
        if in_backward:
            self.core = OptimizerInBackward(self.optimizer, units_of(self.model)).attach()
            assert all(unit.view._on_shards for unit in self.core._units)

    def step(self, number: int) -> None:
        noise = torch.Generator().manual_seed(10 * number + torch.distributed.get_rank())
        self.model(torch.randn(4, 3, generator=noise)).square().sum().backward()
        if self.core is not None:
            assert all(p.grad is None for p in self.model.parameters())
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def portrait(self) -> dict[str, Any]:
        """All that a step leaves, without collectives: values, their kinds and order."""
        return {
            "weights": [portrait(p) for p in self.model.parameters()],
            "state dict": portrait(self.optimizer.state_dict()),
        }

    def saved(self) -> tuple[Any, ...]:
        parts = (self.model.state_dict(), self.optimizer.state_dict(), self.scheduler.state_dict())
        return copy.deepcopy(parts)

    def load(self, saved: tuple[Any, ...]) -> None:
        model, optimizer, scheduler = copy.deepcopy(saved)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self.scheduler.load_state_dict(scheduler)


def check_loads_in_every_direction() -> None:
    stateful = [("SGD", {}), ("SGD", {"momentum": 0.9}), ("AdamW", {"fused": True}), ("Adagrad", {}), ("ASGD", {})]
    for name, flags in [*stateful, ("NAdam", {}), ("RMSprop", {"momentum": 0.9, "centered": True})]:
        whole = Training(name, flags, in_backward=False)
        for step in range(6):
            whole.step(step)
        expected = whole.portrait()
        for first in (False, True):
            start = Training(name, flags, in_backward=first)
            for step in range(3):
                start.step(step)
            saved = start.saved()
            for second in (False, True):
                fresh = Training(name, flags, in_backward=second)
                fresh.load(saved)
                for step in range(3, 6):
                    fresh.step(step)
                assert_equal(fresh.portrait(), expected, f"{name} {flags}, saved {first}, loaded {second}")
            # Back in time, in the run that goes on: nothing that a view remembers may survive it.
            for step in range(3, 5):
                start.step(step)
            start.load(saved)
            for step in range(3, 6):
                start.step(step)
            assert_equal(start.portrait(), expected, f"{name} {flags}, back in time, {first}")


def test_saves_and_loads_in_every_direction() -> None:
    run_distributed(check_loads_in_every_direction)


def check_replaced_tensors() -> None:
    expected = Training("AdamW", {}, in_backward=False)
    ours = Training("AdamW", {}, in_backward=True)
    for step in range(6):
        expected.step(step)
        ours.step(step)
        if step == 2:  # what moving a model or its optimizer between devices does
            for param in ours.model.parameters():
                ours.optimizer.state[param] = {k: copy.deepcopy(v) for k, v in ours.optimizer.state[param].items()}
            ours.model._apply(lambda tensor: tensor.clone())
        if step == 3:  # a user resets the moments
            for training in (expected, ours):
                training.optimizer.state.clear()
        if step == 4:
            for training in (expected, ours):
                first = training.optimizer.param_groups[0]["params"][0]
                state = training.optimizer.state[first]
                state["exp_avg"] = torch.zeros_like(state["exp_avg"])
    assert_equal(ours.portrait(), expected.portrait())


def test_tensors_replaced_between_steps_are_seen() -> None:
    run_distributed(check_replaced_tensors)


def check_same_as_whole_tensors() -> None:
    noise = torch.Generator().manual_seed(0)
    for name, flags in NOT_FOR_DTENSORS:
        values = [torch.randn(shape, generator=noise) for shape in SHAPES]
        whole, sharded = [nn.Parameter(value.clone()) for value in values], sharded_like(values)
        expected = CLASSES[name](whole, lr=0.1, **flags)
        optimizer = CLASSES[name](sharded, lr=0.1, **flags)
        trial = CLASSES[name]([torch.zeros_like(param, requires_grad=True) for param in sharded], lr=0.1, **flags)
        for param in trial.param_groups[0]["params"]:
            param.grad = torch.zeros_like(param)
        with pytest.raises((RuntimeError, NotImplementedError)):  # when torch can, move it to `OWN_FLAGS`
            trial.step()
        with OptimizerInBackward(optimizer, [sharded[:2], sharded[2:]]):
            for _ in range(5):
                for one, other, shape in zip(whole, sharded, SHAPES, strict=True):
                    one.grad = torch.randn(shape, generator=noise)
                    (other.grad,) = (p.detach() for p in sharded_like([one.grad]))
                expected.step()
                optimizer.step()
        for one, other in zip(whole, sharded, strict=True):
            assert_equal(other.detach().full_tensor(), one.detach(), f"{name} {flags}")
            for key, value in expected.state[one].items():
                mine = optimizer.state[other][key]
                mine = mine.full_tensor() if isinstance(mine, DTensor) else mine
                assert_equal(mine, value, f"{name} {flags} {key}")


def test_classes_that_torch_cannot_step_on_dtensors() -> None:
    run_distributed(check_same_as_whole_tensors)


def check_capturable_fails_alike() -> None:
    for name, kind in sorted(CLASSES.items()):
        if "capturable" not in inspect.signature(kind).parameters:
            continue
        with pytest.raises(AssertionError) as expected:
            Training(name, {"capturable": True}, in_backward=False).step(0)
        with pytest.raises(AssertionError, match="capturable") as error:
            Training(name, {"capturable": True}, in_backward=True).step(0)
        assert str(error.value).splitlines()[0] == str(expected.value).splitlines()[0]


def test_capturable_says_what_torch_says_on_a_cpu() -> None:
    run_distributed(check_capturable_fails_alike)
