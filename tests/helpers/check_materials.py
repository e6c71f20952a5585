"""A folder as the scripts of tests/checked expect it: a large model without weights, its tokenizer, and rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

SPECIAL = ("<|pad|>", "<|start|>", "<|end|>")
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
WORDS = (
    *("a", "bird", "can", "dream", "every", "fish", "gives", "half", "in", "just", "keen", "light", "men", "never"),
    *("own", "proud", "queens", "rest", "so", "the", "under", "very"),
)

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
}


def write(folder: Path) -> None:
    """Write the models and the rows."""
    model(folder / "model", {})
    model(folder / "odd-model", {"model_type": "mamba", "state_size": 16})
    for name, row in ROWS.items():
        lines = [json.dumps(row(number)) for number in range(60)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")


def model(folder: Path, other: Mapping[str, Any]) -> None:
    """Write a config and a tokenizer of bytes."""
    folder.mkdir()
    words = byte_words()
    numbers = {word: number for number, word in enumerate([*words, *SPECIAL])}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": numbers[word], "content": word, **FLAGS, "special": True} for word in SPECIAL],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {word: numbers[word] for word in words},
            "merges": [],
        },
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": TEMPLATE,
        "eos_token": SPECIAL[2],
        "pad_token": SPECIAL[0],
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {str(numbers[word]): {"content": word, **FLAGS, "special": True} for word in SPECIAL},
    }
    ends = {"eos_token_id": numbers[SPECIAL[2]], "pad_token_id": numbers[SPECIAL[0]]}
    config = {**CONFIG, "vocab_size": len(numbers), "bos_token_id": None, **ends, **other}
    for name, values in (
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", settings),
        ("config.json", config),
        ("generation_config.json", {**ends, "do_sample": True, "temperature": 0.7}),
    ):
        (folder / name).write_text(json.dumps(values), encoding="utf-8")


FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


def byte_words() -> list[str]:
    """Return the letters by which a byte-level tokenizer writes each byte."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [chr(256 + place) for place in range(256 - len(plain))]
    return [*map(chr, plain), *others]


def text(number: int, count: int) -> str:
    return " ".join(WORDS[(7 * number + 3 * place) % len(WORDS)] for place in range(count))


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _pair(number: int) -> dict[str, Any]:
    return {
        "prompt": [_message("user", text(number, 2 + number % 3))],
        "chosen": [_message("assistant", text(number + 1, 1 + number % 5))],
        "rejected": [_message("assistant", text(number + 2, 2 + number % 4))],
    }


ROWS: dict[str, Callable[[int], dict[str, Any]]] = {
    "text": lambda number: {"text": text(number, 2 + number % 7)},
    "completions": lambda number: {"prompt": text(number, 2), "completion": " " + text(number + 1, 1 + number % 6)},
    "chat": lambda number: {"messages": [*_pair(number)["prompt"], *_pair(number)["chosen"]]},
    "pairs": _pair,
    "labelled": lambda number: {
        "prompt": _pair(number)["prompt"],
        "completion": _pair(number)["chosen" if number % 2 else "rejected"],
        "label": bool(number % 2),
    },
    "prompts": lambda number: {"prompt": _pair(number)["prompt"], "answer": text(number, 1)},
}
