"""Reading text files into rows, and rows into token numbers and labels."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetGenerationError
from transformers import PreTrainedTokenizerBase

from examples.errors import InputError

IGNORED = -100  # the label of a token that the loss leaves out: cross_entropy's own default
# What a row may hold, in the order in which it is looked for.
KINDS = (("messages",), ("prompt", "response"), ("text",))


def read_rows(path: str | None) -> Dataset:
    """Reads a file whole.

    Args:
        path: A ``.txt`` (one document), a ``.jsonl`` (one JSON object a line) or a ``.parquet`` file, in UTF-8. Rows
            hold ``text``, or ``prompt`` and ``response``, or chat ``messages`` (a list of ``role`` and ``content``).
            ``None``: the Python language reference, which comes with Python itself.

    Returns:
        Rows with the columns of one of these kinds.

    Raises:
        InputError: There is no such file, or it is of another type, empty or malformed; a malformed line is named by
            its number.
    """
    if path is None:
        from pydoc_data.topics import topics

        return Dataset.from_dict({"text": list(topics.values())})
    file = Path(path).expanduser()
    if not file.is_file():
        raise InputError(
            f"The data file `{path}` does not exist: correct `path`, or leave it out for the built-in text."
        )
    readers = {".txt": _read_txt, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
    if file.suffix not in readers:
        raise InputError(
            f"The data file `{path}` is of the type `{file.suffix}`, which cannot be read: convert it to `.txt`,"
            " `.jsonl` or `.parquet`."
        )
    rows = readers[file.suffix](file)
    if len(rows) == 0:
        raise InputError(f"The data file `{path}` is empty: there is nothing to train on. Give a file with text in it.")
    return rows


def encode(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, list[int]]:
    """Turns one row into token numbers, with an end token after each document, and labels.

    Args:
        row: Of one of the kinds that ``read_rows`` gives.
        tokenizer: For ``messages`` it must have a chat template.

    Returns:
        ``input_ids`` and ``labels`` of equal length. Labels equal the tokens where the loss counts them (all of a
        ``text``, the ``response``, the assistant's messages) and are -100 elsewhere.

    Raises:
        InputError: ``messages`` and a tokenizer without chat template, or with one that rewrites earlier messages.
    """
    if "text" in row:
        pieces = [(row["text"], True)]
    elif "prompt" in row:
        pieces = [(row["prompt"], False), (row["response"], True)]
    else:
        pieces = list(_chat_pieces(row["messages"], tokenizer))
    input_ids: list[int] = []
    labels: list[int] = []
    for index, (text, learned) in enumerate(pieces):
        # Piece by piece: at generation time, too, the tokenizer sees the prompt without the answer. A chat template
        # writes its special tokens itself.
        token_ids = tokenizer(text, add_special_tokens=index == 0 and "messages" not in row)["input_ids"]
        input_ids += token_ids
        labels += token_ids if learned else [IGNORED] * len(token_ids)
    if "messages" not in row and tokenizer.eos_token_id is not None:
        input_ids.append(tokenizer.eos_token_id)
        labels.append(tokenizer.eos_token_id)
    return {"input_ids": input_ids, "labels": labels}


def _chat_pieces(messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, bool]]:
    """Cuts the rendered chat where an answer begins and ends; the flag says whether the piece is an answer."""
    if tokenizer.chat_template is None:
        raise InputError(
            "The data holds chat `messages`, but the model's tokenizer has no chat template to write them with: use the"
            " tokenizer of an instruction-tuned model, or `prompt` and `response` in place of `messages`."
        )
    done = ""
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        question = str(tokenizer.apply_chat_template(messages[:index], tokenize=False, add_generation_prompt=True))
        answer = str(tokenizer.apply_chat_template(messages[: index + 1], tokenize=False))
        if not (question.startswith(done) and answer.startswith(question)):
            raise InputError(
                f"The tokenizer's chat template writes message `{index + 1}` in another way once later ones follow, so"
                " the answers cannot be told from the rest: split such chats into one answer each, or use `prompt` and"
                " `response`."
            )
        yield question[len(done) :], False
        yield answer[len(question) :], True
        done = answer


def _read_txt(file: Path) -> Dataset:
    content = file.read_bytes()
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"The data file `{file}` is not UTF-8 text: line {line} holds the byte `{content[error.start]:#04x}`."
            " Convert it to UTF-8."
        ) from error
    return Dataset.from_dict({"text": [text] if text.strip() else []})


def _read_jsonl(file: Path) -> Dataset:
    rows: list[dict[str, Any]] = []
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                rows.append(_parse_line(f"The data file `{file}`, line {number}:", line, rows))
    return Dataset.from_list(rows)


def _parse_line(where: str, line: bytes, earlier: list[dict[str, Any]]) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:  # also a wrong encoding: UnicodeDecodeError is one
        raise InputError(
            f"{where} `{_shorten(line)}` is not JSON ({error}). Each line must be one whole JSON object."
        ) from error
    kind = _kind(row) if isinstance(row, dict) else None
    if kind is None:
        raise InputError(
            f"{where} `{_shorten(line)}` is no JSON object with `text`, with `prompt` and `response`, or with"
            " `messages`: name the fields so."
        )
    if earlier and kind != tuple(earlier[0]):
        raise InputError(
            f"{where} it holds `{', '.join(kind)}`, the lines before it `{', '.join(earlier[0])}`: one file must hold"
            " one kind. Split it."
        )
    if kind != ("messages",):
        for name in kind:
            if not isinstance(row[name], str):
                raise InputError(f"{where} `{name}` is `{_shorten(row[name])}`, which is no text: make it a string.")
        return {name: row[name] for name in kind}
    messages = row["messages"]
    if not (isinstance(messages, list) and all(_is_message(message) for message in messages)):
        raise InputError(
            f"{where} `messages` is `{_shorten(messages)}`: it must be a list of objects that each have the strings"
            " `role` and `content`."
        )
    if not any(message["role"] == "assistant" for message in messages):
        raise InputError(f"{where} no message has the role `assistant`, so there is no answer to learn: add one.")
    return {"messages": [{"role": message["role"], "content": message["content"]} for message in messages]}


def _read_parquet(file: Path) -> Dataset:
    try:
        rows = load_dataset("parquet", data_files=str(file), split="train")
    except (DatasetGenerationError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        raise InputError(
            f"The data file `{file}` cannot be read as parquet ({error.__cause__ or error}): write it again, or use"
            " `.jsonl`."
        ) from error
    assert isinstance(rows, Dataset)
    kind = _kind(dict.fromkeys(rows.column_names))
    if kind is None:
        raise InputError(
            f"The data file `{file}` has the columns `{', '.join(rows.column_names)}`: it needs `text`, or `prompt` and"
            " `response`, or `messages`. Rename them."
        )
    return rows.select_columns(list(kind))


def _kind(row: Mapping[str, Any]) -> tuple[str, ...] | None:
    return next((kind for kind in KINDS if all(name in row for name in kind)), None)


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(name), str) for name in ("role", "content"))


def _shorten(value: object) -> str:
    text = value.decode(errors="replace").strip() if isinstance(value, bytes) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
