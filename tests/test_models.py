"""Models of `transformers` with their own checkpointing, adapters of `peft`: on two FSDP2 ranks."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from helpers import Block, Lit, assert_equal, loader, observables, run_distributed, seeded, trainer
from lightning_bwdopt import FSDPOptimInBwdStrategy


def fit(make: type[LightningModule], devices: int = 2, **options: Any) -> dict[str, Any]:
    module = seeded(make)
    run = trainer(strategy=FSDPOptimInBwdStrategy(**options), devices=devices, max_steps=5)
    run.fit(module, loader(ranks=devices))
    return observables(module, run)


class Llama(LightningModule):
    """A tiny Llama with tied embeddings, which recomputes activations itself where it is told to."""

    recompute: ClassVar[bool] = False
    adapters: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        tiny = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
        config = LlamaConfig(**tiny, num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True)
        self.model: Any = LlamaForCausalLM(config)
        if self.recompute:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if self.adapters:
            from peft import LoraConfig, get_peft_model

            self.model = get_peft_model(self.model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
        self.losses: list[Tensor] = []
        self.rates: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens = (batch[0] * 10).long() % 32
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class Recomputing(Llama):
    recompute = True


class Adapted(Llama):
    adapters = True


class Lines(logging.Handler):
    """What the strategy tells the user at start."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def check_transformers() -> None:
    expected = fit(Llama, enabled=False)
    assert_equal(fit(Llama), expected)
    assert_equal(fit(Recomputing), expected)
    check_adapters()


def check_adapters() -> None:
    rank_zero = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    rank_zero.addHandler(lines := Lines())
    expected = fit(Adapted, enabled=False)
    start = dict(seeded(Adapted).named_parameters())
    moved = {name for name, weight in expected["weights"].items() if not torch.equal(weight, start[name])}
    assert moved == {name for name in start if ".lora_" in name}
    assert not any("are trainable. Their gradients take" in line for line in lines.said)  # the mode is off
    for granularity in ("unit", "parameter"):
        lines.said.clear()
        assert_equal(fit(Adapted, granularity=granularity), expected)
        if torch.distributed.get_rank() == 0:
            assert sum(": 3 x LlamaDecoderLayer (" in line for line in lines.said) == 1
            assert sum("are trainable. Their gradients take" in line for line in lines.said) == 1
    rank_zero.removeHandler(lines)


def test_transformers_and_adapters() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    run_distributed(check_transformers)


class Manual(Lit):
    """Calls `manual_backward` itself; the policy says what is sharded inside its network."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def check_policy_in_manual() -> None:
    module = seeded(Manual)
    strategy = FSDPOptimInBwdStrategy(auto_wrap_policy={nn.Linear})
    run = trainer(strategy=strategy, devices=2, max_steps=5)
    run.fit(module, loader(ranks=2))
    sharded = [name for name, child in module.named_modules() if isinstance(child, torch.distributed.fsdp.FSDPModule)]
    assert "net.blocks.0.inner" in sharded
    assert "net.blocks.0" not in sharded
    assert isinstance(module.net.blocks[0], Block)


def test_policy_of_a_manual_module() -> None:
    run_distributed(check_policy_in_manual)
