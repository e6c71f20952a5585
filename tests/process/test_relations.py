"""The relations of a trainer of one's own: from the command line, by a recipe, and in the tests of a project."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.needs_trl

TRAINER = """
import trl
from trl_hotfix.relations import materials
from trl_hotfix.relations.recipes import config

class DividesByWidth(trl.DPOTrainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)

    def compute_loss(self, model, inputs, *args, **kwargs):
        width = max(value.shape[1] for name, value in inputs.items() if name.endswith("input_ids"))
        return super().compute_loss(model, inputs, *args, **kwargs) / width

def make(setting, folder):
    sizes = {"output_dir": str(folder), "max_steps": 2, "use_cpu": True, "report_to": "none", "logging_steps": 1}
    sizes |= {"per_device_train_batch_size": setting.batch_size, "optim": "sgd", "save_strategy": "no"}
    sizes |= {"gradient_accumulation_steps": setting.accumulation, "max_length": 64, "max_prompt_length": 32}
    return DividesByWidth(
        model=materials.model(folder.parent, setting),
        ref_model=materials.model(folder.parent, setting, seed=1),
        args=config(trl.DPOConfig, sizes, setting.arguments),
        train_dataset=materials.rows("pairs", setting.order),
        tokenizer=materials.tokenizer(setting, "left"),
    )
"""

TESTS = """
from my_trainer import DividesByWidth, make
from trl_hotfix.relations import parametrize

KNOWN = {"accumulation: plain = batch_size=4 accumulation=2": "it divides by the width of a batch"}

@parametrize(DividesByWidth, relations=["accumulation"], expected_failures=KNOWN)
def test_accumulation(check):
    check()

@parametrize(recipe=make, relations=["effects"])
def test_effects(check):
    check()
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "my_trainer.py").write_text(TRAINER)
    (tmp_path / "test_my_trainer.py").write_text(TESTS)
    return tmp_path


def python(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=project, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("options", [["--trainer", "my_trainer:DividesByWidth"], ["--recipe", "my_trainer:make"]])
def test_a_wrong_trainer_is_found_from_the_command_line(project: Path, options: list[str]) -> None:
    line = ["-m", "trl_hotfix", "relations", "--json", "--relation", "accumulation", *options]
    result = python(project, *line)
    assert result.returncode == 1, result.stderr
    cells = [cell for cell in json.loads(result.stdout)["cells"] if cell["setting"].startswith("plain")]
    assert {cell["state"] for cell in cells} == {"violated"}
    assert all(any(each["what"].startswith("gradient") for each in cell["differences"]) for cell in cells)


def test_a_project_tests_its_trainer(project: Path) -> None:
    result = python(project, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rA", "test_my_trainer.py")
    told = [line for line in result.stdout.splitlines() if line.startswith(("PASSED", "FAILED", "XFAIL"))]
    outcomes = [line for line in told if "plain" in line or "effects: batch_size=4" in line]
    assert sorted(line.partition(" - ")[0] for line in outcomes) == [
        "FAILED test_my_trainer.py::test_accumulation[accumulation: plain = batch_size=1 accumulation=8]",
        "FAILED test_my_trainer.py::test_accumulation[accumulation: plain = batch_size=2 accumulation=4]",
        "PASSED test_my_trainer.py::test_effects[effects: batch_size=4 = batch_size=4]",
        "PASSED test_my_trainer.py::test_effects[effects: batch_size=4 drawn=1 = batch_size=4 drawn=2]",
        "XFAIL test_my_trainer.py::test_accumulation[accumulation: plain = batch_size=4 accumulation=2]",
    ], result.stdout
    assert "A step is over the same rows, however many are computed at a time." in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trainer", "STF"], "'STF' is not known; did you mean 'SFT'?"),
        (["--relation", "padding", "--relation", "accumulates"], "'accumulates' is not known"),
        (["--trainer", "SFT", "--recipe", "a:b"], "--recipe makes the trainer: leave --trainer out"),
    ],
)
def test_a_wrong_option_is_one_clear_error(project: Path, arguments: list[str], message: str) -> None:
    result = python(project, "-m", "trl_hotfix", "relations", *arguments)
    assert result.returncode == 2
    assert message in result.stderr


def test_a_trainer_that_cannot_be_imported_is_one_clear_error(project: Path) -> None:
    result = python(project, "-m", "trl_hotfix", "relations", "--trainer", "no_such_module:Trainer")
    assert result.returncode == 2
    assert "no_such_module" in result.stderr
    assert "Traceback" not in result.stderr
