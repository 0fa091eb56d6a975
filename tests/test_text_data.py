"""What the recipe's data modules read, how they pack it, and which rank gets what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import TensorDataset
from torch.utils.data.distributed import DistributedSampler

import lightning_bwdopt
from examples.causal_lm import CausalLM
from examples.errors import InputError
from examples.text_data import RandomTokenDataModule, ResumableLoader, TextDataModule
from examples.text_files import IGNORED, encode, read_rows
from helpers import run_distributed
from tiny_recipe import TINY, VOCAB_SIZE, byte_tokenizer, save_byte_tokenizer


def write(folder: Path, name: str, content: str | bytes) -> str:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def as_lines(*rows: dict[str, Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def learned(row: dict[str, Any]) -> str:
    """What the loss counts of a row."""
    encoded = encode(row, byte_tokenizer())
    pairs = zip(encoded["input_ids"], encoded["labels"], strict=True)
    assert all(label in (token, IGNORED) for token, label in pairs)
    return byte_tokenizer().decode([label for label in encoded["labels"] if label != IGNORED])


# Reading ------------------------------------------------------------------------------------------------------------


def test_built_in_text_is_the_language_reference() -> None:
    rows = read_rows(None)
    assert rows.column_names == ["text"]
    assert len(rows) > 70
    assert sum(len(text) for text in rows["text"]) > 400_000


def test_text_file_is_one_document(tmp_path: Path) -> None:
    rows = read_rows(write(tmp_path, "a.txt", "première ligne\n\nsecond\n"))
    assert rows.to_list() == [{"text": "première ligne\n\nsecond\n"}]


@pytest.mark.parametrize(
    "row",
    [
        {"text": "hello"},
        {"prompt": "1+1=", "response": "2"},
        {"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]},
    ],
    ids=["text", "prompt", "messages"],
)
def test_jsonl_and_parquet_agree(tmp_path: Path, row: dict[str, Any]) -> None:
    from_lines = read_rows(write(tmp_path, "a.jsonl", as_lines({**row, "id": 3}) + "\n"))
    Dataset.from_list([{**row, "id": 3}]).to_parquet(tmp_path / "a.parquet")
    assert from_lines.to_list() == [row]
    assert read_rows(str(tmp_path / "a.parquet")).to_list() == [row]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "text\n", r"type `\.csv`.*convert it to `\.txt`"),
        ("a.txt", "  \n", r"`.*a\.txt` is empty"),
        ("a.txt", b"one\ntwo \xff\n", r"line 2 holds the byte `0xff`.*Convert it to UTF-8"),
        ("a.jsonl", "", r"`.*a\.jsonl` is empty"),
        ("a.jsonl", as_lines({"text": "a"}) + "\n{oops\n", r"line 3: `{oops` is not JSON"),
        ("a.jsonl", as_lines({"text": "a"}) + "[1]\n", r"line 2: `\[1\]` is no JSON object with `text`"),
        ("a.jsonl", as_lines({"question": "a"}), r"line 1: .*name the fields so"),
        ("a.jsonl", as_lines({"text": 5}), r"line 1: `text` is `5`, which is no text"),
        ("a.jsonl", as_lines({"text": "a"}, {"prompt": "a", "response": "b"}), r"line 2: .*`prompt, response`.*`text`"),
        ("a.jsonl", as_lines({"messages": [{"role": "user"}]}), r"line 1: `messages` is .*`role` and `content`"),
        ("a.jsonl", as_lines({"messages": [{"role": "user", "content": "a"}]}), r"line 1: no message .*`assistant`"),
        ("a.parquet", "no parquet", r"`.*a\.parquet` cannot be read as parquet"),
    ],
)
def test_bad_file_is_named(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_rows(write(tmp_path, name, content))


def test_bad_columns_and_missing_file(tmp_path: Path) -> None:
    Dataset.from_list([{"question": "a"}]).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(InputError, match="columns `question`.*Rename them"):
        read_rows(str(tmp_path / "a.parquet"))
    with pytest.raises(InputError, match=r"`.*nowhere\.txt` does not exist"):
        read_rows(str(tmp_path / "nowhere.txt"))


# Encoding and packing -----------------------------------------------------------------------------------------------


def test_loss_counts_answers_only() -> None:
    assert learned({"text": "all of it"}) == "all of it<|end|>"
    assert learned({"prompt": "1+1=", "response": "2"}) == "2<|end|>"
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4"},
    ]
    assert learned({"messages": chat}) == "2<|end|>4<|end|>"
    whole = byte_tokenizer().decode(encode({"messages": chat}, byte_tokenizer())["input_ids"])
    assert whole == byte_tokenizer().apply_chat_template(chat, tokenize=False)


def test_chat_needs_a_template_that_only_appends() -> None:
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(InputError, match="no chat template"):
        encode(row, tokenizer)
    tokenizer.chat_template = "{{ messages | length }}"
    with pytest.raises(InputError, match="message `2` in another way"):
        encode(row, tokenizer)


def fit_once(data: Any, tokenizer: str, folder: Path, **kwargs: Any) -> Trainer:
    """Runs no step, but lets Lightning set everything up."""
    options: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "max_steps": 0, "logger": False, **kwargs}
    trainer = Trainer(
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
    )
    trainer.fit(CausalLM(architecture=TINY, tokenizer=tokenizer), datamodule=data)
    return trainer


def parts(data: Any) -> tuple[Tensor, Tensor]:
    """The training and the held-out sequences, in the order of the text."""
    data.setup("fit")
    return tuple(torch.stack([item["input_ids"] for item in part]) for part in data._parts)  # type: ignore[return-value]


def test_packing_keeps_every_token_once(tmp_path: Path) -> None:
    texts = [f"document {number} " * number for number in range(1, 9)]
    path = write(tmp_path, "a.jsonl", as_lines(*({"text": text} for text in texts)))
    data = TextDataModule(path, sequence_length=10, validation_fraction=0.25)
    fit_once(data, save_byte_tokenizer(tmp_path), tmp_path)
    stream = torch.tensor(byte_tokenizer()("<|end|>".join(texts) + "<|end|>")["input_ids"])
    expected = stream[: len(stream) // 10 * 10].view(-1, 10)
    training, held_out = parts(data)
    assert len(held_out) == round(0.25 * len(expected))
    got = torch.cat([training, held_out])
    assert sorted(got.tolist()) == sorted(expected.tolist())


def test_sequences_without_answer_are_left_out(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", as_lines(*[{"prompt": "x" * 40, "response": "yes"}] * 8))
    data = TextDataModule(path, sequence_length=8)
    fit_once(data, save_byte_tokenizer(tmp_path), tmp_path)
    assert data._parts is not None
    items = [item for part in data._parts for item in part]
    assert 8 <= len(items) <= 16
    assert all((item["labels"][1:] != IGNORED).any() for item in items)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sequence_length": 1}, "`sequence_length: 1`"),
        ({"batch_size": 0}, "`batch_size: 0`"),
        ({"validation_fraction": 1.0}, "`validation_fraction: 1.0`"),
        ({"sequences": 1}, "`sequences: 1`"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        RandomTokenDataModule(**arguments)


def test_too_little_text(tmp_path: Path) -> None:
    tokenizer = save_byte_tokenizer(tmp_path)
    path = write(tmp_path, "a.txt", "fifteen letters")
    with pytest.raises(InputError, match="has `16` tokens, which make 1 sequences of `sequence_length: 16`"):
        fit_once(TextDataModule(path, sequence_length=16), tokenizer, tmp_path)
    with pytest.raises(InputError, match="`3` training sequences of 4 tokens, fewer than one step takes"):
        fit_once(TextDataModule(path, sequence_length=4, batch_size=4), tokenizer, tmp_path, max_steps=1)


# Which batch comes when ---------------------------------------------------------------------------------------------


def loader(epoch: int = 0) -> ResumableLoader:
    dataset: Any = TensorDataset(torch.arange(10))
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=True, seed=1)
    sampler.set_epoch(epoch)
    return ResumableLoader(dataset, sampler, batch_size=2)


def test_loader_resumes_within_the_epoch_only() -> None:
    first = loader(epoch=1)
    batches = iter(first)
    seen = [next(batches) for _ in range(2)]
    state = first.state_dict()
    rest = list(batches)
    assert len(seen) == 2
    assert len(rest) == 3

    resumed = loader(epoch=1)
    resumed.load_state_dict(state)
    again = list(resumed)
    torch.testing.assert_close(again, rest, rtol=0, atol=0)
    assert len(list(resumed)) == 5  # the next pass is whole again

    next_epoch = loader(epoch=2)
    next_epoch.load_state_dict(state)
    assert len(list(next_epoch)) == 5


def batches_of_this_rank(tensor_parallel_size: int) -> dict[str, list[list[int]]]:
    data = RandomTokenDataModule(vocab_size=VOCAB_SIZE, sequences=20, sequence_length=4, validation_fraction=0.2)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        max_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        strategy=lightning_bwdopt.FSDPOptimInBwdStrategy(tensor_parallel_size=tensor_parallel_size),
    )
    trainer.fit(CausalLM(architecture=TINY), datamodule=data)
    return {
        "training": [row for batch in data.train_dataloader() for row in batch["input_ids"].tolist()],
        "held out": [row for batch in data.val_dataloader() for row in batch["input_ids"].tolist()],
    }


def test_ranks_share_the_data() -> None:
    first, second = run_distributed(batches_of_this_rank, tensor_parallel_size=1)
    for name, size in (("training", 16), ("held out", 4)):
        both = first[name] + second[name]
        assert len(first[name]) == len(second[name]) == size // 2
        assert len({tuple(row) for row in both}) == size


def test_tensor_parallel_ranks_get_the_same() -> None:
    first, second = run_distributed(batches_of_this_rank, tensor_parallel_size=2)
    assert first == second
    assert len(first["training"]) == 16
