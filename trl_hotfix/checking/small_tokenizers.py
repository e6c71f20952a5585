"""A tokenizer with few of its words, which reads every text that the whole one reads.

A model with 150,000 words costs seconds a run. The words with the first numbers are the shortest pieces of a BPE, so a
cut of its merges is a BPE again. Special tokens stay, and get numbers behind the others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

KEPT = 1000
"""Keep so many words, beside the special tokens."""

_PLAIN = 256


def cut(source: Path, target: Path) -> dict[int, int]:
    """Write a cut tokenizer of a folder into another. Return the new number of each old one that has one.

    Returns nothing, and writes nothing, for one that is small already, or of a kind that cannot be cut.
    """
    file = source / "tokenizer.json"
    if not file.is_file():
        return {}
    whole = json.loads(file.read_text(encoding="utf-8"))
    kind = whole["model"].get("type") or _kind(whole["model"])
    words = _numbered(whole["model"])
    if len(words) <= 2 * KEPT or kind not in _CUTS:
        return {}
    added = {entry["content"] for entry in whole["added_tokens"]}
    model = _CUTS[kind](whole["model"], added)
    old = {**dict(words.items()), **{e["content"]: e["id"] for e in whole["added_tokens"]}}
    new = _numbered(model)
    for entry in sorted(whole["added_tokens"], key=lambda entry: entry["id"]):
        if entry["content"] not in new:
            new[entry["content"]] = len(new)
        entry["id"] = new[entry["content"]]
    whole["model"] = model
    numbers = {old[word]: number for word, number in new.items() if word in old}
    _renumber_ids(whole.get("post_processor"), numbers)
    (target / "tokenizer.json").write_text(json.dumps(whole), encoding="utf-8")
    settings = source / "tokenizer_config.json"
    if settings.is_file():
        found = json.loads(settings.read_text(encoding="utf-8"))
        template = source / "chat_template.jinja"
        if template.is_file():
            # Early releases of transformers read it here alone.
            found.setdefault("chat_template", template.read_text(encoding="utf-8"))
        decoder = found.get("added_tokens_decoder") or {}
        found["added_tokens_decoder"] = {
            str(new[each["content"]]): each for each in decoder.values() if each["content"] in new
        }
        (target / "tokenizer_config.json").write_text(json.dumps(found), encoding="utf-8")
    return numbers


def _kind(model: Mapping[str, Any]) -> str:
    return "BPE" if "merges" in model else "Unigram" if isinstance(model.get("vocab"), list) else "WordLevel"


def _numbered(model: Mapping[str, Any]) -> dict[str, int]:
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        return dict(vocabulary)
    return {word: number for number, (word, _) in enumerate(vocabulary)}


def _of_bpe(model: dict[str, Any], added: set[str]) -> dict[str, Any]:
    """Keep the letters and bytes, and the words that the first merges make of them."""
    made = {"".join(_pair(merge)) for merge in model["merges"]}
    by_number = sorted(model["vocab"], key=model["vocab"].__getitem__)
    kept = [word for word in by_number if word not in made or word in added]
    words, merges = dict.fromkeys(kept), []
    for merge in model["merges"]:
        if len(words) >= max(KEPT, len(kept) + _PLAIN):
            break
        left, right = _pair(merge)
        if left in words and right in words and left + right in model["vocab"]:
            words[left + right] = None
            # Every release of tokenizers reads a merge as one text.
            merges.append(merge if " " in left + right else f"{left} {right}")
    order = sorted(words, key=model["vocab"].__getitem__)
    return {**model, "vocab": {word: number for number, word in enumerate(order)}, "merges": merges}


def _pair(merge: Any) -> tuple[str, str]:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left, right


def _of_unigram(model: dict[str, Any], added: set[str]) -> dict[str, Any]:
    """Keep single letters and bytes, and the words with the best scores."""
    entries = list(enumerate(model["vocab"]))
    plain = {number for number, (word, _) in entries if len(word) == 1 or word in added or _is_byte(word)}
    plain.add(model.get("unk_id") or 0)
    best = sorted(entries, key=lambda entry: -entry[1][1])
    kept = plain | {number for number, _ in best[: max(0, KEPT - len(plain)) + _PLAIN]}
    order = sorted(kept)
    unknown = model.get("unk_id")
    return {
        **model,
        "vocab": [model["vocab"][number] for number in order],
        "unk_id": order.index(unknown) if unknown is not None else None,
    }


def _is_byte(word: str) -> bool:
    return len(word) == 6 and word.startswith("<0x") and word.endswith(">")


def _of_words(model: dict[str, Any], added: set[str]) -> dict[str, Any]:
    """Keep single letters, also those within a word, and the words with the first numbers."""
    prefix = model.get("continuing_subword_prefix") or "##"
    order = sorted(model["vocab"], key=model["vocab"].__getitem__)
    plain = [word for word in order if len(word.removeprefix(prefix)) == 1 or word in added]
    kept = dict.fromkeys([*plain, model.get("unk_token", ""), *order[:KEPT]])
    words = [word for word in order if word in kept]
    return {**model, "vocab": {word: number for number, word in enumerate(words)}}


_CUTS = {"BPE": _of_bpe, "Unigram": _of_unigram, "WordPiece": _of_words}
"""A WordLevel without the word of a text has no way to write it."""


def _renumber_ids(processor: Any, numbers: Mapping[int, int]) -> None:
    """Give the special tokens of a post-processor their new numbers."""
    if isinstance(processor, list):
        for each in processor:
            _renumber_ids(each, numbers)
    if not isinstance(processor, dict):
        return
    if "ids" in processor and isinstance(processor["ids"], list):
        processor["ids"] = [numbers[each] for each in processor["ids"]]
    for name in ("sep", "cls"):
        if isinstance(processor.get(name), list) and len(processor[name]) == 2:
            processor[name][1] = numbers[processor[name][1]]
    for name, each in processor.items():
        if name not in ("sep", "cls"):
            _renumber_ids(each, numbers)
