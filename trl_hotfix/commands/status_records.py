"""Read what a run reported: its record, and those of the ranks on which a patch failed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TypedDict

import click
import msgspec

from ..errors import SettingError, plain, quoted, reason
from ..recording.trackers import FILE
from ..selection.freeze_files import EXPECTED, LONGEST_PATH, Frozen, FrozenPatch, load

_RANK = re.compile(r"trl_hotfix\.rank-(\d{1,9})\.json\Z")
_CHECKPOINT = re.compile(r"checkpoint-(\d{1,18})\Z")
_ON = ("repaired", "on some ranks", "called", "in evaluation only", "not seen", "standing by")


class RecordedSteps(TypedDict):
    """In how many ``of`` the run's steps a patch was called, and acted; ``on`` has the first and last of each span."""

    of: int
    called: int
    acted: int
    on: list[list[int]]


class RecordedEffect(TypedDict):
    """The first step of a run with a repair and without it. ``why`` says why there are no numbers."""

    step: int
    loss: float | None
    loss_without: float | None
    gradient_norm: float | None
    gradient_norm_without: float | None
    cosine: float | None
    why: str | None


class RecordedPatch(TypedDict):
    """A patch. ``word`` and the counts are null in a file of `freeze`, ``reason`` where it is on.

    ``steps``, ``evaluation``, ``process``, ``all_ranks``, ``ranks`` and ``effect`` are null where a run has
    nothing to say of them.
    """

    id: str
    revision: int
    options: dict[str, str]
    word: str | None
    called: int | None
    acted: int | None
    evaluation: dict[str, int] | None
    process: dict[str, int] | None
    steps: RecordedSteps | None
    all_ranks: dict[str, int] | None
    ranks: dict[str, list[int]] | None
    effect: RecordedEffect | None
    reason: str | None


class RecordedHit(TypedDict):
    """A bug that the run hits or may hit (``answer``), with the state of its patch."""

    id: str
    severity: str
    answer: str
    symptom: str
    because: list[str]
    unknown: list[str]
    state: str
    reason: str


class Record(TypedDict):
    """The record of one rank. ``rank`` is null for that of the run, which rank 0 writes."""

    path: str
    rank: int | None
    trl: str | None
    trl_hotfix: str | None
    digest: str | None
    patches: list[RecordedPatch]
    unreached: list[RecordedPatch]
    reverted: list[RecordedPatch]
    hits: list[RecordedHit]
    problems: list[str]


def files(path: Path) -> list[tuple[Path, int | None]]:
    """Return the records at ``path``, each with its rank: that of the run first. Raises ``click.ClickException``."""
    shown = quoted(str(path), LONGEST_PATH)
    try:
        if not path.is_dir():
            if not path.exists():
                raise click.UsageError(f"there is no {shown}: expected the output folder of a run, or its {FILE}")
            return [(path, None)]
        names = {entry.name for entry in path.iterdir()}
    except OSError as error:
        raise click.UsageError(f"{shown} cannot be read: {plain(error.strerror or '')}") from None
    of_ranks = {int(found[1]): path / found[0] for name in names if (found := _RANK.match(name))}
    ranks: list[tuple[Path, int | None]] = [(of_ranks[rank], rank) for rank in sorted(of_ranks)]
    if FILE in names:
        return [(path / FILE, None), *ranks]
    steps = sorted((int(found[1]), found[0]) for name in names if (found := _CHECKPOINT.match(name)))
    checkpoint = next((path / name / FILE for _, name in reversed(steps) if (path / name / FILE).exists()), None)
    if checkpoint is not None:
        return [(checkpoint, None), *ranks]
    if not ranks:
        raise click.UsageError(
            f"{shown} has no {FILE}, and no checkpoint with one: expected the output folder of a run that had "
            "TRL_HOTFIX=1 or a HotfixCallback, and that has saved a checkpoint or ended"
        )
    return ranks


def read(file: Path, rank: int | None) -> Record:
    """Return one record, with every field. Raises ``SettingError`` where it cannot be read."""
    frozen = load(str(file), "record")
    return {
        "path": str(file),
        "rank": rank,
        "trl": frozen.trl,
        "trl_hotfix": frozen.trl_hotfix,
        "digest": frozen.digest,
        "patches": [_patch(entry) for entry in frozen.patches],
        "unreached": [_patch(entry) for entry in frozen.unreached],
        "reverted": [_patch(entry) for entry in frozen.reverted],
        "hits": _hits(frozen, file),
        "problems": frozen.problems,
    }


def _patch(entry: FrozenPatch) -> RecordedPatch:
    patch: RecordedPatch = msgspec.to_builtins(entry)
    return patch


def _hits(frozen: Frozen, file: Path) -> list[RecordedHit]:
    """Return the bugs that the run hits or may hit, also those that were only observed."""
    observed = [
        {
            **{name: value for name, value in entry.items() if name != "called"},
            "state": "observed",
            "reason": "reproduced",
        }
        for entry in frozen.observed
        if entry.get("answer") != "not hit"
    ]
    try:
        return msgspec.convert([*frozen.hits, *observed], list[RecordedHit])
    except msgspec.ValidationError as error:
        shown = quoted(str(file), LONGEST_PATH)
        raise SettingError(
            f"the record {shown} cannot be used: in its hits: {reason(error)}; expected {EXPECTED}"
        ) from None


def not_repaired(record: Record) -> list[RecordedHit]:
    """Return the bugs that the run hits, and whose patch is not on this trainer."""
    on = {patch["id"] for patch in record["patches"] if patch["word"] in _ON}
    on |= {patch["id"] for patch in record["reverted"] if patch["word"] in _ON}
    return [hit for hit in record["hits"] if hit["answer"] == "hit" and hit["id"] not in on]
