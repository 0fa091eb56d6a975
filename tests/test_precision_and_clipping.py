from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from helpers import Lit, assert_equal, loader, seeded, trainer
from lightning_bwdopt import FSDPOptimInBwdStrategy, SingleDeviceOptimInBwdStrategy
from observing import LOOPS, assert_same_runs, observe

KEYS = ("losses", "weights", "state", "groups", "global_step")


# Clipping ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", LOOPS)
def test_clipping_is_disabled_with_one_warning_that_names_the_value(loop: str) -> None:
    unclipped = observe("ordinary", max_steps=4)
    run = observe(loop, max_steps=4, gradient_clip_val=1e-3)
    for key in KEYS:
        assert_equal(run[key], unclipped[key], key)
    (warning,) = [text for text in run["warnings"] if "lipping" in text]
    assert "`gradient_clip_val=0.001`" in warning
    assert "`gradient_clipping='exact'`" in warning


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("treatment", ["disable", "error", "exact"])
@pytest.mark.parametrize("value", [None, 0, 0.0])
def test_null_and_zero_are_no_clipping(value: float | None, treatment: str, loop: str) -> None:
    assert_same_runs(max_steps=2, gradient_clip_val=value, options={"gradient_clipping": treatment}, loops=(loop,))


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_exact_clipping_by_value_equals_the_ordinary_run(accumulate: int, loop: str) -> None:
    run = assert_same_runs(
        max_steps=-1,
        max_epochs=1,
        batches=7,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=0.01,
        gradient_clip_algorithm="value",
        options={"gradient_clipping": "exact"},
        loops=(loop,),
        ignore=("`accumulate_grad_batches=",),
    )
    unclipped = observe("ordinary", max_steps=-1, max_epochs=1, batches=7, accumulate_grad_batches=accumulate)
    with pytest.raises(AssertionError):
        assert_equal(run["weights"], unclipped["weights"])


@pytest.mark.parametrize("loop", LOOPS)
def test_exact_clipping_by_norm_is_within_rounding_of_the_ordinary_run(loop: str) -> None:
    """The norm is summed in another order, so the last bit may differ."""
    settings: dict[str, Any] = {"max_steps": 6, "gradient_clip_val": 0.05, "options": {"gradient_clipping": "exact"}}
    ordinary, run = observe("ordinary", **settings), observe(loop, **settings)
    for name, weight in ordinary["weights"].items():
        torch.testing.assert_close(run["weights"][name], weight, rtol=1e-6, atol=1e-6)
    assert run["global_step"] == 6
    assert [call[0] for call in run["hooks"]] == [call[0] for call in ordinary["hooks"]]


class OwnClipping(Lit):
    """Clips in its own hook, as Lightning documents it."""

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=1e-3, gradient_clip_algorithm="value")


@pytest.mark.parametrize("loop", LOOPS)
def test_overridden_clipping_is_treated_alike(loop: str) -> None:
    unclipped = observe("ordinary", max_steps=3)
    run = observe(loop, OwnClipping, max_steps=3)
    for key in KEYS:
        assert_equal(run[key], unclipped[key], key)
    assert sum("Gradient clipping (in `configure_gradient_clipping`) is disabled" in w for w in run["warnings"]) == 1


class ClipsItself(Lit):
    """Calls `clip_gradients` between `manual_backward` and `step`."""

    clip_value = 0.01

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        self.clip_gradients(self.optimizers(), gradient_clip_val=self.clip_value, gradient_clip_algorithm="value")
        self.optimizers().step()
        self.optimizers().zero_grad()
        return loss


def test_clip_gradients_in_user_code_is_treated_alike() -> None:
    run = observe("automatic", ClipsItself, max_steps=3)
    (warning,) = [text for text in run["warnings"] if "lipping" in text]
    assert "`gradient_clip_val=0.01`" in warning
    assert run["global_step"] == 3
    with pytest.raises(MisconfigurationException, match="`gradient_clip_val=0.01` needs all gradients at once"):
        observe("automatic", ClipsItself, options={"gradient_clipping": "error"})
    with pytest.raises(MisconfigurationException, match=r"`clip_gradients\(0.01, 'value'\)` came after"):
        observe("automatic", ClipsItself, options={"gradient_clipping": "exact"})


# Precision --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "64-true"])
def test_precisions_train_as_in_the_ordinary_run(precision: Any) -> None:
    assert_same_runs(max_steps=4, precision=precision, gradient_clip_val=None)


def test_fp16_with_a_scaler_is_left_alone_with_the_mode_off() -> None:
    run = trainer(
        max_steps=2,
        strategy=SingleDeviceOptimInBwdStrategy(enabled=False),
        plugins=[MixedPrecision("16-mixed", device="cpu")],
    )
    module = seeded(Lit)
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.1)
    run.fit(module, loader(), loader(2))
    assert run.global_step == 2


def test_lightning_refuses_64_bits_for_an_instance_of_the_fsdp_strategy() -> None:
    """Chosen by name, and with a plugin, it is refused by `checks.check_double_precision`."""
    with pytest.raises(ValueError, match="does not support .*64-true"):
        trainer(strategy=FSDPOptimInBwdStrategy(), precision="64-true")
