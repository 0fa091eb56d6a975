"""The core where nobody helps it: bare loops of every shape, Fabric, and what could come between."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

from examples import bare_loop, fabric_loop
from helpers import Block, Net, assert_equal, full, run_distributed
from lightning_bwdopt import OptimizerInBackward
from lightning_bwdopt.passes import run_backward


def make(net: nn.Module, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **kwargs: Any) -> torch.optim.Optimizer:
    return kind(net.parameters(), lr=1e-2, **kwargs)


def loss_of(net: nn.Module, scale: float = 1.0) -> Tensor:
    return net(torch.randn(4, 6)).square().mean() * scale


def outcome(net: nn.Module, *optimizers: torch.optim.Optimizer) -> Any:
    return dict(net.state_dict()), [optimizer.state_dict() for optimizer in optimizers]


class Failing(torch.autograd.Function):
    """The identity, whose backward raises when told to."""

    armed = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if Failing.armed:
            raise ZeroDivisionError("out of memory, say")
        return gradient


class FailingNet(Net):
    """A net whose backward can fail in the middle: the head and two blocks have their gradients by then."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.stem(x))
        return self.head(self.blocks[2](self.blocks[1](Failing.apply(x))))


# Loops ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("calls", ["step", "no_step", "closure"])
@pytest.mark.parametrize("clip", [None, ("value", 0.01)])
def test_loops(calls: str, clip: Any) -> None:
    def train(in_backward: bool) -> Any:
        torch.manual_seed(0)
        net = Net()
        optimizer = make(net)
        core = OptimizerInBackward(optimizer, [list(b.parameters()) for b in net.blocks], clip=clip)
        if in_backward:
            core.attach()
        for _ in range(5):

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(net)
                loss.backward()
                if not in_backward and clip:
                    nn.utils.clip_grad_value_(net.parameters(), clip[1])
                return loss

            if calls == "closure":
                assert optimizer.step(closure) > 0
            else:
                closure()
                if calls == "step" or not in_backward:
                    optimizer.step()
        core.remove()
        return outcome(net, optimizer)

    assert_equal(train(True), train(False))


def test_two_disjoint_backwards_in_the_first_closure() -> None:
    def train(in_backward: bool) -> Any:
        torch.manual_seed(0)
        net = nn.ModuleList([nn.Linear(6, 1), nn.Linear(6, 1)])
        optimizer = make(net)
        core = OptimizerInBackward(optimizer)
        if in_backward:
            core.attach()

        def closure() -> None:
            optimizer.zero_grad()
            loss_of(net[0]).backward()
            loss_of(net[1]).backward()

        for _ in range(3):
            optimizer.step(closure)
        return outcome(net, optimizer)

    assert_equal(train(True), train(False))


def test_held_only_and_stepped_by_hand() -> None:
    """Every micro-batch is held; `step()` steps them all. Such a loop does not count as calling `step()` twice."""

    def train(in_backward: bool) -> Any:
        torch.manual_seed(0)
        net = Net()
        optimizer = make(net)
        core = OptimizerInBackward(optimizer)
        if in_backward:
            core.attach()
        for _ in range(3):
            for _ in range(2):
                with core.accumulate():
                    loss_of(net, 0.5).backward()
            optimizer.step()
            optimizer.zero_grad()
        return outcome(net, optimizer)

    assert_equal(train(True), train(False))


def test_a_held_gradient_for_a_stepped_parameter_is_an_error() -> None:
    net = nn.Linear(6, 1)
    with OptimizerInBackward(make(net)).attach(calls_step=True) as core:
        loss_of(net).backward()
        with core.accumulate(), pytest.raises(RuntimeError, match="second gradient arrived"):
            loss_of(net).backward()


def test_retain_graph_twice_without_step_is_two_steps() -> None:
    def train(in_backward: bool) -> Any:
        torch.manual_seed(0)
        net = nn.Linear(6, 1)
        optimizer = make(net)
        core = OptimizerInBackward(optimizer)
        if in_backward:
            core.attach()
        loss = net(torch.randn(4, 6)).mean()
        for again in (True, False):
            loss.backward(retain_graph=again)
            if not in_backward:
                optimizer.step()
                optimizer.zero_grad()
        return outcome(net, optimizer)

    assert_equal(train(True), train(False))


def test_double_backward() -> None:
    """A gradient penalty: `autograd.grad` with a graph, then backward through it."""

    def train(in_backward: bool) -> Any:
        torch.manual_seed(0)
        net = Net(dropout=0.0)
        optimizer = make(net)
        core = OptimizerInBackward(optimizer)
        if in_backward:
            core.attach()
        for _ in range(3):
            x = torch.randn(4, 6, requires_grad=True)
            loss = net(x).square().mean()
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            (loss + slope.square().sum()).backward()
            if not in_backward:
                optimizer.step()
                optimizer.zero_grad()
        return outcome(net, optimizer)

    assert_equal(train(True), train(False))


@pytest.mark.parametrize("granularity", ["unit", "parameter"])
def test_reentrant_checkpointing(granularity: str) -> None:
    def train(in_backward: bool) -> Any:
        torch.manual_seed(0)
        net = Net()
        optimizer = make(net)
        # The second unit spans the pass inside and the one around it.
        units = [list(net.blocks[0].parameters()), [*net.blocks[1].parameters(), *net.head.parameters()]]
        core = OptimizerInBackward(optimizer, units if granularity == "unit" else None)
        if in_backward:
            core.attach()
        for _ in range(3):
            x = net.stem(torch.randn(4, 6))
            for block in net.blocks:
                x = checkpoint(block, x, use_reentrant=True)
            net.head(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return outcome(net, optimizer)

    assert_equal(train(True), train(False))


def test_reentrant_checkpointing_refusals() -> None:
    net, x = Block(), torch.randn(2, 10, requires_grad=True)
    with OptimizerInBackward(make(net)), pytest.raises(RuntimeError, match="inside another one.*use_reentrant=False"):
        checkpoint(net, x, use_reentrant=True).sum().backward()
    head = nn.Linear(10, 10)
    both = nn.ModuleList([net, head])
    with OptimizerInBackward(make(both)), pytest.raises(RuntimeError, match="second gradient arrived"):
        head(checkpoint(net, checkpoint(net, x, use_reentrant=True), use_reentrant=True)).sum().backward()


# Exceptions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("calls_step", [True, False])
def test_after_a_failed_backward(calls_step: bool) -> None:
    torch.manual_seed(0)
    net = FailingNet()
    optimizer = make(net)
    before = copy.deepcopy(outcome(net, optimizer))
    with OptimizerInBackward(optimizer).attach(calls_step=calls_step) as core:
        Failing.armed = True
        with pytest.raises(ZeroDivisionError):
            loss_of(net).backward()
        Failing.armed = False
        stepped = core.stepped
        assert 0 < stepped < len(list(net.parameters()))
        for _ in range(2):  # it stays an error until something is done about it
            optimizer.zero_grad()
            with pytest.raises(RuntimeError, match=f"failed after it had stepped {stepped} parameters"):
                loss_of(net).backward()
        optimizer.zero_grad()
        optimizer.step()  # "go on from here all the same"
        loss_of(net).backward()
        optimizer.step()

        Failing.armed = True
        with pytest.raises(ZeroDivisionError):
            loss_of(net).backward()
        Failing.armed = False
        optimizer.zero_grad()
        net.load_state_dict(before[0])  # or load a checkpoint
        optimizer.load_state_dict(before[1][0])
        torch.manual_seed(5)
        loss_of(net).backward()
        optimizer.step()
    torch.manual_seed(0)
    fresh = FailingNet()
    ordinary = make(fresh)
    torch.manual_seed(5)
    loss_of(fresh).backward()
    ordinary.step()
    assert_equal(outcome(net, optimizer), outcome(fresh, ordinary))


def test_a_backward_that_failed_before_any_step_is_forgotten() -> None:
    """The unit was incomplete: as in the ordinary run nothing has moved, and its gradients stay unless zeroed."""

    def train(in_backward: bool, zeroes: bool) -> Any:
        torch.manual_seed(0)
        net = FailingNet()
        optimizer = make(net)
        core = OptimizerInBackward(optimizer, [list(net.parameters())], grad_norm=True)
        if in_backward:
            core.attach()
        for step in range(4):
            Failing.armed = step == 1
            try:
                loss_of(net).backward()
            except ZeroDivisionError:
                if zeroes:
                    optimizer.zero_grad()
                continue
            finally:
                Failing.armed = False
            optimizer.step()
            optimizer.zero_grad()
        return outcome(net, optimizer)

    for zeroes in (True, False):
        assert_equal(train(True, zeroes), train(False, zeroes))


# The set of parameters --------------------------------------------------------------------------------------------


def test_unfrozen_without_attaching_again() -> None:
    """Nothing hooks them, so `step()` finds their gradients."""

    def train(in_backward: bool) -> Any:
        torch.manual_seed(0)
        net = Net()
        net.blocks[1].requires_grad_(False)
        optimizer = make(net)
        core = OptimizerInBackward(optimizer, [list(b.parameters()) for b in net.blocks])
        if in_backward:
            core.attach()
        for step in range(4):
            net.blocks[1].requires_grad_(step in (1, 3))
            net.blocks[0].requires_grad_(step != 2)
            loss_of(net).backward()
            optimizer.step()
            optimizer.zero_grad()
        return outcome(net, optimizer)

    assert_equal(train(True), train(False))


def test_added_parameters() -> None:
    def train(in_backward: bool) -> Any:
        torch.manual_seed(0)
        net = Net()
        optimizer = torch.optim.AdamW(net.head.parameters(), lr=1e-2)
        core = OptimizerInBackward(optimizer)
        if in_backward:
            core.attach()
        for step in range(4):
            if step == 2:
                optimizer.add_param_group({"params": list(net.stem.parameters()), "lr": 1e-3})
                if in_backward:
                    with pytest.raises(RuntimeError, match=r"Call `attach\(\)` again after `add_param_group`"):
                        net(torch.zeros(4, 6)).sum().backward()
                    core.attach()
                net.zero_grad()
                torch.manual_seed(1)
            loss_of(net).backward()
            optimizer.step()
            optimizer.zero_grad()
        return outcome(net, optimizer)

    ours, ordinary = train(True), train(False)
    for net_state in (ours[0], ordinary[0]):
        for name in [name for name in net_state if name.startswith("blocks")]:
            del net_state[name]
    assert_equal(ours, ordinary)


# State, schedulers, copies ----------------------------------------------------------------------------------------


def test_loading_in_the_middle() -> None:
    def train(in_backward: bool) -> Any:
        torch.manual_seed(0)
        net = Net()
        optimizer = make(net)
        core = OptimizerInBackward(optimizer)
        if in_backward:
            core.attach()
        saved = None
        for step in range(6):
            if step == 2:
                saved = copy.deepcopy(optimizer.state_dict())
            if step == 4:
                assert saved is not None
                saved["param_groups"][0]["lr"] = 0.5
                optimizer.load_state_dict(saved)
            loss_of(net).backward()
            optimizer.step()
            optimizer.zero_grad()
        return outcome(net, optimizer)

    assert_equal(train(True), train(False))


def test_loading_between_backward_and_step_is_an_error() -> None:
    net = Net()
    optimizer = make(net)
    with OptimizerInBackward(optimizer).attach(calls_step=True):
        state = optimizer.state_dict()
        loss_of(net).backward()
        with pytest.raises(RuntimeError, match=r"came between backward, which has stepped 22 parameters.*after `step"):
            optimizer.load_state_dict(state)
        optimizer.step()
        optimizer.load_state_dict(state)


def test_schedulers_made_before_and_after_attaching_and_attached_again() -> None:
    def train(in_backward: bool) -> Any:
        torch.manual_seed(0)
        net = Net()
        optimizer = make(net)
        early = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        core = OptimizerInBackward(optimizer)
        if in_backward:
            core.attach()
        late = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        for step in range(6):
            loss_of(net).backward()
            optimizer.step()
            optimizer.zero_grad()
            early.step()
            late.step()
            if in_backward and step in (1, 3):
                core.remove()
            if in_backward and step == 2:
                core.attach()
        return outcome(net, optimizer), early.get_last_lr(), late.get_last_lr()

    assert_equal(train(True), train(False))


def test_copies_made_while_attached_are_ordinary() -> None:
    torch.manual_seed(0)
    net = Net()
    optimizer = make(net)
    with OptimizerInBackward(optimizer) as core:
        loss_of(net).backward()
        for copied in (copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))):
            other, its_optimizer = copied((net, optimizer))
            assert_equal(outcome(other, its_optimizer), outcome(net, optimizer))
            torch.manual_seed(1)
            loss_of(other).backward()
            assert all(p.grad is not None for p in other.parameters())  # no hook came along
            its_optimizer.step()
        torch.manual_seed(1)
        loss_of(net).backward()
        assert core.stepped == 0
    assert_equal(outcome(net, optimizer), outcome(other, its_optimizer))


def test_a_removed_core_leaves_nothing_behind() -> None:
    net = Net()
    core = OptimizerInBackward(make(net)).attach()
    loss_of(net).backward()
    core.remove()
    optimizer = make(net)
    gc.collect()
    with OptimizerInBackward(optimizer):
        loss_of(net).backward()
    assert all(not p._post_accumulate_grad_hooks for p in net.parameters())


# Several optimizers -----------------------------------------------------------------------------------------------


def test_two_cores_cannot_share() -> None:
    net = Net()
    optimizer = make(net)
    with OptimizerInBackward(optimizer) as first:
        for other in (optimizer, make(net, torch.optim.SGD)):
            with pytest.raises(ValueError, match=r"shape `\(10, 6\)` is stepped by another `OptimizerInBackward`"):
                OptimizerInBackward(other).attach()
        loss_of(net).backward()
        assert first.attached
    with OptimizerInBackward(make(net, torch.optim.SGD)):
        loss_of(net).backward()


@pytest.mark.parametrize("clip", [None, ("norm", 0.05), ("value", 0.01)])
@pytest.mark.parametrize("calls_step", [True, False])
def test_muon_beside_adamw(clip: Any, calls_step: bool) -> None:
    def train(in_backward: bool) -> Any:
        torch.manual_seed(0)
        net = Net()
        matrices = [p for p in net.blocks.parameters() if p.ndim == 2]
        others = [p for p in net.parameters() if not any(p is m for m in matrices)]
        optimizers = [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-2)]
        cores = [OptimizerInBackward(o, [list(b.parameters()) for b in net.blocks], clip=clip) for o in optimizers]
        if in_backward:
            for core in cores:
                core.attach()
        norms = []
        for _ in range(6):
            loss = loss_of(net)
            if in_backward:
                assert run_backward(cores, loss)
                assert all(p.grad is None for p in net.parameters())
            else:
                loss.backward()
                for optimizer in optimizers:
                    params = optimizer.param_groups[0]["params"]
                    if clip and clip[0] == "norm":
                        norms.append(nn.utils.clip_grad_norm_(params, clip[1]))
                    elif clip:
                        nn.utils.clip_grad_value_(params, clip[1])
            if calls_step or not in_backward:
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            if in_backward and clip and clip[0] == "norm":
                norms += [core.grad_norm for core in cores]
        return outcome(net, *optimizers), norms

    (ours, norms), (ordinary, expected) = train(True), train(False)
    if clip is None or clip[0] == "value":
        assert_equal(ours, ordinary)
    else:
        torch.testing.assert_close(norms, expected, rtol=1e-5, atol=0)
        assert min(expected) > 0.05  # it was clipped
        for name, weight in ordinary[0].items():
            torch.testing.assert_close(ours[0][name], weight, rtol=0, atol=1e-6)


# Hooks of the user ------------------------------------------------------------------------------------------------


def test_step_hooks() -> None:
    net = Net()
    optimizer = make(net)
    calls: list[str] = []
    handle = optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    with pytest.raises(ValueError, match="`AdamW` has a `step` pre-hook"):
        OptimizerInBackward(optimizer).attach()
    handle.remove()
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    with OptimizerInBackward(optimizer):
        for _ in range(3):
            loss_of(net).backward()
            optimizer.step()
        assert calls == ["post"] * 3
        handle = optimizer.register_step_pre_hook(lambda *_: None)
        loss_of(net).backward()
        with pytest.raises(ValueError, match="`AdamW` has a `step` pre-hook"):
            optimizer.step()
        handle.remove()
    with OptimizerInBackward(optimizer):
        loss_of(net).backward()
        with pytest.raises(RuntimeError, match="`AdamW` has a `step` post-hook, which runs in"):
            loss_of(net).backward()


def test_hooks_for_all_optimizers_run_once_a_step() -> None:
    net = Net()
    calls: list[Any] = []
    handles = [
        register_optimizer_step_pre_hook(lambda optimizer, *_: calls.append(optimizer)),
        register_optimizer_step_post_hook(lambda optimizer, *_: calls.append(optimizer)),
    ]
    try:
        optimizer = make(net)
        with OptimizerInBackward(optimizer):
            for _ in range(3):
                loss_of(net).backward()
                optimizer.step()
    finally:
        for handle in handles:
            handle.remove()
    assert len(calls) == 6
    assert all(call is optimizer for call in calls)


# Hyperparameters --------------------------------------------------------------------------------------------------


def compare(make: Callable[[nn.Module], torch.optim.Optimizer], **options: Any) -> None:
    """A run with everything that a state dict shows, ordinary and in backward."""

    def train(in_backward: bool) -> Any:
        torch.manual_seed(0)
        net = Net()
        optimizer = make(net)
        core = OptimizerInBackward(optimizer, [list(b.parameters()) for b in net.blocks], **options)
        if in_backward:
            core.attach()
        for step in range(6):
            if step == 3:
                for group in optimizer.param_groups:  # as a scheduler does it, by tensor or by number
                    if isinstance(group["lr"], Tensor):
                        group["lr"].fill_(2e-3)
                    else:
                        group["lr"] = 2e-3
            loss_of(net).backward()
            optimizer.step()
            optimizer.zero_grad()
        core.remove()
        return outcome(net, optimizer)

    assert_equal(train(True), train(False))


HYPERPARAMETERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "maximize": lambda net: torch.optim.AdamW(net.parameters(), maximize=True),
    "rate as a tensor": lambda net: torch.optim.AdamW(net.parameters(), lr=torch.tensor(1e-2), fused=True),
    "rate and betas as tensors": lambda net: (
        torch.optim.Adam(
            net.parameters(),
            lr=torch.tensor(1e-2),
            betas=(torch.tensor(0.9), torch.tensor(0.99)),
            capturable=True,
            foreach=False,
        )
        if torch.cuda.is_available()
        else torch.optim.NAdam(net.parameters(), lr=torch.tensor(1e-2), decoupled_weight_decay=True)
    ),
    "one group per parameter": lambda net: torch.optim.AdamW(
        [{"params": [p], "lr": 1e-3 * (i + 1), "betas": (0.5 + i / 100, 0.9)} for i, p in enumerate(net.parameters())]
    ),
    "averaging": lambda net: torch.optim.ASGD(net.parameters(), t0=2),
    "rprop": lambda net: torch.optim.Rprop(net.parameters()),
}


@pytest.mark.parametrize("name", HYPERPARAMETERS)
def test_hyperparameters(name: str) -> None:
    compare(HYPERPARAMETERS[name])


def test_refused_hyperparameters() -> None:
    with pytest.raises(ValueError, match=r"`SGD\(differentiable=True\)` keeps the graph of every step"):
        OptimizerInBackward(torch.optim.SGD(Net().parameters(), differentiable=True))


@pytest.mark.parametrize("clip", [None, ("norm", 0.5), ("value", 0.01)])
def test_sparse_gradients(clip: Any) -> None:
    """torch cannot clip them; the norm of a sparse gradient is that of its values."""

    def train(in_backward: bool, sparse: bool = True) -> Any:
        torch.manual_seed(0)
        net = nn.EmbeddingBag(9, 6, sparse=sparse)
        optimizer = (torch.optim.SparseAdam if sparse else torch.optim.SGD)(net.parameters(), lr=0.1)
        core = OptimizerInBackward(optimizer, clip=clip, grad_norm=True, on_nonfinite="error")
        if in_backward:
            core.attach()
        norms = []
        for _ in range(4):
            loss = net(torch.randint(9, (4, 3))).square().sum()
            if in_backward:
                core.backward(loss)
                norms.append(core.grad_norm)
            else:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return outcome(net, optimizer), norms

    if clip is None:
        assert_equal(train(True)[0], train(False)[0])
    else:
        assert_equal(train(True, sparse=True)[1][:1], train(True, sparse=False)[1][:1])


@pytest.mark.parametrize("options", [{}, {"grad_norm": True}, {"on_nonfinite": "error"}])
def test_looking_at_a_sparse_gradient_does_not_change_the_step(options: dict[str, Any]) -> None:
    """SGD adds up duplicate entries itself, in another order than `coalesce` does."""

    def train(in_backward: bool) -> Tensor:
        torch.manual_seed(0)
        net = nn.Embedding(5, 8, sparse=True)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        core = OptimizerInBackward(optimizer, **options)
        if in_backward:
            core.attach()
        for _ in range(5):
            optimizer.zero_grad()
            (net(torch.randint(5, (64,))) * torch.randn(64, 8)).sum().backward()
            optimizer.step()
        return net.weight.detach()

    assert_equal(train(True), train(False))


# Examples, Fabric, wrappers ---------------------------------------------------------------------------------------


def test_bare_loop_example() -> None:
    model, optimizer, losses = bare_loop.main()
    expected = bare_loop.main(in_backward=False)
    assert losses == expected[2]
    assert_equal(outcome(model, optimizer), outcome(*expected[:2]))


def fabric() -> None:
    """Accumulation and clipping on two ranks, and a state dict that goes on in an ordinary loop."""
    for clip in (None, ("norm", 0.05)):
        ours = fabric_loop.main(in_backward=True, clip=clip, accelerator="cpu")
        ordinary = fabric_loop.main(in_backward=False, clip=clip, accelerator="cpu")
        for (name, mine), (_, other) in zip(ours[0].named_parameters(), ordinary[0].named_parameters(), strict=True):
            torch.testing.assert_close(full(mine), full(other), rtol=0, atol=1e-6 if clip else 0, msg=name)
        assert len(ours[2]) == len(ordinary[2]) == 10
        weight = next(ours[0].parameters())
        assert weight._local_tensor.numel() * 2 == weight.numel()  # the two ranks share it
        if clip is None:
            assert ours[2] == ordinary[2]
            ours_state, state = ours[1].state_dict(), ordinary[1].state_dict()
            assert_equal(whole(ours_state), whole(state))
            ordinary[1].load_state_dict(ours_state)


def fabric_checkpoints(folder: Path) -> None:
    """Either loop goes on from the other's checkpoint."""
    unbroken = fabric_loop.main(in_backward=False, clip=None, accelerator="cpu")
    for first in (True, False):
        file = folder / f"in_backward={first}"
        fabric_loop.main(2, in_backward=first, clip=None, accelerator="cpu", save=file)
        resumed = fabric_loop.main(in_backward=not first, clip=None, accelerator="cpu", start=2, load=file)
        assert resumed[2] == unbroken[2][4:]
        assert_equal(whole(resumed[1].state_dict()), whole(unbroken[1].state_dict()))
        for mine, other in zip(resumed[0].parameters(), unbroken[0].parameters(), strict=True):
            assert_equal(full(mine), full(other))


def whole(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "state": {i: {k: full(v) for k, v in entry.items()} for i, entry in state["state"].items()}}


def wrapped() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    for wrap in (
        DistributedDataParallel,
        lambda net: FullyShardedDataParallel(net, use_orig_params=True, device_id="cpu"),
    ):
        module = wrap(nn.Linear(4, 4))
        with pytest.raises(TypeError, match=r"are wrapped in `(Dist|Fully).*DataParallel`.*Shard the bare module"):
            OptimizerInBackward(make(module)).attach()
        del module
    gc.collect()


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_two_ranks(tmp_path: Path) -> None:
    run_distributed(fabric)
    run_distributed(fabric_checkpoints, tmp_path)
    run_distributed(wrapped)
