"""The data modules: text packed to a fixed length, and random tokens of the same shape."""

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, StackDataset, random_split
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data.distributed import DistributedSampler
from typing_extensions import override

from examples.errors import InputError
from examples.text_files import IGNORED, encode, read_rows


class ResumableLoader(DataLoader[dict[str, Tensor]]):
    """A DataLoader whose place within the epoch goes into Lightning's checkpoints.

    Lightning restores its own counters in the middle of an epoch, but not the data: an ordinary loader starts over
    and trains on the first batches again. A loader with ``state_dict`` and ``load_state_dict`` is asked for them.

    Args:
        dataset: What the sampler indexes.
        sampler: Its order must follow from its seed and epoch alone.
        **kwargs: As for ``torch.utils.data.DataLoader``.
    """

    def __init__(
        self, dataset: TorchDataset[dict[str, Tensor]], sampler: DistributedSampler[Any], **kwargs: Any
    ) -> None:
        super().__init__(dataset, sampler=sampler, **kwargs)
        self._order = sampler
        self._given = 0
        self._resume: dict[str, int] | None = None

    @override
    def __iter__(self) -> Iterator[dict[str, Tensor]]:  # type: ignore[override]  # a generator is enough here
        # A generator runs from its first `next` only: Lightning makes the iterator first and sets the epoch then.
        state, self._resume = self._resume, None
        # A checkpoint from the end of an epoch is resumed in the next one, from its beginning.
        skipped = state["batches"] if state is not None and state["epoch"] == self._order.epoch else 0
        self._given = skipped
        for batch in islice(super().__iter__(), skipped, None):
            self._given += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Returns the epoch and how many of its batches this rank was given."""
        return {"epoch": self._order.epoch, "batches": self._given}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Makes the next iteration start where the saved one stood.

        Args:
            state_dict: From ``state_dict``, with the same batch size and number of ranks.
        """
        self._resume = dict(state_dict)


class TokenBlocks(LightningDataModule):
    """Blocks of tokens of one length: the part that the data modules share.

    Each batch is a dict of int64 tensors (batch, sequence): ``input_ids``, and ``labels``, which equal them or are -100
    where the loss counts nothing; they are not shifted. Each data-parallel rank gets its part of one common shuffled
    order, ranks of one tensor-parallel group get the same part.

    Args:
        sequence_length: Tokens per sequence, at least 2.
        batch_size: Sequences per rank and step.
        validation_fraction: How much is held out, between 0 and 1; at least one sequence is.
        seed: Fixes what is held out, and the order.
        num_workers: Processes that prepare batches. The data lies in memory: 0 is fast.

    Raises:
        InputError: An argument is out of its range.
    """

    def __init__(
        self,
        sequence_length: int = 1024,
        batch_size: int = 1,
        validation_fraction: float = 0.05,
        seed: int = 42,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        if sequence_length < 2:
            raise InputError(f"`sequence_length: {sequence_length}` leaves no next token to predict: use 2 or more.")
        if batch_size < 1:
            raise InputError(f"`batch_size: {batch_size}` gives a step no data: use 1 or more.")
        if not 0 < validation_fraction < 1:
            raise InputError(
                f"`validation_fraction: {validation_fraction}` leaves nothing to validate on, or nothing to train on:"
                " use a value between 0 and 1, such as 0.05."
            )
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.validation_fraction = validation_fraction
        self.seed = seed
        self.num_workers = num_workers
        self._parts: list[Any] | None = None

    def blocks(self) -> tuple[Tensor, Tensor]:
        """Returns ``input_ids`` and ``labels``, each int64 (at least 2 sequences, sequence_length)."""
        raise NotImplementedError

    @override
    def setup(self, stage: str) -> None:
        if self._parts is not None:
            return
        input_ids, labels = self.blocks()
        held_out = min(max(1, round(len(input_ids) * self.validation_fraction)), len(input_ids) - 1)
        self._parts = random_split(
            StackDataset(input_ids=input_ids, labels=labels),  # type: ignore[arg-type]  # anything indexable will do
            [len(input_ids) - held_out, held_out],
            generator=torch.Generator().manual_seed(self.seed),
        )

    @override
    def train_dataloader(self) -> ResumableLoader:
        return self._loader(0, training=True)

    @override
    def val_dataloader(self) -> ResumableLoader:
        return self._loader(1, training=False)

    def _loader(self, part: int, training: bool) -> ResumableLoader:
        assert self._parts is not None, "Lightning calls `setup` first"
        dataset = self._parts[part]
        # Lightning gives `None` where there is one data-parallel rank only.
        ranks = (self.trainer.distributed_sampler_kwargs if self.trainer else None) or {"num_replicas": 1, "rank": 0}
        if training and len(dataset) < ranks["num_replicas"] * self.batch_size:
            raise InputError(
                f"There are `{len(dataset)}` training sequences of {self.sequence_length} tokens, fewer than one step"
                f" takes ({ranks['num_replicas']} ranks x batch_size {self.batch_size}): give more text, or lower"
                " `sequence_length`, `batch_size` or the number of ranks."
            )
        # In training the last sequences that do not fill a step of all ranks wait for another epoch's order. In
        # validation the sampler instead repeats up to (ranks - 1) sequences, so that none is left out.
        sampler: DistributedSampler[Any] = DistributedSampler(
            dataset, **ranks, shuffle=training, seed=self.seed, drop_last=training
        )
        return ResumableLoader(
            dataset, sampler, batch_size=self.batch_size, drop_last=training, num_workers=self.num_workers
        )


class TextDataModule(TokenBlocks):
    """Text from one file, tokenized by the model's tokenizer and packed without padding.

    All documents are joined, an end token between them, and cut into sequences; the remainder is dropped. A document
    may be cut, and a token sees those before it in its sequence, also of other documents. Everything is held in
    memory, at 16 bytes per token.

    Args:
        path: A ``.txt``, ``.jsonl`` or ``.parquet`` file with ``text``, with ``prompt`` and ``response``, or with chat
            ``messages``; the loss then counts the answers only. ``None``: the Python language reference.
        sequence_length: Tokens per sequence, at least 2.
        batch_size: Sequences per rank and step.
        validation_fraction: How much is held out, between 0 and 1; at least one sequence is.
        seed: Fixes what is held out, and the order.
        num_workers: Processes that prepare batches. The data lies in memory: 0 is fast.

    Raises:
        InputError: An argument is out of its range. Later, from ``read`` or ``setup``: the file is missing, empty,
            malformed, or shorter than one sequence to train on and one to hold out.
    """

    def __init__(
        self,
        path: str | None = None,
        sequence_length: int = 1024,
        batch_size: int = 1,
        validation_fraction: float = 0.05,
        seed: int = 42,
        num_workers: int = 0,
    ) -> None:
        super().__init__(sequence_length, batch_size, validation_fraction, seed, num_workers)
        self.path = path
        self._rows: Dataset | None = None

    def read(self) -> Dataset:
        """Reads and checks the file, once. Called before ``fit``, it finds faults before any process starts."""
        if self._rows is None:
            self._rows = read_rows(self.path)
        return self._rows

    @override
    def blocks(self) -> tuple[Tensor, Tensor]:
        tokenizer = self.trainer.lightning_module.tokenizer if self.trainer else None
        if tokenizer is None:
            raise InputError(
                f"The text `{self.path or 'Python language reference'}` needs a tokenizer, but the model has none: set"
                " the model's `tokenizer` to a hub id or folder, or use `RandomTokenDataModule`."
            )
        disable_progress_bars()  # every rank would draw its own
        rows = self.read()
        encoded = rows.map(encode, fn_kwargs={"tokenizer": tokenizer}, remove_columns=rows.column_names)
        return self._pack(encoded)

    def _pack(self, encoded: Dataset) -> tuple[Tensor, Tensor]:
        input_ids, labels = (
            torch.tensor(list(chain.from_iterable(encoded[name])), dtype=torch.int64)
            for name in ("input_ids", "labels")
        )
        count = len(input_ids) // self.sequence_length
        used = count * self.sequence_length
        blocks = input_ids[:used].view(count, self.sequence_length), labels[:used].view(count, self.sequence_length)
        # A sequence without any answer would have the mean loss 0/0. The first token is never predicted.
        counted = (blocks[1][:, 1:] != IGNORED).any(dim=1)
        if counted.sum() < 2:
            raise InputError(
                f"The text `{self.path or 'Python language reference'}` has `{len(input_ids)}` tokens, which make"
                f" {int(counted.sum())} sequences of `sequence_length: {self.sequence_length}` with something to learn."
                " At least 2 are needed, one to train on and one to hold out: give more text, or lower"
                " `sequence_length`."
            )
        return blocks[0][counted], blocks[1][counted]


class RandomTokenDataModule(TokenBlocks):
    """Random tokens, for tests and measurements: no file and no tokenizer.

    Args:
        vocab_size: Token numbers are drawn evenly from 0 to this, exclusive.
        sequences: How many sequences there are, training and validation together; at least 2.
        sequence_length: Tokens per sequence, at least 2.
        batch_size: Sequences per rank and step.
        validation_fraction: How much is held out, between 0 and 1; at least one sequence is.
        seed: Fixes the tokens, what is held out, and the order.
        num_workers: Processes that prepare batches. The data lies in memory: 0 is fast.

    Raises:
        InputError: An argument is out of its range.
    """

    def __init__(
        self,
        vocab_size: int = 32000,
        sequences: int = 64,
        sequence_length: int = 1024,
        batch_size: int = 1,
        validation_fraction: float = 0.05,
        seed: int = 42,
        num_workers: int = 0,
    ) -> None:
        super().__init__(sequence_length, batch_size, validation_fraction, seed, num_workers)
        if sequences < 2:
            raise InputError(f"`sequences: {sequences}` cannot be split into training and validation: use 2 or more.")
        self.vocab_size = vocab_size
        self.sequences = sequences

    @override
    def blocks(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        tokens = torch.randint(self.vocab_size, (self.sequences, self.sequence_length), generator=generator)
        return tokens, tokens
