"""What was run on a GPU: ``evidence/gpu.json``. Each test adds its result as soon as it ends, from whatever process.

A later result of the same test, release, device and date replaces an earlier one; all others stay.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec
from filelock import FileLock

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

    ``patches`` can be empty: a test of what patches rely on. ``date`` is as in 2026-11-27, ``code`` the commit.
    ``why`` has the last lines of a failure, or why the test was skipped.
    """

    test: str
    patches: tuple[str, ...]
    release: str
    stack: str
    device: str
    date: str
    code: str
    outcome: Literal["passed", "failed", "skipped"]
    seconds: float
    versions: dict[str, str]
    numbers: dict[str, float | int | str | None]
    why: str = ""

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.test, self.release, self.device, self.date


class GpuRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The machines, each device once, and the runs by test, release, device and date."""

    machines: tuple[Machine, ...] = ()
    runs: tuple[Run, ...] = ()

    def newest(self) -> tuple[Run, ...]:
        """Return the newest run of each test in each release on each device."""
        return tuple({run.key[:3]: run for run in sorted(self.runs, key=lambda run: run.date)}.values())


def load(file: Path = FILE) -> GpuRecord | None:
    """Return the record, or None if nothing was run on a GPU yet. Raises ``ValueError`` for a file of another form."""
    if not file.is_file():
        return None
    try:
        return msgspec.json.decode(file.read_bytes(), type=GpuRecord)
    except msgspec.DecodeError as error:
        raise ValueError(f"{file}: expected what `make gpu` writes, found: {error}. Run `make gpu` again") from None


def add(machines: Iterable[Machine], runs: Iterable[Run], file: Path = FILE) -> None:
    """Merge results into the file. It is whole at any moment, and several processes may add at once."""
    with FileLock(file.with_suffix(".lock")):
        record = load(file) or GpuRecord()
        merged = {run.key: run for run in (*record.runs, *runs)}
        devices = {machine.device: machine for machine in (*record.machines, *machines)}
        save(
            GpuRecord(tuple(devices[name] for name in sorted(devices)), tuple(merged[key] for key in sorted(merged))),
            file,
        )


def save(record: GpuRecord, file: Path = FILE) -> None:
    whole = file.with_suffix(f".{os.getpid()}.part")
    whole.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
    whole.replace(file)


def in_words(patch_id: str, record: GpuRecord | None) -> str:
    """Return where a patch was seen to work: ``seen on NVIDIA H100 (driver 550.54, CUDA 12.4) on 2026-11-27: ...``."""
    newest = record.newest() if record is not None else ()
    runs = [run for run in newest if patch_id in run.patches and run.outcome != "skipped"]
    if record is None or not runs:
        return "not seen on a GPU"
    machines = {machine.device: machine for machine in record.machines}
    return "; ".join(
        _of_device(machines[device], [run for run in runs if run.device == device])
        for device in sorted({run.device for run in runs})
    )


def _of_device(machine: Machine, runs: list[Run]) -> str:
    passed = sum(run.outcome == "passed" for run in runs)
    where = f"{machine.device} (driver {machine.driver}, CUDA {machine.cuda})"
    return f"seen on {where} on {max(run.date for run in runs)}: {passed} of {len(runs)} tests passed"
