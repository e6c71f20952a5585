"""The facts that a model's folder tells: its config, its generation config, its tokenizer and its adapter.

The files are read as JSON: neither torch nor transformers is imported, and nothing is downloaded. What a file does not
say may have a default in a class of transformers, and is unknown. ``catalogue`` names the facts.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..catalogue.conditions import Argument
from ..errors import ScriptError, plain, reason
from ..matching.model_configs import experts, known, quantized, router_loss, sampling_settings, scales_logits, unknown
from . import told_files
from .told_files import kind_of

_CONFIG, _GENERATION, _TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"
_ADAPTER = "adapter_config.json"
_LARGEST = {"tokenizer.json": 1 << 26}
_LARGEST_OTHER = 1 << 23

_EXPECTED = "a file of a model's folder, an object in JSON"

_NOT_LORA = frozenset({"IA3", "VERA", "LOHA", "LOKR", "BOFT", "HRA", "MISS"})
_WITHOUT_BOS_BY_DEFAULT = frozenset(["PreTrainedTokenizer", "Qwen2Tokenizer", "GPT2Tokenizer"])
_WITH_BOS = _WITHOUT_BOS_BY_DEFAULT | {"LlamaTokenizer", "GemmaTokenizer"}
"""Classes of tokenizers that keep a post-processor without a beginning, and one with it, if no setting says otherwise.

Tried with transformers 4.40 to 5.23. GPTNeoXTokenizer replaces it.
"""

_EMBEDDINGS = re.compile(r"embed|wte|wpe|shared")


def model_facts(folder: Path) -> dict[str, Argument]:
    """Return the facts of a local folder with a model or an adapter. Raises ``ScriptError`` if it cannot be read.

    The config of an adapter's base is not in the folder, and what it says is unknown.
    """
    # `pathlib` raises for a name that is too long to be one of a folder.
    if not os.path.isdir(folder):  # noqa: PTH112
        raise ScriptError(
            f"--model: {plain(str(folder))} is no folder: expected a local one with {_CONFIG}; nothing is downloaded"
        )
    config, adapter = _read(folder, _CONFIG), _read(folder, _ADAPTER)
    if config is None and adapter is None:
        raise ScriptError(
            f"--model: {plain(str(folder))} has no {_CONFIG} and no {_ADAPTER}; expected the folder of a model"
        )
    tokenizer = _read(folder, _TOKENIZER)
    facts = {
        "pad_is_eos": _pad_is_eos(folder, tokenizer),
        "adds_bos": _adds_bos(folder, tokenizer),
        "plain_lora": _plain_lora(adapter),
    }
    if config is None:
        return facts
    generation = _read(folder, _GENERATION)
    return facts | {
        "experts": experts(config, _CONFIG),
        "output_router_logits": _of_config(config, "output_router_logits", bool),
        "router_aux_loss_coef": _of_config(config, "router_aux_loss_coef", float),
        "model_type": _of_config(config, "model_type", str),
        "router_loss": router_loss(config, _CONFIG),
        "scales_logits": scales_logits(config, _CONFIG),
        "quantized": quantized(config, _CONFIG),
        "labels": _labels(config),
        "other_ends": _other_ends(folder, config, generation, tokenizer),
        "sampling_settings": sampling_settings(*_said_of_generation(config, generation)),
    }


def _said_of_generation(
    config: Mapping[str, Any], generation: Mapping[str, Any] | None
) -> tuple[Mapping[str, Any], str]:
    """Return the settings of generation, and their file. Old models have them in the config."""
    return (generation, _GENERATION) if generation is not None else (config, _CONFIG)


def _read(folder: Path, name: str) -> dict[str, Any] | None:
    """Return the object in a JSON file of the folder, or None if there is no such file."""
    path = folder / name
    if not path.is_symlink() and not path.exists():
        return None
    shown = f"--model: {plain(str(path))}"
    try:
        text = told_files.read(path, _LARGEST.get(name, _LARGEST_OTHER), _EXPECTED)
    except ScriptError as error:
        raise ScriptError(f"--model: {error}") from None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ScriptError(f"{shown} is not JSON: {reason(error)}; expected {_EXPECTED}") from None
    if not isinstance(content, dict):
        raise ScriptError(f"{shown} has no object, but {kind_of(content)}; expected {_EXPECTED}")
    return content


def _of_config(config: Mapping[str, Any], name: str, kind: type) -> Argument:
    """Return a value at the top of the config. If only a part, such as ``text_config``, has it, it is unknown."""
    value = config.get(name)
    if isinstance(value, kind) or (kind is float and isinstance(value, int) and not isinstance(value, bool)):
        return known(value, _CONFIG)
    return unknown(f"{_CONFIG} does not say {name}")


def _labels(config: Mapping[str, Any]) -> Argument:
    by_id = config.get("id2label")
    if isinstance(by_id, dict):
        return known(len(by_id), _CONFIG)
    count = config.get("num_labels", 2)
    # transformers has two labels where the file says nothing.
    return known(count, _CONFIG) if type(count) is int else unknown(f"{_CONFIG} does not say num_labels")


def _pad_is_eos(folder: Path, tokenizer: Mapping[str, Any] | None) -> Argument:
    if tokenizer is None:
        return unknown(f"there is no {_TOKENIZER}")
    special = _read(folder, "special_tokens_map.json") or {}
    pad, eos = (_token(tokenizer.get(name) or special.get(name)) for name in ("pad_token", "eos_token"))
    if eos is None:
        return unknown(f"{_TOKENIZER} does not say eos_token")
    return known(pad is None or pad == eos, _TOKENIZER)


def _adds_bos(folder: Path, tokenizer: Mapping[str, Any] | None) -> Argument:
    """Return whether a text gets a beginning, by the post-processor of ``tokenizer.json``.

    The classes of some tokenizers replace the post-processor by ``add_bos_token`` or its default, and a release of
    transformers does it otherwise than another. What differs is unknown.
    """
    special = _read(folder, "special_tokens_map.json") or {}
    settings = tokenizer or {}
    if "bos_token" in settings and not (settings["bos_token"] or special.get("bos_token")):
        return known(False, _TOKENIZER)
    bos = _token(settings.get("bos_token") or special.get("bos_token"))
    content = _read(folder, "tokenizer.json")
    if bos is None or content is None:
        return unknown(f"{_TOKENIZER} does not say that there is no bos_token")
    begins, told = _begins_with(content.get("post_processor"), bos), settings.get("add_bos_token")
    name = str(settings.get("tokenizer_class")).removesuffix("Fast")
    if begins and told is not False and name in _WITH_BOS:
        return known(True, "tokenizer.json")
    if begins is False and not told and name in _WITHOUT_BOS_BY_DEFAULT:
        return known(False, "tokenizer.json")
    return unknown(f"tokenizer.json and {_TOKENIZER} do not agree on whether a bos_token is added")


def _begins_with(processor: Any, bos: str) -> bool | None:
    """Return whether a post-processor puts this token first, or None if it is of another kind."""
    if processor is None:
        return False
    kind = processor.get("type") if isinstance(processor, dict) else None
    if kind == "Sequence" and isinstance(processor.get("processors"), list):
        answers = {_begins_with(one, bos) for one in processor["processors"]}
        return True if True in answers else None if None in answers else False
    if kind == "TemplateProcessing" and isinstance(processor.get("single"), list):
        first = (processor["single"] or [None])[0]
        token = first.get("SpecialToken") if isinstance(first, dict) else None
        return isinstance(token, dict) and token.get("id") == bos
    return False if kind == "ByteLevel" else None


def _token(value: Any) -> str | None:
    """Return the text of a token, which may be an object with its ``content``."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _other_ends(
    folder: Path, config: Mapping[str, Any], generation: Mapping[str, Any] | None, tokenizer: Mapping[str, Any] | None
) -> Argument:
    said, file = _said_of_generation(config, generation)
    ends = said.get("eos_token_id")
    listed = ends if isinstance(ends, list) else [ends]
    if not listed or not all(type(token_id) is int for token_id in listed):
        return unknown(f"{file} does not say eos_token_id")
    text = _token((tokenizer or {}).get("eos_token"))
    own = _id_of(folder, tokenizer or {}, text) if text is not None else None
    if own is None:
        # Of several, at most one is the tokenizer's.
        several = len(set(listed)) > 1
        return known(True, file) if several else unknown("the id of the tokenizer's eos_token is not known")
    return known(set(listed) != {own}, file)


def _id_of(folder: Path, tokenizer: Mapping[str, Any], text: str) -> int | None:
    """Return the id of a token by ``tokenizer_config.json``, or else by ``tokenizer.json``."""
    by_id = tokenizer.get("added_tokens_decoder")
    for token_id, token in by_id.items() if isinstance(by_id, dict) else ():
        if _token(token) == text and token_id.isdecimal():
            return int(token_id)
    content = _read(folder, "tokenizer.json") or {}
    added = content.get("added_tokens")
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict) and token.get("content") == text and type(token.get("id")) is int:
            return int(token["id"])
    model = content.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    token_id = vocabulary.get(text) if isinstance(vocabulary, dict) else None
    return token_id if type(token_id) is int else None


def _plain_lora(adapter: Mapping[str, Any] | None) -> Argument:
    """Return whether an adapter is of matrices alone: PEFT keeps what is not beside the matrices of linear layers."""
    if adapter is None:
        return unknown(f"there is no {_ADAPTER}")
    kind, modules = adapter.get("peft_type"), adapter.get("target_modules")
    names = modules if isinstance(modules, list) and all(isinstance(name, str) for name in modules) else None
    if kind in _NOT_LORA or (kind == "LORA" and adapter.get("trainable_token_indices")):
        return known(False, _ADAPTER)
    # A pattern, or parameters that are no modules, may be anything.
    if kind != "LORA" or names is None or adapter.get("target_parameters"):
        return unknown(f"{_ADAPTER} does not say which modules are adapted")
    return known(not any(map(_EMBEDDINGS.search, names)), _ADAPTER)
