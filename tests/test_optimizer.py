"""The core, in plain torch: equal to the ordinary loop, one unit's gradients at most, hooks on and off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers import Net, assert_equal
from lightning_bwdopt import OptimizerInBackward, get_lr

Make = Callable[[Any], torch.optim.Optimizer]


def units_of(net: Net) -> list[list[Tensor]]:
    return [list(block.parameters()) for block in net.blocks]


def run(
    make: Make,
    mode: str | None = None,
    calls_step: bool = True,
    steps: int = 8,
    before_step: Callable[[Net, int], None] | None = None,
) -> dict[str, Any]:
    """Trains a small net with a warm-up; ``mode`` is ``None`` (ordinary), ``"unit"`` or ``"parameter"``."""
    torch.manual_seed(1)
    net = Net()
    decay = [p for p in net.parameters() if p.ndim > 1]
    plain = [p for p in net.parameters() if p.ndim == 1]
    optimizer = make([{"params": decay, "lr": 1e-2}, {"params": plain, "lr": 3e-3}])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 4))
    core = None
    if mode is not None:
        core = OptimizerInBackward(optimizer, units_of(net) if mode == "unit" else None).attach()
    losses, rates = [], []
    for step in range(steps):
        if before_step is not None:
            before_step(net, step)
        loss = net(torch.randn(4, 6)).square().mean()
        loss.backward()
        losses.append(loss.detach())
        rates.append([float(g["lr"]) for g in (optimizer.param_groups if core is None else core.used_groups)])
        if core is not None:
            assert all(p.grad is None for p in net.parameters())
        if core is None or calls_step:
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
        if core is not None:
            core.attach()  # as the strategies do for every batch: sees what has been unfrozen
    state = optimizer.state_dict()
    if core is not None:
        core.remove()
    return {"losses": losses, "rates": rates, "weights": list(net.state_dict().items()), "state": state}


OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, weight_decay=0.1),
    "adamw_fused": lambda groups: torch.optim.AdamW(groups, fused=True),
    "adamw_foreach": lambda groups: torch.optim.AdamW(groups, foreach=True, amsgrad=True),
    "sgd": lambda groups: torch.optim.SGD(groups),
    "sgd_momentum": lambda groups: torch.optim.SGD(groups, momentum=0.9, nesterov=True),
    "adafactor": lambda groups: torch.optim.Adafactor(groups),
    "tensor_rate": lambda groups: torch.optim.Adam([{**g, "lr": torch.tensor(g["lr"])} for g in groups], fused=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("calls_step", [True, False], ids=["step", "no_step"])
def test_equals_ordinary_loop(name: str, granularity: str, calls_step: bool) -> None:
    make = OPTIMIZERS[name]
    assert_equal(run(make, granularity, calls_step), run(make))


def test_first_warm_up_step_has_rate_zero(granularity: str) -> None:
    result = run(OPTIMIZERS["adamw"], granularity, steps=1)
    torch.manual_seed(1)
    assert result["rates"] == [[0.0, 0.0]]
    assert_equal(result["weights"], list(Net().state_dict().items()))


def freeze_and_unfreeze(net: Net, step: int) -> None:
    net.blocks[1].requires_grad_(step < 2 or step > 5)
    net.stem.requires_grad_(step > 3)


def test_frozen_and_unfrozen_parameters(granularity: str) -> None:
    make = OPTIMIZERS["adamw"]
    assert_equal(run(make, granularity, before_step=freeze_and_unfreeze), run(make, before_step=freeze_and_unfreeze))


class Tied(nn.Module):
    """An embedding that is also the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 6)
        self.body = nn.Linear(6, 6)
        self.unused = nn.Linear(2, 2)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.embedding(tokens))))


@pytest.mark.parametrize("mode", [None, "all", "each"])
def test_tied_and_unused_parameters(mode: str | None) -> None:
    def train(mode: str | None) -> tuple[Any, Any]:
        torch.manual_seed(1)
        net = Tied()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        counts = {"steps": 0}
        if mode:
            core = OptimizerInBackward(optimizer, [list(net.parameters())] if mode == "all" else None)
            core.attach()
        for _ in range(4):
            nn.functional.cross_entropy(net(torch.arange(9)), torch.arange(9).roll(1)).backward()
            if mode:
                counts["steps"] += core.stepped
            optimizer.step()
            optimizer.zero_grad()
        assert net.head.weight is net.embedding.weight
        return net.state_dict(), optimizer.state_dict()

    weights, state = train(mode)
    expected_weights, expected_state = train(None)
    assert_equal(dict(weights), dict(expected_weights))
    assert_equal(state, expected_state)
    assert state["state"][0]["step"] == 4
    assert len(state["state"]) == 3  # tied weight once, body's two, nothing for what was never used


def test_at_most_one_unit_of_gradients_is_alive() -> None:
    net = Net(depth=4)
    optimizer = torch.optim.AdamW(net.parameters())
    units = units_of(net)
    alive: list[int] = []
    peak: list[int] = []

    def count(param: Tensor) -> None:
        alive.append(sum(p.grad is not None for p in net.parameters()))

    core = OptimizerInBackward(optimizer, units)
    for param in net.parameters():
        param.register_post_accumulate_grad_hook(count)  # before the core's own hook
    with core:
        for _ in range(3):
            net(torch.randn(2, 6)).sum().backward()
            peak.append(max(alive))
            alive.clear()
            assert all(p.grad is None for p in net.parameters())
    assert peak == [len(units[0])] * 3


def test_alive_gradients_by_parameter() -> None:
    net = Net()
    alive: list[int] = []
    for param in net.parameters():
        param.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(p.grad is not None for p in net.parameters()))
        )
    with OptimizerInBackward(torch.optim.SGD(net.parameters())):
        net(torch.randn(2, 6)).sum().backward()
    assert set(alive) == {1}
    assert len(alive) == len(list(net.parameters()))


def test_unit_step_hooks_see_gradients_before_and_none_after() -> None:
    net = Net(depth=2)
    optimizer = torch.optim.AdamW(net.parameters())
    core = OptimizerInBackward(optimizer, units_of(net))
    seen: list[tuple[str, list[int], bool]] = []

    def note(moment: str) -> Callable[[Any], None]:
        return lambda params: seen.append((moment, [id(p) for p in params], all(p.grad is None for p in params)))

    handle = core.register_unit_step_hooks(note("before"), note("after"))
    with core:
        net(torch.randn(2, 6)).sum().backward()
        handle.remove()
        net(torch.randn(2, 6)).sum().backward()
    assert [(moment, gone) for moment, _, gone in seen] == [("before", False), ("after", True)] * (len(seen) // 2)
    assert sorted(key for moment, keys, _ in seen if moment == "after" for key in keys) == sorted(
        id(p) for p in net.parameters()
    )


def test_attach_and_remove_are_idempotent_and_symmetric() -> None:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = dict(vars(optimizer))
    core = OptimizerInBackward(optimizer)
    core.remove()
    core.attach()
    core.attach()
    assert all(len(p._post_accumulate_grad_hooks) == 1 for p in net.parameters())
    net(torch.randn(2, 6)).sum().backward()
    scheduler.step()
    core.remove()
    core.remove()
    assert all(not p._post_accumulate_grad_hooks for p in net.parameters())
    assert vars(optimizer).keys() - {"_opt_called"} == before.keys()
    assert vars(optimizer)["step"] is before["step"]
    net(torch.randn(2, 6)).sum().backward()
    assert all(p.grad is not None for p in net.parameters())


def test_no_scheduler_warning_with_a_scheduler_made_after_attaching() -> None:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    with OptimizerInBackward(optimizer):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        net(torch.randn(2, 6)).sum().backward()
        scheduler.step()  # a warning would be an error here
    assert get_lr(optimizer) == [5e-4]


def test_second_gradient_before_step_is_an_error() -> None:
    net = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(net.parameters())
    with OptimizerInBackward(optimizer):
        net(torch.randn(2, 3)).sum().backward()
        optimizer.step()  # the loop calls step, so that a step ends there
        net(torch.randn(2, 3)).sum().backward()
        with pytest.raises(RuntimeError, match="second gradient arrived.*Sum the losses"):
            net(torch.randn(2, 3)).sum().backward()


def test_step_after_several_backwards_is_an_error() -> None:
    net = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(net.parameters())
    with OptimizerInBackward(optimizer):
        net(torch.randn(2, 3)).sum().backward()
        net(torch.randn(2, 3)).sum().backward()
        with pytest.raises(RuntimeError, match="after 2 backward calls"):
            optimizer.step()


def test_two_backwards_that_reach_disjoint_parameters() -> None:
    def train(in_backward: bool) -> Any:
        torch.manual_seed(2)
        left, right = nn.Linear(3, 3), nn.Linear(3, 3)
        params = [*left.parameters(), *right.parameters()]
        optimizer = torch.optim.AdamW(params)
        core = OptimizerInBackward(optimizer, [params])
        if in_backward:
            core.attach(calls_step=True)
        for _ in range(3):
            left(torch.ones(1, 3)).sum().backward()
            right(torch.ones(1, 3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return params, optimizer.state_dict()

    assert_equal(train(True), train(False))


def test_accumulation_equals_ordinary(granularity: str) -> None:
    def train(mode: str | None) -> Any:
        torch.manual_seed(2)
        net = Net()
        optimizer = torch.optim.AdamW(net.parameters())
        core = OptimizerInBackward(optimizer, units_of(net) if mode == "unit" else None)
        if mode:
            core.attach()
        for _ in range(3):
            for last in (False, False, True):
                loss = net(torch.randn(4, 6)).square().mean() / 3
                if mode and not last:
                    with core.accumulate():
                        loss.backward()
                    assert any(p.grad is not None for p in net.parameters())
                else:
                    loss.backward()
            if not mode:
                optimizer.step()
                optimizer.zero_grad()
        return dict(net.state_dict()), optimizer.state_dict()

    assert_equal(train(granularity), train(None))


def test_state_goes_both_ways_and_a_loaded_rate_is_used() -> None:
    def resume(first: bool, second: bool) -> Any:
        torch.manual_seed(2)
        net = Net(dropout=0.0)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        saved: Any = None
        for in_backward in (first, second):
            if saved is not None:
                optimizer = torch.optim.AdamW(net.parameters(), lr=1.0)
            core = OptimizerInBackward(optimizer, units_of(net))
            if in_backward:
                core.attach()
            if saved is not None:
                (core if in_backward else optimizer).load_state_dict(saved)
            for _ in range(3):
                net(torch.randn(4, 6)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            saved = core.state_dict()
            core.remove()
        return dict(net.state_dict()), saved

    expected = resume(False, False)
    for first, second in ((True, True), (True, False), (False, True)):
        assert_equal(resume(first, second), expected)


def test_get_lr_of_every_kind_of_optimizer() -> None:
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(
        [{"params": first.parameters(), "lr": 0.5}, {"params": second.parameters(), "lr": torch.tensor(0.25)}]
    )
    assert get_lr(optimizer) == [0.5, 0.25]
    assert get_lr(OptimizerInBackward(optimizer)) == [0.5, 0.25]
    with pytest.raises(TypeError, match="`Linear` has no `param_groups`"):
        get_lr(first)
    del optimizer.param_groups[1]["lr"]
    with pytest.raises(ValueError, match="group 1 of `SGD` has no `lr`"):
        get_lr(optimizer)


@pytest.mark.parametrize("tensor", [False, True])
def test_a_rate_set_after_backward_is_an_error(tensor: bool) -> None:
    net = Net()
    rate = torch.tensor(0.1) if tensor else 0.1
    optimizer = torch.optim.SGD([{"params": net.blocks.parameters()}, {"params": net.head.parameters()}], lr=rate)
    with OptimizerInBackward(optimizer).attach(calls_step=True):
        for change in (0.1, 0.2):
            net(torch.randn(4, 6)).sum().backward()
            if tensor:
                optimizer.param_groups[1]["lr"].fill_(change)
            else:
                optimizer.param_groups[1]["lr"] = change
            if change != 0.1:
                with pytest.raises(RuntimeError, match="`lr` of parameter group . of this `SGD` was set to .*0.2"):
                    optimizer.step()
                break
            optimizer.step()
            for group in optimizer.param_groups:
                group["momentum"] = 0.0  # after the step anything may change
        assert optimizer.param_groups[1]["lr"] == pytest.approx(0.2)
    net = Net()
    optimizer = torch.optim.SGD([{"params": net.blocks.parameters()}, {"params": net.head.parameters()}], lr=0.1)
    with OptimizerInBackward(optimizer).attach(calls_step=True):
        for frozen in (False, True):
            net.head.requires_grad_(not frozen)
            net(torch.randn(4, 6)).sum().backward()
            if frozen:
                optimizer.param_groups[1]["lr"] = 0.3  # no parameter of that group has been stepped
            optimizer.step()


def test_an_entry_taken_out_of_a_group_stays_out() -> None:
    """An entry of ``initial_lr`` that comes back is where the next scheduler would start from."""

    class Plain(torch.optim.SGD):
        """Not on the list of known classes, so that its groups are looked at."""

    net = Net()
    optimizer = Plain(net.parameters(), lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    with OptimizerInBackward(optimizer):
        for _ in range(2):
            net(torch.randn(4, 6)).sum().backward()
            optimizer.step()
            optimizer.param_groups[0].pop("initial_lr", None)
    assert "initial_lr" not in optimizer.param_groups[0]


def test_refusals() -> None:
    net = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="`Linear` and not a `torch.optim.Optimizer`"):
        OptimizerInBackward(net)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="on_nonfinite='explode'"):
        OptimizerInBackward(torch.optim.SGD(net.parameters()), on_nonfinite="explode")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`LBFGS` needs a closure"):
        OptimizerInBackward(torch.optim.LBFGS(net.parameters()))
    optimizer = torch.optim.SGD(net.parameters())
    net.requires_grad_(False)
    with pytest.raises(ValueError, match="none requires a gradient"):
        OptimizerInBackward(optimizer).attach()
    net.requires_grad_(True)
    optimizer.step = lambda: None  # type: ignore[method-assign, assignment]
    with pytest.raises(ValueError, match="`step` of this `SGD` was replaced"):
        OptimizerInBackward(optimizer).attach()


@pytest.mark.parametrize("clip", [("norm", -1.0), ("norm", float("nan")), ("value", 0), ("value", True), ("norm", "1")])
def test_refused_clip_limits(clip: Any) -> None:
    with pytest.raises(ValueError, match="positive finite number"):
        OptimizerInBackward(torch.optim.SGD(nn.Linear(2, 2).parameters()), clip=clip)


def test_refused_clip_kind() -> None:
    with pytest.raises(ValueError, match=r"clip=\('nrom', 1.0\)"):
        OptimizerInBackward(torch.optim.SGD(nn.Linear(2, 2).parameters()), clip=("nrom", 1.0))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"units": [torch.ones(2)]}, "`units` has a `Tensor` in the place of a list. Pass a list of lists"),
        ({"units": ["stem.weight"]}, "`units` has a `str` in the place of a list"),
        ({"units": [nn.Linear(2, 2)]}, "`units` has a `Linear` in the place of a list"),
        ({"units": [["stem.weight"]]}, "`units` has `'stem.weight'` in the place of a parameter"),
        ({"units": 5}, "`units=5` is not a list"),
        ({"grad_norm": "no"}, "`grad_norm='no'` is neither `True` nor `False`"),
        ({"self_check": "no"}, "`self_check='no'` is neither `True` nor `False`"),
    ],
)
def test_refused_types(options: dict[str, Any], match: str) -> None:
    with pytest.raises(TypeError, match=match):
        OptimizerInBackward(torch.optim.SGD(Net().parameters()), **options)
