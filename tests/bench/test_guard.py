"""A patch that is broken on purpose must fail on the bench."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from trl_hotfix.catalogue import modules

from bench.releases import layout

CHECKOUT = Path(__file__).parents[2]
ID = "moe-aux-loss-lost-under-deepspeed"
RANGE = ">=0.9.6,<0.12.0"
CALL = "return call.with_(model=with_config(model, plain.config))()"


def change(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1, old
    file.write_text(text.replace(old, new))


def declare(package: Path, old: str, new: str) -> None:
    """Replace a text in the entry of the patch."""
    file = package / "data" / "patches.json"
    entries = json.loads(file.read_text())
    (index,) = (index for index, entry in enumerate(entries) if entry["id"] == ID)
    entry = json.dumps(entries[index])
    assert entry.count(old) == 1, old
    entries[index] = json.loads(entry.replace(old, new))
    file.write_text(json.dumps(entries))


def cell(package: Path, release: str, overlay: Path | None = None) -> dict[str, Any]:
    """Return the cell of the broken package on a release."""
    place = layout.main_place(release)
    layout.build([place])
    environment = place.environment()
    folders = [str(package.parent), *([str(overlay)] if overlay else []), environment["PYTHONPATH"]]
    out = package.parent / "out.json"
    subprocess.run(
        [str(place.python), "-m", "bench.proving.release", str(out), "60", ID],
        env={**environment, "PYTHONPATH": os.pathsep.join(folders)},
        cwd=package.parent,
        capture_output=True,
        check=True,
    )
    (answer,) = json.loads(out.read_text())["cells"]
    result: dict[str, Any] = answer
    return result


@pytest.fixture
def patch(package: Path) -> Path:
    return package / "patches" / modules.family_of(ID) / f"{ID.replace('-', '_')}.py"


def test_unbroken_it_is_proven(package: Path) -> None:
    assert cell(package, "0.11.4")["verdict"] == "proven"


def test_a_wrapper_without_effect_is_unrepaired(package: Path, patch: Path) -> None:
    change(patch, CALL, "return call()")
    assert cell(package, "0.11.4")["verdict"] == "unrepaired"


@pytest.mark.matrix
def test_a_wrapper_that_raises_is_unrepaired(package: Path, patch: Path) -> None:
    change(patch, CALL, "raise RuntimeError('broken')")
    answer = cell(package, "0.11.4")
    assert answer["verdict"] == "unrepaired"
    assert "broken" in answer["why"]


@pytest.mark.matrix
def test_a_wrapper_on_the_wrong_method_is_unrepaired(package: Path) -> None:
    declare(package, "DPOTrainer.get_batch_loss_metrics", "DPOTrainer.dpo_loss")
    assert cell(package, "0.11.4")["verdict"] in ("unrepaired", "error")


@pytest.mark.matrix
def test_a_range_one_release_too_wide_is_not_reproduced(package: Path) -> None:
    declare(package, RANGE, RANGE.replace("<0.12.0", "<0.12.1"))
    assert cell(package, "0.12.0")["verdict"] == "not-reproduced"


@pytest.mark.matrix
def test_a_range_one_release_too_narrow_is_uncovered(package: Path) -> None:
    declare(package, RANGE, RANGE.replace(">=0.9.6", ">=0.10.1"))
    assert cell(package, "0.9.6")["verdict"] == "uncovered"


@pytest.mark.matrix
def test_an_altered_body_is_an_error_that_names_both(package: Path, tmp_path: Path) -> None:
    overlay = tmp_path / "overlay"
    shutil.copytree(layout.BENCH / "overlay" / "0.11.4", overlay)
    change(
        overlay / "trl" / "trainer" / "dpo_trainer.py",
        "        metrics = {}\n\n        forward_output",
        "        metrics = dict()\n\n        forward_output",
    )
    answer = cell(package, "0.11.4", overlay)
    assert answer["verdict"] == "error"
    assert "on record for TRL 0.11.4 is c1:" in answer["why"]


def test_a_self_test_that_cannot_fail_is_not_reproduced(package: Path, patch: Path) -> None:
    change(
        patch, "get_batch_loss_metrics(wrapped_like_deepspeed(model), batch)", "get_batch_loss_metrics(model, batch)"
    )
    assert cell(package, "0.11.4")["verdict"] == "not-reproduced"


@pytest.mark.matrix
def test_a_self_test_that_hangs_is_an_error(package: Path, patch: Path) -> None:
    change(patch, "    method = module", "    import threading\n\n    threading.Event().wait()\n    method = module")
    place = layout.main_place("0.11.4")
    layout.build([place])
    out = package.parent / "out.json"
    environment = place.environment()
    subprocess.run(
        [str(place.python), "-m", "bench.proving.release", str(out), "1", ID],
        env={**environment, "PYTHONPATH": f"{package.parent}{os.pathsep}{environment['PYTHONPATH']}"},
        cwd=package.parent,
        capture_output=True,
        check=True,
    )
    (answer,) = json.loads(out.read_text())["cells"]
    assert (answer["verdict"], answer["why"]) == ("error", "no answer within 1 s")


@pytest.mark.matrix
def test_a_process_that_dies_is_an_error(package: Path, patch: Path) -> None:
    change(patch, "    method = module", "    import os\n\n    os._exit(3)\n    method = module")
    answer = cell(package, "0.11.4")
    assert (answer["verdict"], answer["why"]) == ("error", "the process ended with exit code 3")
