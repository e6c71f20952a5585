"""What a run has left behind: its versions, its trainer and its arguments, from its output folder.

Nothing is run or imported: ``training_args.bin`` is a pickle, and is read without looking up what it names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..catalogue.conditions import UNSET, Argument, Kind
from ..errors import ScriptError, plain, reason
from ..matching.versions import is_version
from . import json_files, told_files
from .inert_pickles import Inert, read_arguments
from .recorded_hits import RecordedHit, recorded_hits

_VERSION = re.compile(
    r"^[-*][ \t]*(TRL|Transformers|Pytorch|Datasets|Tokenizers|PEFT)(?:[ \t]*:)?[ \t]+`?v?([\w.+!]+)`?\s*$",
    re.MULTILINE,
)
_DISTRIBUTIONS = {"pytorch": "torch"}
_CONFIG = re.compile(r"(\w+?)Config$")
_CHECKPOINT = re.compile(r"checkpoint-(\d+)$")
_LARGEST = 1 << 21
_CARD = "the model card that transformers has written"
_RECORD = "the trl_hotfix.json of a run"
_LONGEST = 10_000


@dataclass(frozen=True, slots=True)
class OldRun:
    """What is known of a run. ``repaired`` has the patches in its record, by their words; None if it has no record.

    ``hits`` has what the run itself found out about bugs when training began, by their ids, if its record tells.
    """

    folder: Path
    versions: Mapping[str, str]
    trainer: str | None
    arguments: Inert | None
    has_adapter: bool
    repaired: Mapping[str, str] | None
    hits: Mapping[str, RecordedHit]

    def argument(self, dotted: str) -> Argument:
        """Return an argument of its trainer, by the names that ``hits`` in ``patches.yaml`` use."""
        name, _, part = dotted.partition(".")
        if name == "peft_config" and not part:
            made_by = ("peft.PeftConfig",)
            return Argument(Kind.OBJECT, made_by=made_by, complete=False) if self.has_adapter else UNSET
        if self.arguments is None:
            return Argument(Kind.UNKNOWN, reason="there is no training_args.bin")
        if name not in self.arguments.state:
            return Argument(Kind.UNKNOWN, reason="it is no part of training_args.bin")
        argument = _argument(self.arguments.state[name])
        if not part or argument.kind is not Kind.OBJECT:
            return argument if not part else UNSET
        value = self.arguments.state[name].get(part)
        return _argument(value) if value is not None else UNSET


def _argument(value: Any) -> Argument:
    """Return a value of the config. It may be the default, and the text of the run does not tell."""
    if value is None:
        return UNSET
    if isinstance(value, Inert):
        # An enum is made by a call with its value.
        if len(value.given) == 1 and isinstance(value.given[0], str):
            return Argument(Kind.LITERAL, value.given[0], may_be_default=True)
        return Argument(Kind.OBJECT, made_by=(value.made_by,), may_be_default=True)
    if isinstance(value, dict):
        return Argument(Kind.OBJECT, made_by=("dict",), may_be_default=not value)
    if isinstance(value, (list, tuple)) and len(value) <= _LONGEST and all(map(_is_plain, value)):
        return Argument(Kind.LITERAL, list(value), may_be_default=True)
    if _is_plain(value):
        return Argument(Kind.LITERAL, value, may_be_default=True)
    return Argument(Kind.UNKNOWN, reason="its value in training_args.bin is of an unusual kind")


def _is_plain(value: Any) -> bool:
    """Return whether a value can be compared and shown. One in a pickle may be within itself a thousand times."""
    if isinstance(value, str):
        return len(value) <= _LONGEST
    if isinstance(value, int):
        return value.bit_length() <= 64
    return value is None or isinstance(value, float)


def read_run(folder: Path) -> OldRun:
    """Read the output folder of a run, or one of its checkpoints. Raises ``ScriptError`` if it has left nothing."""
    folders = [folder, *_checkpoints(folder), *([folder.parent] if _CHECKPOINT.search(folder.name) else [])]
    arguments_file = _first(folders, "training_args.bin")
    card, record = _first(folders, "README.md"), _first(folders, "trl_hotfix.json")
    if arguments_file is None and card is None and record is None:
        raise ScriptError(
            f"{plain(str(folder))} has no training_args.bin, no README.md and no trl_hotfix.json: expected the output "
            "folder of a run, or a checkpoint"
        )
    arguments = read_arguments(arguments_file) if arguments_file is not None else None
    recorded = _read_record(record) if record is not None else {}
    versions = _versions_of_card(card) if card is not None else {}
    trl = recorded.get("trl")
    if isinstance(trl, str) and is_version(trl):
        versions["trl"] = trl
    return OldRun(
        folder=folder,
        versions=versions,
        trainer=_trainer(arguments),
        arguments=arguments,
        has_adapter=_first(folders, "adapter_config.json") is not None,
        repaired=_words(recorded) if record is not None else None,
        hits=recorded_hits(recorded, plain(str(record))),
    )


def _checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the newest first."""
    try:
        paths = list(folder.iterdir())
    except OSError as error:
        raise ScriptError(f"{plain(str(folder))} cannot be read: {error.strerror or error}") from None
    found = [(int(matched[1]), path) for path in paths if (matched := _CHECKPOINT.search(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def _first(folders: list[Path], name: str) -> Path | None:
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def _versions_of_card(card: Path) -> dict[str, str]:
    """Read "- TRL: 0.16.1" and the like of a model card."""
    text = told_files.read(card, _LARGEST, _CARD).decode("utf-8", errors="replace")
    found = _VERSION.findall(text)
    return {_DISTRIBUTIONS.get(name.lower(), name.lower()): version for name, version in found if is_version(version)}


def _read_record(path: Path) -> dict[str, Any]:
    content = told_files.read(path, _LARGEST, _RECORD)
    try:
        record = json_files.parse(content)
    except (ValueError, RecursionError) as error:
        raise ScriptError(f"{plain(str(path))} is no record of a run: {reason(error)}; expected {_RECORD}") from None
    if not isinstance(record, dict):
        found = f"it has no object, but {told_files.kind_of(record)}"
        raise ScriptError(f"{plain(str(path))} is no record of a run: {found}; expected {_RECORD}")
    return record


def _words(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the patches of a record by their words. A file of `freeze` has no words, and lists what was on."""
    patches = record.get("patches")
    entries = [entry for entry in patches if isinstance(entry, dict)] if isinstance(patches, list) else []
    return {str(entry.get("id")): str(entry.get("word") or "selected") for entry in entries}


def _trainer(arguments: Inert | None) -> str | None:
    """Return ``DPO`` for the arguments of class ``DPOConfig``."""
    name = arguments.made_by.rpartition(".")[2] if arguments is not None else ""
    matched = _CONFIG.match(name)
    return matched[1] if matched is not None else None
