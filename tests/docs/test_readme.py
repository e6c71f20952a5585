"""The README is short, and its numbers are on record. So are those of the example of TRL's own in docs/scan.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trl_hotfix.catalogue import loading, on_record
from trl_hotfix.matching import gates
from trl_hotfix.matching.fingerprints import bodies
from trl_hotfix.model import Patch, Severity

from bench.releases.layout import main_place
from launched import LAUNCHED

CHECKOUT = Path(__file__).parents[2]
README = (CHECKOUT / "README.md").read_text(encoding="utf-8")
FIRST_SCREEN = README.partition("\n## ")[0]
ONE_BUG = re.search(
    r"^<!-- one bug: (?P<id>[\w-]+), TRL (?P<release>[\w.]+)(?:, fixed in (?P<fixed>[\w.]+))?\..*?-->\n"
    r"(?P<text>.*?)^<!-- end of the bug -->$",
    README,
    re.DOTALL | re.MULTILINE,
)
"""The block with the numbers of one bug. Another bug takes its place with its id, its releases and its rows."""

SCAN = (CHECKOUT / "docs" / "scan.md").read_text(encoding="utf-8")
EXAMPLE_OF_TRL = SCAN.partition("\n## A script of TRL's own\n")[2].partition("\n## ")[0]
MOST_WORDS = 700
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
TRAINING = LAUNCHED / "train_like_carla.py"


def outputs() -> list[str]:
    return re.findall(r"^```text\n(.*?)^```$", EXAMPLE_OF_TRL, re.DOTALL | re.MULTILINE)


def in_one_line(text: str) -> str:
    return " ".join(text.split())


def test_it_has_few_words() -> None:
    assert len(README.split()) <= MOST_WORDS


def test_it_says_how_many_silent_bugs_of_the_newest_release_are_repaired() -> None:
    newest = list(bodies().releases)[-1]
    patches = loading.load()
    silent = [patch for patch in patches if patch.default and patch.severity in SILENT and gates.has_bug(newest, patch)]
    expected = f"TRL {newest}, the newest release we checked, has {len(silent)} silent bugs that trl_hotfix repairs"
    assert expected in in_one_line(FIRST_SCREEN)


def test_the_first_screen_is_one_sentence_two_commands_and_the_picture() -> None:
    shown = [line for line in FIRST_SCREEN.splitlines() if line and not line.startswith(("<!--", "```"))]
    assert len(shown) < 12
    assert "](docs/matrix.svg)" in shown[-1]


def test_code_has_eighty_columns() -> None:
    code = re.findall(r"^```\w+\n(.*?)^```$", README + EXAMPLE_OF_TRL, re.DOTALL | re.MULTILINE)
    assert max(len(line) for block in code for line in block.splitlines()) <= 80


def test_the_numbers_of_the_bug_are_those_of_its_proof() -> None:
    assert ONE_BUG is not None, "the README has no block `<!-- one bug: ID, TRL RELEASE. ... -->`"
    (patch,) = (patch for patch in loading.load() if patch.id == ONE_BUG["id"])
    proof = _proof(patch, ONE_BUG["release"], "proven")
    red, green = proof["red"], proof["green"]
    expected = [red["measured"], green["measured"], red["right"]]
    if ONE_BUG["fixed"]:
        expected.append(_proof(patch, ONE_BUG["fixed"], "absent")["red"]["measured"])
    rows = re.findall(r"^\| .* \| \**(-?\d+(?:\.(\d+))?)[^|]*\|$", ONE_BUG["text"], re.MULTILINE)
    assert [float(shown) for shown, _ in rows] == [
        round(value, len(digits)) for value, (_, digits) in zip(expected, rows, strict=True)
    ]


def _proof(patch: Patch, release: str, verdict: str) -> dict[str, Any]:
    return next(
        dict(proof["runs"])
        for proof in on_record.proofs_of(patch)
        if (proof["release"], proof["verdict"]) == (release, verdict)
    )


def test_the_line_of_the_log_is_that_of_the_example() -> None:
    (line,) = re.findall(r"^```text\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    assert in_one_line(line) in in_one_line(outputs()[1])
    assert all(patch.title in in_one_line(line) for patch in loading.load() if patch.id == "grpo-dapo-normaliser")


@pytest.mark.parametrize("page", ["README.md", "docs/five-questions.md"])
def test_the_five_questions_have_a_short_answer_and_a_long_one(page: str) -> None:
    text = (CHECKOUT / page).read_text(encoding="utf-8")
    found = re.findall(r"^(?:\*\*|## )([A-Z][^*\n]+\?)(?:\*\*|$)", text, re.MULTILINE)
    assert found == [
        "Does this bug hit me?",
        "Is it repaired, here, now, in every rank?",
        "How do I know?",
        "What did it change in my run?",
        "How do I turn it off?",
    ]


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
