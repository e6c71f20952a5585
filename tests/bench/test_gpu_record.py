"""The record of a GPU: its form, and what the pages say of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Literal

import pytest

from trl_hotfix.catalogue import condensed, loading

import gpu_record
from gpu_record import GpuRecord, Machine, Run

EVIDENCE = Path(__file__).parents[2] / "evidence"
MACHINE = Machine(device="NVIDIA H100", memory=81559, capability="9.0", driver="550.54", cuda="12.4")


def record(*outcomes: Literal["passed", "failed"]) -> GpuRecord:
    runs = tuple(
        Run(
            test=f"test_{number}",
            patches=("some-id",),
            release="0.22.0",
            stack="tf4.57",
            outcome=outcome,
            versions={"torch": "2.13.0"},
            numbers={"cost, on, 4096: seconds": 0.25, "cost, on, 4096: MiB": None, "kernel": "flash-attn"},
        )
        for number, outcome in enumerate(outcomes)
    )
    return GpuRecord(
        trl_hotfix="0.1.0", machine=MACHINE, runs=runs, skipped={"test_vllm": "vllm does not install here"}
    )


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    gpu_record.save(record("passed"), tmp_path / "gpu.json")
    assert gpu_record.load(tmp_path / "gpu.json") == record("passed")


def test_the_record_in_the_checkout_is_of_this_form_and_of_patches_that_exist() -> None:
    written = gpu_record.load()
    if written is not None:
        known = {patch.id for patch in loading.load()}
        assert {patch for run in written.runs for patch in run.patches} <= known


@pytest.mark.parametrize(
    "change",
    [{"machine": {}}, {"runs": [{"test": "a"}]}, {"skipped": None}, {"more": 1}, {"trl_hotfix": 1}],
    ids=lambda change: next(iter(change)),
)
def test_a_file_of_another_form_is_an_error_that_says_what_to_do(tmp_path: Path, change: dict[str, object]) -> None:
    file = tmp_path / "gpu.json"
    gpu_record.save(record("passed"), file)
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ValueError, match=r"gpu\.json: expected what `make gpu` writes, found: .* Run `make gpu` again"):
        gpu_record.load(file)


def test_without_a_run_nothing_was_seen_on_a_gpu(tmp_path: Path) -> None:
    assert gpu_record.load(tmp_path / "gpu.json") is None
    assert gpu_record.in_words("some-id", None) == "not seen on a GPU"
    assert gpu_record.in_words("another-id", record("passed")) == "not seen on a GPU"


def test_what_failed_is_said_too() -> None:
    words = gpu_record.in_words("some-id", record("passed", "failed", "passed"))
    assert words == "seen on NVIDIA H100 (driver 550.54, CUDA 12.4): 2 of 3 tests passed"


def test_the_record_is_no_evidence_of_a_patch(tmp_path: Path) -> None:
    (name, *_) = sorted(path.name for path in EVIDENCE.glob("*.json") if path.name != "gpu.json")
    shutil.copy(EVIDENCE / name, tmp_path)
    gpu_record.save(record("passed"), tmp_path / "gpu.json")
    assert [found["patch"] for found in condensed.read(tmp_path)] == [name.removesuffix(".json")]
