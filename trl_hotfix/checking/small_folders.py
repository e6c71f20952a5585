"""Small folders of models: a config of two layers, a cut tokenizer, and no weights."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from . import families, small_tokenizers

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".msgpack", ".h5", ".gguf", ".onnx")
LIGHT = 40_000_000
"""Load weights of fewer bytes as they are."""

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "added_tokens.json",
    "special_tokens_map.json",
)


class NotHereError(Exception):
    """A model, a tokenizer or rows are not on this machine. ``args`` says which option gives them."""


class CannotBeSmallError(Exception):
    """We cannot make a model small. ``args`` has the reason."""


class SmallFolders:
    """The small folder of each model that a script names."""

    def __init__(self, folder: Path, configs: dict[str, str], *, online: bool) -> None:
        self._folder, self._configs, self._online = folder, configs, online
        self._known: dict[str, Path | None] = {}
        self.names: dict[str, str] = {}
        self.taken: list[str] = []

    def of(self, name: str) -> Path | None:
        """Return the small folder of a model, or None for a folder that is small already.

        Raises ``NotHereError`` and ``CannotBeSmallError``.
        """
        if name not in self._known:
            self._known[name] = self._made(name)
        return self._known[name]

    def _made(self, name: str) -> Path | None:
        if name in self.names or not name:
            return None
        source = self._source(name)
        file = source / "config.json"
        if not file.is_file():
            return None if not (source / "tokenizer.json").is_file() else self._of_tokenizer(name, source)
        config = json.loads(file.read_text(encoding="utf-8"))
        has_weights = any(path.suffix in WEIGHTS for path in source.iterdir())
        if has_weights and sum(path.stat().st_size for path in source.iterdir() if path.suffix in WEIGHTS) < LIGHT:
            return None if Path(name).is_dir() else source
        target = self._new(name)
        numbers = small_tokenizers.cut(source, target)
        size = _size(target) if numbers else None
        try:
            small = families.small(config, size)
        except ValueError as error:
            raise CannotBeSmallError(f"the model {name} cannot be made small: {error}") from error
        if config.get("auto_map"):
            raise CannotBeSmallError(f"the model {name} cannot be made small: its code is its own (auto_map)")
        _write(target / "config.json", _renumbered(small, numbers))
        generation = source / "generation_config.json"
        if generation.is_file():
            found = json.loads(generation.read_text(encoding="utf-8"))
            _write(target / generation.name, _renumbered(found, numbers))
        self._link(source, target, cut=bool(numbers))
        words = f", {size:,} of {config.get('vocab_size', 0):,} words" if size else ""
        self.taken.append(f"{name}: two layers with random weights{words}")
        return target

    def _of_tokenizer(self, name: str, source: Path) -> Path | None:
        target = self._new(name)
        if not small_tokenizers.cut(source, target):
            return None
        self._link(source, target, cut=True)
        return target

    def _new(self, name: str) -> Path:
        self._folder.mkdir(exist_ok=True)
        # Forks of one process make one each.
        target = Path(tempfile.mkdtemp(prefix=f"{Path(name).name}-", dir=self._folder))
        self.names[str(target)] = name
        return target

    def _link(self, source: Path, target: Path, *, cut: bool) -> None:
        """Link the other files, without weights, and without what a cut tokenizer replaces."""
        for path in source.iterdir():
            is_of_tokenizer = cut and path.name in _TOKENIZER_FILES and path.name != "special_tokens_map.json"
            if path.suffix in WEIGHTS or path.name.endswith(".index.json") or is_of_tokenizer or path.is_dir():
                continue
            if not (target / path.name).exists():
                (target / path.name).symlink_to(path.resolve())

    def _source(self, name: str) -> Path:
        if name in self._configs:
            return Path(self._configs[name])
        if Path(name).is_dir():
            return Path(name)
        from huggingface_hub import try_to_load_from_cache

        for file in ("config.json", "tokenizer_config.json"):
            found = try_to_load_from_cache(name, file) if name.count("/") <= 1 else None
            if isinstance(found, str):
                return Path(found).parent
        if self._online:
            from huggingface_hub import snapshot_download

            kinds = ["*.json", "*.txt", "*.jinja", "tokenizer.model"]
            return Path(snapshot_download(name, allow_patterns=kinds, cache_dir=str(self._folder / "hub")))
        raise NotHereError(
            f"the model {name!r} is not on this machine; expected a folder or a model in the hub's cache. "
            f"--config {name}=DIR gives a folder with its config and tokenizer, and --online reads them from the hub"
        )


def _size(target: Path) -> int:
    whole = json.loads((target / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = whole["model"]["vocab"]
    return max(len(vocabulary), 1 + max((each["id"] for each in whole["added_tokens"]), default=0))


def _renumbered(config: dict[str, Any], numbers: dict[int, int]) -> dict[str, Any]:
    """Return a config with the new numbers of the tokens that it names."""
    if not numbers:
        return config
    made = dict(config)
    for name, value in config.items():
        if not name.endswith("token_id"):
            continue
        if isinstance(value, int):
            made[name] = numbers.get(value)
        elif isinstance(value, list):
            made[name] = [numbers[each] for each in value if each in numbers] or None
    # Lists of tokens that must not or must come.
    for name in ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "forced_decoder_ids"):
        made.pop(name, None)
    return made


def _write(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values), encoding="utf-8")
