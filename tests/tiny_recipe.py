"""A model, a tokenizer (one token a byte, with a chat template) and a text for the recipe, without any download."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
VOCAB_SIZE = 257
TINY = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "vocab_size": VOCAB_SIZE,
    "attention_dropout": 0.1,
    "tie_word_embeddings": True,
    "eos_token_id": VOCAB_SIZE - 1,
}


def tiny_arguments(folder: Path) -> list[str]:
    """Arguments that put a tiny random model and a short text in place of the YAML's."""
    text = folder / "text.txt"
    text.write_text("The optimizer steps while backward still runs. " * 60)
    return [
        f"--model.init_args.architecture={json.dumps(TINY)}",
        f"--model.init_args.tokenizer={save_byte_tokenizer(folder)}",
        "--model.init_args.learning_rate=0.01",
        "--model.init_args.prompt=The optimizer",
        f"--data.init_args.path={text}",
        "--data.init_args.sequence_length=32",
    ]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=CHAT_TEMPLATE)


def save_byte_tokenizer(folder: Path) -> str:
    byte_tokenizer().save_pretrained(folder)
    # A local source is a model folder, told by its configuration.
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return str(folder)
