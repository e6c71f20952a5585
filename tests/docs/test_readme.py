"""The first screen of the README: it fits, and its numbers and outputs are real."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trl_hotfix.catalogue import loading
from trl_hotfix.matching import gates
from trl_hotfix.matching.fingerprints import bodies
from trl_hotfix.model import Severity

CHECKOUT = Path(__file__).parents[2]
README = (CHECKOUT / "README.md").read_text(encoding="utf-8")
FIRST_SCREEN = README.partition("\n## ")[0]
SILENT = {Severity.WRONG_GRADIENT, Severity.WRONG_LOSS, Severity.DATA_LOSS, Severity.WRONG_METRIC}
EXAMPLE = """from trl import GRPOConfig, GRPOTrainer
{blank}
trainer = GRPOTrainer(
    model="Qwen/Qwen3-0.6B",
    train_dataset=data,
    reward_funcs=reward,
    args=GRPOConfig(
        max_steps=50,
        logging_steps=2,
        log_completions=True,
        max_completion_length=1024,
        num_generations=4,
        per_device_train_batch_size=4,
        steps_per_generation=1,
        gradient_accumulation_steps=16,
    ),
)
trainer.train()
""".format(blank="\n" * 189)
"""Arguments of TRL's example on which the bug depends. The trainer and the number are in the same lines as there."""
TRAINING = Path(__file__).with_name("train_like_carla.py")


def outputs() -> list[str]:
    return re.findall(r"^```text\n(.*?)^```$", FIRST_SCREEN, re.DOTALL | re.MULTILINE)


def in_one_line(text: str) -> str:
    return " ".join(text.split())


def test_it_says_how_many_silent_bugs_of_the_newest_release_are_repaired() -> None:
    newest = list(bodies().releases)[-1]
    patches = loading.load()
    silent = [patch for patch in patches if patch.default and patch.severity in SILENT and gates.has_bug(newest, patch)]
    expected = (
        f"TRL {newest}, the newest that was looked at, has {len(silent)} silent bugs that are open and repaired here"
    )
    assert expected in in_one_line(FIRST_SCREEN)


def test_the_first_screen_has_eighty_columns_and_few_lines() -> None:
    shown = [line for line in FIRST_SCREEN.splitlines() if not line.startswith(("<!--", "```"))]
    assert len(shown) < 60
    code = re.findall(r"^```\w+\n(.*?)^```$", FIRST_SCREEN, re.DOTALL | re.MULTILINE)
    assert max(len(line) for block in code for line in block.splitlines()) <= 80


def test_the_scan_prints_what_is_shown(tmp_path: Path) -> None:
    (tmp_path / "carla.py").write_text(EXAMPLE, encoding="utf-8")
    command = [sys.executable, "-m", "trl_hotfix", "scan", "carla.py", "--trl", "1.9.0"]
    variables = {**os.environ, "PYTHONPATH": str(CHECKOUT), "COLUMNS": "80"}
    process = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    prompt, *lines = outputs()[0].splitlines()
    assert prompt == f"$ trl-hotfix {' '.join(command[3:])}"
    left_out = lines.pop()
    printed = in_one_line(process.stdout)
    assert printed.startswith(in_one_line("\n".join(lines))), process.stdout
    assert f"and {printed.count('cannot tell ')} bugs that no script tells" in left_out


@pytest.mark.matrix
@pytest.mark.parametrize("repaired", ["0", "1"])
def test_the_training_prints_what_is_shown(repaired: str) -> None:
    sys.path.insert(0, str(CHECKOUT / "tests" / "bench"))
    from layout import main_place

    place = main_place("1.9.0")
    # As the `.pth` of an installed package does at the start of Python.
    start = "import sys, runpy, trl_hotfix.autostart as hook; hook.start(); "
    start += "runpy.run_path(sys.argv[1], run_name='__main__')"
    variables = {**place.environment(), "TRL_HOTFIX": repaired}
    process = subprocess.run(
        [place.python, "-c", start, TRAINING], env=variables, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    shown = outputs()[1]
    assert f"TRL_HOTFIX={repaired}    {process.stdout.splitlines()[-1]}\n" in shown
    repair = in_one_line(shown[shown.index("trl_hotfix: ") :])
    assert (repair in in_one_line(process.stderr)) == (repaired == "1")
