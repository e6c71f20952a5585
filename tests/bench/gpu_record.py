"""What was run on a GPU: ``evidence/gpu.json``, which ``make gpu`` writes where there is one, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

FILE = Path(__file__).parents[2] / "evidence" / "gpu.json"


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The GPU and what drives it. ``memory`` is in MiB."""

    device: str
    memory: int
    capability: str
    driver: str
    cuda: str


class Run(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A test that ran: of which patches, in which release and with which versions, and what it measured.

    ``patches`` can be empty: a test of what patches rely on.
    """

    test: str
    patches: tuple[str, ...]
    release: str
    stack: str
    outcome: Literal["passed", "failed"]
    versions: dict[str, str]
    numbers: dict[str, float | int | str | None]


class GpuRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All runs of one ``make gpu``. ``skipped`` has the reason of each test that could not run there."""

    trl_hotfix: str
    machine: Machine
    runs: tuple[Run, ...]
    skipped: dict[str, str]


def load(file: Path = FILE) -> GpuRecord | None:
    """Return the record, or None if nothing was run on a GPU yet. Raises ``ValueError`` for a file of another form."""
    if not file.is_file():
        return None
    try:
        return msgspec.json.decode(file.read_bytes(), type=GpuRecord)
    except msgspec.DecodeError as error:
        raise ValueError(f"{file}: expected what `make gpu` writes, found: {error}. Run `make gpu` again") from None


def save(record: GpuRecord, file: Path = FILE) -> None:
    file.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")


def in_words(patch_id: str, record: GpuRecord | None) -> str:
    """Return where a patch was seen to work, such as ``seen on NVIDIA H100 (driver 550.54, CUDA 12.4): ...``."""
    runs = [] if record is None else [run for run in record.runs if patch_id in run.patches]
    if record is None or not runs:
        return "not seen on a GPU"
    machine = record.machine
    passed = sum(run.outcome == "passed" for run in runs)
    where = f"{machine.device} (driver {machine.driver}, CUDA {machine.cuda})"
    return f"seen on {where}: {passed} of {len(runs)} tests passed"
