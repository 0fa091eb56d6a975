"""The models that `benchmark.py` trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Scenario:
    """A model, a batch, and the loss that is trained.

    Args:
        build: Makes the model.
        batch: Makes the input on a device.
        repeats: Steps that are timed together in a round.
        slow: A step takes long, so that fewer rounds do.
        counts_gradients: Whether counting live gradients, which takes a time quadratic in parameters, is bearable.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[torch.device], Tensor]
    repeats: int = 1
    slow: bool = False
    counts_gradients: bool = True

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()


class Residual(nn.Module):
    """Bias-free square layers with residuals."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x) / len(self.layers)
        return x


def many_small(blocks: int, layers: int = 9, width: int = 64) -> nn.Module:
    return nn.Sequential(*(Residual(layers, width) for _ in range(blocks)))


def one_large(vocabulary: int, width: int, blocks: int) -> nn.Module:
    """An embedding that outweighs all the rest."""
    return nn.Sequential(nn.Embedding(vocabulary, width), many_small(blocks, 2, width))


class SmolLM(nn.Module):
    """The architecture of SmolLM2-135M, with random weights; its logits."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            vocab_size=49152,
            tie_word_embeddings=True,
            use_cache=False,
        )
        self.model = LlamaForCausalLM(config)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens).logits


def noise(rows: int, width: int, device: torch.device) -> Tensor:
    return torch.randn(rows, width, device=device)


def tokens(rows: int, length: int, vocabulary: int, device: torch.device) -> Tensor:
    return torch.randint(vocabulary, (rows, length), device=device)


SCENARIOS = {
    "many-small": Scenario(partial(many_small, 32), partial(noise, 16, 64), repeats=5),
    "many-small-x10": Scenario(partial(many_small, 320), partial(noise, 16, 64), slow=True, counts_gradients=False),
    "one-large": Scenario(partial(one_large, 50_000, 256, 4), partial(tokens, 4, 32, 50_000)),
    "recipe": Scenario(SmolLM, partial(tokens, 1, 64, 49_152), slow=True),
    "toy": Scenario(partial(many_small, 2, 2, 8), partial(noise, 4, 8)),
}
