from __future__ import annotations

import copy
import io
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor

from helpers import Lit, assert_equal, loader, observables, seeded, trainer
from lightning_bwdopt import OptimInBwdMixin, SingleDeviceOptimInBwdStrategy
from lightning_bwdopt.callbacks import OptimInBwdMonitor
from observing import LOOPS, observe, optimizers_of, strategy_of, with_mixin


class Plain(Lit):
    """At the top of a module, so that it can be pickled; as is its scheduler."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Mixed(OptimInBwdMixin, Plain):
    """The same on the manual path."""


MODULES: dict[str, type[LightningModule]] = {"ordinary": Plain, "automatic": Plain, "manual": Mixed}


# Fits one after another -------------------------------------------------------------------------------------------


def _two_fits(run: Trainer, module: Any) -> None:
    run.validate(module, loader(2), verbose=False)
    run.fit(module, loader(4), loader(2))
    run.test(module, loader(2), verbose=False)
    run.predict(module, loader(2))
    run.fit_loop.max_epochs = 2
    run.fit(module, loader(4), loader(2))


class Evaluated(Plain):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self(batch[0]).mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])


def test_validate_fit_test_predict_and_fit_again_equal_the_ordinary_run() -> None:
    ordinary = observe("ordinary", Evaluated, fit=_two_fits, max_steps=-1, max_epochs=1)
    assert ordinary["global_step"] == 8
    for loop in LOOPS:
        run = observe(loop, Evaluated, fit=_two_fits, max_steps=-1, max_epochs=1)
        for key in ordinary:
            assert_equal(run[key], ordinary[key], f"{loop}: {key}")


@pytest.mark.parametrize("loop", LOOPS)
def test_second_fit_with_a_new_trainer_does_not_double_the_hooks(loop: str) -> None:
    runs = {}
    for which in ("ordinary", loop):
        module = seeded(with_mixin(Lit) if which == "manual" else Lit)
        for _ in range(2):
            run = trainer(max_steps=3, strategy=strategy_of(which))
            run.fit(module, loader(), loader(2))
        runs[which] = observables(module, run)
    assert_equal(runs[loop], runs["ordinary"])


@pytest.mark.parametrize("loop", LOOPS)
def test_nothing_is_left_on_the_module_and_it_trains_under_another_strategy(loop: str) -> None:
    weights, attributes = [], []
    for which in ("ordinary", loop):
        module = seeded(with_mixin(Lit))
        run = trainer(max_steps=3, strategy=strategy_of(which))
        run.fit(module, loader(), loader(2))
        assert not any(p._post_accumulate_grad_hooks for p in module.parameters())
        attributes.append(set(vars(module)))
        assert module.automatic_optimization
        assert "clip_gradients" not in vars(run.strategy.precision_plugin)
        assert not hasattr(vars(run.optimizers[0]).get("step"), "__self__") or which == "ordinary"
        trainer(max_steps=3, strategy="auto").fit(module, loader(), loader(2))
        weights.append(dict(module.named_parameters()))
    assert_equal(*weights)
    assert attributes[0] == attributes[1]


@pytest.mark.parametrize("loop", LOOPS)
def test_saving_after_fit_has_the_right_step(loop: str, tmp_path: Path) -> None:
    module = seeded(with_mixin(Lit) if loop == "manual" else Lit)
    run = trainer(max_steps=3, strategy=strategy_of(loop))
    run.fit(module, loader(), loader(2))
    run.save_checkpoint(tmp_path / "after.ckpt")
    assert torch.load(tmp_path / "after.ckpt", weights_only=False)["global_step"] == run.global_step == 3


# Copies -----------------------------------------------------------------------------------------------------------


def _through_a_file(thing: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda thing: pickle.loads(pickle.dumps(thing)),
    "torch.save": _through_a_file,
}


class Copying(Callback):
    """Copies what it can in the middle of training."""

    def __init__(self) -> None:
        self.copies: dict[tuple[str, str, str], Any] = {}

    def copy(self, when: str, run: Trainer, module: LightningModule) -> None:
        things = {
            "trainer": run,
            "module": module,
            "optimizer": run.optimizers[0],
            "callbacks": [callback for callback in run.callbacks if callback is not self],
            "strategy": run.strategy,
            "schedulers": run.lr_scheduler_configs,
            "parameters": list(module.parameters()),
        }
        for how, copied in COPIES.items():
            for name, thing in things.items():
                try:
                    self.copies[when, how, name] = copied(thing)
                except Exception as error:
                    self.copies[when, how, name] = type(error)

    def on_train_batch_end(self, run: Trainer, module: LightningModule, *args: Any) -> None:
        if run.global_step == 2:
            self.copy("during", run, module)

    def __getstate__(self) -> dict[str, Any]:
        return {"copies": {}}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_all_that_can_be_copied_in_the_ordinary_run_can_be_copied() -> None:
    copies, weights = {}, {}
    for loop, module_class in MODULES.items():
        copying = Copying()
        callbacks = [copying, OptimInBwdMonitor(), EarlyStopping("loss", patience=99)]
        module = seeded(module_class)
        run = trainer(max_steps=3, strategy=strategy_of(loop), callbacks=callbacks, logger=True)
        run.fit(module, loader(), loader(2))
        weights[loop] = dict(module.named_parameters())
        copying.copy("after", run, module)
        copies[loop] = copying.copies
    for loop in LOOPS:
        assert_equal(weights[loop], weights["ordinary"])  # copying has changed nothing
        for key, ordinary in copies["ordinary"].items():
            assert isinstance(copies[loop][key], type) == isinstance(ordinary, type), (loop, key, copies[loop][key])
    assert sum(not isinstance(thing, type) for thing in copies["ordinary"].values()) >= 40

    for (when, how, name), thing in copies["manual"].items():
        if name == "module":
            assert not any(p._post_accumulate_grad_hooks for p in thing.parameters())
            assert thing.automatic_optimization
            trainer(max_steps=1, strategy="auto").fit(thing, loader(), loader(2))
        if name == "optimizer":
            param = thing.param_groups[0]["params"][0]
            before, param.grad = param.detach().clone(), torch.ones_like(param)
            thing.step()
            assert not torch.equal(param, before), (when, how)


def test_hooks_of_users_on_parameters_keep_running_and_see_the_gradient() -> None:
    seen: dict[str, list[Tensor]] = {"ordinary": [], "automatic": []}
    for loop, gradients in seen.items():
        module = seeded(Lit)
        weight = module.net.head.weight
        weight.register_hook(lambda gradient: gradient * 2)
        weight.register_post_accumulate_grad_hook(lambda p, into=gradients: into.append(p.grad.clone()))
        trainer(max_steps=3, strategy=strategy_of(loop)).fit(module, loader(), loader(2))
    assert len(seen["ordinary"]) == 3
    assert_equal(seen["automatic"], seen["ordinary"])


# Exceptions -------------------------------------------------------------------------------------------------------


class Trouble(Exception):
    """What a test raises."""


class Interrupted(Lit):
    """Raises at the third step: in backward, when some blocks have been stepped, or elsewhere."""

    where = "backward"
    error: Any = Trouble

    def trouble(self, where: str) -> None:
        if where == self.where and self.global_step == 2:
            if self.error is KeyboardInterrupt:
                os.kill(os.getpid(), signal.SIGINT)
            else:
                raise self.error("something broke")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.trouble("training_step")
        middle = self.net.stem(x)
        for number, block in enumerate(self.net.blocks):
            middle = block(middle)
            if number == 0:
                middle.register_hook(lambda gradient: self.trouble("backward"))
        loss = (self.net.head(middle) - y).square().mean()
        loss.register_hook(lambda gradient: self.trouble("start of backward"))
        self.log("loss", loss)
        return loss

    def on_after_backward(self) -> None:
        self.trouble("on_after_backward")

    def on_train_batch_end(self, *args: Any) -> None:
        self.trouble("on_train_batch_end")


class InterruptedManual(Interrupted):
    """Steps by itself; raises between `manual_backward` and `step`, too."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        self.trouble("between backward and step")
        self.optimizers().step()
        return loss


def _saving(folder: Path) -> list[Callback]:
    by_step = ModelCheckpoint(folder, filename="model-{step}", save_on_exception=True, every_n_train_steps=100)
    return [by_step, OnExceptionCheckpoint(str(folder)), Keeps()]


class Keeps(Checkpoint):
    """Notes which files are there, before Lightning deletes that of `OnExceptionCheckpoint` in its teardown.

    Lightning calls checkpoint callbacks last, in their order.
    """

    def __init__(self) -> None:
        self.files: list[str] = []

    def on_exception(self, run: Trainer, *args: Any) -> None:
        folder = Path(run.checkpoint_callbacks[0].dirpath)
        self.files = sorted(path.name for path in folder.glob("*.ckpt"))


def _looks_for_a_checkpoint(test: Any) -> Any:
    """With an `OnExceptionCheckpoint` Lightning looks for something to resume from, and says so."""
    for text in (".*was called without a model", ".*there is no last checkpoint available"):
        test = pytest.mark.filterwarnings(f"ignore:{text}")(test)
    return test


@pytest.fixture
def _ctrl_c() -> Iterator[None]:
    """Lightning leaves Ctrl-C ignored after one, and so does a shell for what it starts in the background."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


@_looks_for_a_checkpoint
@pytest.mark.usefixtures("_ctrl_c")
@pytest.mark.parametrize("error", [Trouble, KeyboardInterrupt])
@pytest.mark.parametrize(
    ("module_class", "loop", "where"),
    [
        (Interrupted, "automatic", "backward"),
        (Interrupted, "manual", "backward"),
        (Interrupted, "automatic", "on_after_backward"),
        (InterruptedManual, "automatic", "between backward and step"),
    ],
)
def test_a_half_applied_step_is_not_saved(
    module_class: type[Interrupted], loop: str, where: str, error: Any, tmp_path: Path
) -> None:
    module = seeded(with_mixin(module_class) if loop == "manual" else module_class)
    module.where, module.error = where, error
    callbacks = _saving(tmp_path)
    run = trainer(strategy=strategy_of(loop), callbacks=callbacks, enable_checkpointing=True)
    survives = pytest.raises(SystemExit) if error is KeyboardInterrupt else pytest.raises(Trouble, match="broke")
    with pytest.warns(UserWarning, match="saved no checkpoint on this exception. Some parameters") as caught, survives:
        run.fit(module, loader(), loader(2))
    saved = [str(w.message).split("`")[1] for w in caught if "saved no checkpoint" in str(w.message)]
    assert saved == ["ModelCheckpoint", "OnExceptionCheckpoint"]
    assert callbacks[2].files == []
    assert run.strategy.step_half_applied
    with pytest.raises(RuntimeError, match="weights are those of no step and are not saved"):
        run.save_checkpoint(tmp_path / "explicit.ckpt")
    assert not any("on_exception" in vars(callback) for callback in callbacks)
    assert not list(tmp_path.glob("*"))


@_looks_for_a_checkpoint
@pytest.mark.usefixtures("_ctrl_c")
@pytest.mark.parametrize("error", [Trouble, KeyboardInterrupt])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("where", ["training_step", "start of backward", "on_train_batch_end"])
def test_exceptions_elsewhere_save_as_usual(where: str, loop: str, error: Any, tmp_path: Path) -> None:
    states = {}
    for which in ("ordinary", loop):
        module = seeded(with_mixin(Interrupted) if which == "manual" else Interrupted)
        module.where, module.error = where, error
        callbacks = _saving(tmp_path / which)
        run = trainer(strategy=strategy_of(which), callbacks=callbacks, enable_checkpointing=True)
        with pytest.raises(SystemExit if error is KeyboardInterrupt else Trouble):
            run.fit(module, loader(), loader(2))
        assert callbacks[2].files == ["model-step=2.ckpt", "on_exception.ckpt"]
        run.save_checkpoint(tmp_path / which / "explicit.ckpt")
        states[which] = torch.load(tmp_path / which / "model-step=2.ckpt", weights_only=False)
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step"):
        assert_equal(states[loop][key], states["ordinary"][key])


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_an_interrupted_run_can_be_resumed_from_its_last_checkpoint(tmp_path: Path) -> None:
    def run_of(enabled: bool) -> Trainer:
        saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        strategy = SingleDeviceOptimInBwdStrategy(enabled=enabled)
        return trainer(max_steps=4, strategy=strategy, callbacks=[saving], enable_checkpointing=True)

    module = seeded(Interrupted)
    with pytest.raises(Trouble):
        (run := run_of(True)).fit(module, loader(2), loader(2))
    resumed = []
    for again in (run, run_of(True), run_of(False)):
        module.where = "nowhere"
        again.fit(module, loader(2), loader(2), ckpt_path=tmp_path / "step=2.ckpt")
        again.save_checkpoint(tmp_path / "again.ckpt")
        weights = {name: p.detach().clone() for name, p in module.named_parameters()}
        resumed.append((weights, optimizers_of(again, module)["state"]))
        module = seeded(Interrupted)
    assert_equal(resumed[0], resumed[2])
    assert_equal(resumed[1], resumed[2])
