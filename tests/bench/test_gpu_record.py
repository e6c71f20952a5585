"""The record of a GPU: its form, how results merge, and what the pages say of it."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from trl_hotfix.catalogue import data_files, evidence_file, loading

from bench.results import gpu_record
from bench.results.gpu_record import GpuRecord, Machine, Run

EVIDENCE = Path(__file__).parents[2] / "evidence"
MACHINE = Machine(device="NVIDIA H100", memory=81559, capability="9.0", driver="550.54", cuda="12.4")


def run(test: str = "test_0", outcome: Any = "passed", **given: Any) -> Run:
    usual: dict[str, Any] = {
        "patches": ("some-id",),
        "release": "0.22.0",
        "stack": "tf4.57",
        "device": "NVIDIA H100",
        "date": "2026-11-27",
        "code": "0123abc",
        "seconds": 2.5,
        "versions": {"torch": "2.13.0"},
        "numbers": {"turns, off: ratio": 1.25, "turns, off: MiB": None, "kernel": "flash-attn"},
    }
    return Run(test=test, outcome=outcome, **{**usual, **given})


def record(*outcomes: str) -> GpuRecord:
    return GpuRecord((MACHINE,), tuple(run(f"test_{number}", outcome) for number, outcome in enumerate(outcomes)))


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    gpu_record.save(record("passed"), tmp_path / "gpu.json")
    assert gpu_record.load(tmp_path / "gpu.json") == record("passed")


def test_the_record_in_the_checkout_is_of_patches_that_exist() -> None:
    written = gpu_record.load()
    assert written is not None
    assert {patch for it in written.runs for patch in it.patches} <= {patch.id for patch in loading.load()}


@pytest.mark.parametrize(
    "change",
    [{"machines": {}}, {"runs": [{"test": "a"}]}, {"runs": None}, {"more": 1}],
    ids=["machines", "a run", "runs", "more"],
)
def test_a_file_of_another_form_is_an_error_that_says_what_to_do(tmp_path: Path, change: dict[str, object]) -> None:
    file = tmp_path / "gpu.json"
    gpu_record.save(record("passed"), file)
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ValueError, match=r"gpu\.json: expected what `make gpu` writes, found: .* Run `make gpu` again"):
        gpu_record.load(file)


@pytest.mark.parametrize(
    ("change", "stays"),
    [
        ({"test": "test_1"}, True),
        ({"release": "0.23.0"}, True),
        ({"device": "NVIDIA H200"}, True),
        ({"date": "2026-11-28"}, True),
        ({"code": "4567def"}, False),
        ({"seconds": 3.0}, False),
    ],
    ids=lambda value: str(value),
)
def test_a_result_replaces_that_of_the_same_test_release_device_and_date(
    tmp_path: Path, change: dict[str, Any], stays: bool
) -> None:
    file, first = tmp_path / "gpu.json", run()
    other = msgspec.structs.replace(run(outcome="failed", why="E  assert 1 == 2"), **change)
    gpu_record.add([MACHINE], [first], file)
    gpu_record.add([MACHINE], [other], file)
    written = gpu_record.load(file)
    assert written is not None
    assert sorted(it.outcome for it in written.runs) == (["failed", "passed"] if stays else ["failed"])
    assert other in written.runs
    assert written.machines == (MACHINE,)


def test_processes_that_end_at_once_lose_nothing(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: gpu_record.add([MACHINE], [run(f"test_{number:02}")], file), range(40)))
    written = gpu_record.load(file)
    assert written is not None
    assert [it.test for it in written.runs] == [f"test_{number:02}" for number in range(40)]
    assert [path.name for path in tmp_path.glob("*.part")] == []


def test_without_a_run_nothing_was_seen_on_a_gpu(tmp_path: Path) -> None:
    assert gpu_record.load(tmp_path / "gpu.json") is None
    assert gpu_record.in_words("some-id", None) == "not seen on a GPU"
    assert gpu_record.in_words("another-id", record("passed")) == "not seen on a GPU"
    assert gpu_record.in_words("some-id", record("skipped")) == "not seen on a GPU"


def test_what_failed_is_said_too_and_what_was_skipped_is_not_counted() -> None:
    words = gpu_record.in_words("some-id", record("passed", "failed", "passed", "skipped"))
    assert words == "seen on NVIDIA H100 (driver 550.54, CUDA 12.4) on 2026-11-27: 2 of 3 tests passed"


def test_of_one_test_the_newest_run_counts() -> None:
    runs = run(outcome="passed", date="2026-11-28"), run(outcome="failed")
    words = gpu_record.in_words("some-id", GpuRecord((MACHINE,), runs))
    assert words == "seen on NVIDIA H100 (driver 550.54, CUDA 12.4) on 2026-11-28: 1 of 1 tests passed"


def test_the_record_is_no_evidence_of_a_patch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the record beside them ``apply()`` and ``doctor`` read the files of the patches, and nothing else."""
    (name, *_) = sorted(path.name for path in EVIDENCE.glob("*.json") if path.name != "gpu.json")
    shutil.copy(EVIDENCE / name, tmp_path)
    gpu_record.save(record("passed"), tmp_path / "gpu.json")
    assert [found["patch"] for found in evidence_file.read_all(tmp_path)] == [name.removesuffix(".json")]
    monkeypatch.setattr(data_files, "evidence_folder", lambda: tmp_path)
    # Past its cache, which is that of this process.
    assert set(data_files._condensed.__wrapped__()["proven.json"]) == {name.removesuffix(".json")}
