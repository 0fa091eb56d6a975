"""The self-check: classes that must be accepted, classes that must not; and what it does not touch."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from examples import compatibility
from helpers import Net, assert_equal
from lightning_bwdopt import OptimizerInBackward
from lightning_bwdopt.first_state import first_state
from lightning_bwdopt.selfcheck import RandomNumbers, check_optimizer


class Plain(torch.optim.Optimizer):
    """Signed momentum: each parameter by itself."""

    def __init__(self, params: Any, lr: float = 1e-2, **defaults: Any) -> None:
        super().__init__(params, {"lr": lr, **defaults})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group)

    def update(self, p: Tensor, group: dict[str, Any]) -> None:
        momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
        momentum.lerp_(p.grad, 0.1)
        p.sub_(momentum.sign() * group["lr"])


class GroupCounter(Plain):
    """Counts steps in the group, as a number and as a tensor, and on itself; uses all three."""

    def __init__(self, params: Any, **kwargs: Any) -> None:
        super().__init__(params, k=0, **kwargs)
        for group in self.param_groups:
            group["seen"] = torch.zeros(())
        self.total = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.total += 1
        for group in self.param_groups:
            group["k"] += 1
            group["seen"].add_(1)
        super().step()

    def update(self, p: Tensor, group: dict[str, Any]) -> None:
        p.sub_(p.grad * group["lr"] / (group["k"] + float(group["seen"]) + self.total))


class TrainMode(GroupCounter):
    """Refuses to step in evaluation, like a schedule-free class."""

    training = False

    def train(self) -> None:
        self.training = True

    def eval(self) -> None:
        self.training = False

    def step(self, closure: Any = None) -> None:
        assert self.training, "not in train mode"
        super().step()


class GlobalNorm(Plain):
    """Divides by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([g.norm() for g in gradients]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / norm * group["lr"])


class Late(Plain):
    """Couples parameters only once its estimate has moved, as Prodigy does."""

    def __init__(self, params: Any, **kwargs: Any) -> None:
        super().__init__(params, d=1e-6, total=0.0, **kwargs)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["total"] += sum(float(p.grad.sum()) for p in group["params"] if p.grad is not None) * group["lr"] ** 2
            group["d"] = max(group["d"], 1e-6 * (group["total"] // 50))
        super().step()

    def update(self, p: Tensor, group: dict[str, Any]) -> None:
        p.sub_(p.grad * group["d"])


class Noisy(Plain):
    """Langevin."""

    def update(self, p: Tensor, group: dict[str, Any]) -> None:
        p.sub_(p.grad * group["lr"] + 1e-3 * torch.randn_like(p))


class NoisyLater(Noisy):
    """Draws for the first time after a hundred steps."""

    def update(self, p: Tensor, group: dict[str, Any]) -> None:
        self.state[p]["step"] = self.state[p].get("step", 0) + 1
        if self.state[p]["step"] > 100:
            super().update(p, group)


class StateCounter(Plain):
    """Counts every call in its state, beside the parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.state["calls"] = self.state.get("calls", 0) + 1
        super().step()


class ByShape(Plain):
    """Takes the parameters of one shape together, as batched Newton-Schulz does, and divides by their norm."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for shape in {p.shape for p in params}:
                alike = [p for p in params if p.shape == shape]
                norm = torch.stack([p.grad for p in alike]).norm()
                for p in alike:
                    p.sub_(p.grad / norm * group["lr"])


class SomeGroups(Plain):
    """Adds up the gradients of a group that says so."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            gradients = [p.grad for p in group["params"] if p.grad is not None]
            total = sum(float(gradient.sum()) for gradient in gradients) if group["couple"] else 1.0
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * total * group["lr"])


class TensorCounter(Plain):
    """Counts steps in a tensor of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.count = torch.zeros(())

    def step(self, closure: Any = None) -> None:
        self.count += 1
        super().step()


class DictCounter(TensorCounter):
    """Counts steps in a dict of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.count: Any = Counter()

    def step(self, closure: Any = None) -> None:
        self.count["steps"] += 1
        Plain.step(self)


class ListCounter(Plain):
    """Counts steps in a list in its groups."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, counts=[0])

    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["counts"][0] += 1
        super().step()


class Wrapper(Plain):
    """Has another optimizer inside."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params)
        self.inner = torch.optim.SGD(params)


class NeedsClosure(Plain):
    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()


class AsksForClosure(Plain):
    def step(self, closure: Any = None) -> None:
        if closure is None:
            raise RuntimeError("this class requires a closure")


class OfItsModel(Plain):
    """Refers to a module, which must not be copied as it is."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters())
        self.model = model


def train(cls: type[Plain], in_backward: bool, steps: int = 5) -> Any:
    torch.manual_seed(0)
    net = Net()
    optimizer: Any = cls([{"params": net.blocks.parameters()}, {"params": net.head.parameters(), "lr": 1e-3}])
    if hasattr(optimizer, "train"):
        optimizer.train()
    core = OptimizerInBackward(optimizer, [list(b.parameters()) for b in net.blocks])
    if in_backward:
        core.attach()
    for step in range(steps):
        if step == 2 and hasattr(optimizer, "eval"):
            optimizer.eval()  # for an evaluation, say
            optimizer.train()
        net(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    core.remove()
    net(torch.randn(4, 6)).square().mean().backward()
    optimizer.step()  # goes on as an ordinary optimizer
    return dict(net.state_dict()), optimizer.state_dict(), getattr(optimizer, "total", None)


@pytest.mark.parametrize("cls", [Plain, GroupCounter, TrainMode])
def test_accepted_and_equal(cls: type[Plain]) -> None:
    assert_equal(train(cls, True), train(cls, False))


REFUSED = {
    GlobalNorm: "couples parameters",
    Late: "couples parameters",
    Noisy: "draws random numbers",
    StateCounter: "couples parameters",
    ByShape: "couples parameters",
    TensorCounter: "couples parameters",
    DictCounter: "couples parameters",
    ListCounter: "couples parameters",
    Wrapper: "wraps another optimizer",
    NeedsClosure: "needs a closure",
    AsksForClosure: "needs a closure and fails on small random tensors .*requires a closure",
}


@pytest.mark.parametrize("cls", REFUSED)
def test_refused(cls: type[Plain]) -> None:
    net = Net()
    with pytest.raises(ValueError, match=f"`{cls.__name__}` {REFUSED[cls]}"):
        OptimizerInBackward(cls(net.parameters()))
    if cls is not NeedsClosure:
        OptimizerInBackward(cls(net.parameters()), self_check=False)


def test_looks_at_every_kind_of_group() -> None:
    groups = [{"params": nn.Linear(2, 2).parameters(), "couple": number == 5} for number in range(6)]
    with pytest.raises(ValueError, match="`SomeGroups` couples parameters"):
        OptimizerInBackward(SomeGroups(groups))


def test_late_draws_are_an_error_when_they_come() -> None:
    net = nn.Linear(3, 3)
    optimizer = NoisyLater(net.parameters())
    with OptimizerInBackward(optimizer):
        for _ in range(100):
            net(torch.ones(1, 3)).sum().backward()
        with pytest.raises(RuntimeError, match="`NoisyLater` has drawn random numbers"):
            net(torch.ones(1, 3)).sum().backward()


def test_nothing_is_changed_and_nothing_large_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 10))
    optimizer = OfItsModel(net)
    before = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    torch.manual_seed(4)
    random = torch.get_rng_state()
    largest = 0
    allocate = Tensor.__deepcopy__

    def deepcopy(self: Tensor, memo: Any) -> Tensor:
        nonlocal largest
        largest = max(largest, self.numel())
        return allocate(self, memo)

    monkeypatch.setattr(Tensor, "__deepcopy__", deepcopy)
    monkeypatch.setattr(nn.Parameter, "__deepcopy__", deepcopy)
    OptimizerInBackward(optimizer)
    assert largest < 1000
    assert torch.equal(torch.get_rng_state(), random)
    assert_equal((net.state_dict(), optimizer.state_dict()), before)


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))],
)
def test_steps_on_trial_leave_random_generators_alone(device: str) -> None:
    weight = torch.ones(3, 2, device=device, requires_grad=True)
    optimizer = Noisy([{"params": []}, {"params": [weight]}])
    draws = RandomNumbers(weight.device)
    assert first_state(optimizer, optimizer.param_groups) == {(1, 2): {}}
    with pytest.raises(ValueError, match="draws random numbers"):
        check_optimizer(optimizer)
    assert not draws.drawn()


# Classes of other packages, where these are installed; `examples/compatibility.py` runs all of them -----------------


def examined(name: str) -> Any:
    library, cls = name.rsplit(".", 1)
    return compatibility.examine(getattr(pytest.importorskip(library), cls))


@pytest.mark.parametrize(
    "name",
    [
        "torch.optim.Muon",
        "torch.optim.SparseAdam",
        "schedulefree.AdamWScheduleFree",
        "optimi.StableAdamW",
        "lion_pytorch.Lion",
    ],
)
def test_equal_over_many_steps(name: str) -> None:
    row = examined(name)
    assert (row.verdict, row.outcome) == ("", "equal"), row


@pytest.mark.parametrize("name", ["prodigyopt.Prodigy", "pytorch_optimizer.MADGRAD", "pytorch_optimizer.Gravity"])
@pytest.mark.filterwarnings("ignore")
def test_refused_and_different_over_many_steps(name: str) -> None:
    row = examined(name)
    assert row.verdict
    assert row.outcome == "differs", row
