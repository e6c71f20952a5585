"""The places in the answer of ``scan``: each value where it stands, once; and the command that would answer more."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from trl_hotfix.commands import scan

DROPPED = "dpo-precomputed-ref-logps-dropped"
SCRIPT = """\
from trl import DPOConfig, DPOTrainer

args = DPOConfig(output_dir="out", precompute_ref_log_probs=True)
trainer = DPOTrainer("gpt2", args=args)
"""
PARSED = """\
from trl import DPOConfig, DPOTrainer, TrlParser

(args,) = TrlParser((DPOConfig,)).parse_args_and_config()
DPOTrainer("gpt2", args=args).train()
"""


def scanned(*arguments: str | Path) -> tuple[str, Any]:
    """Return the text, and the only trainer of the JSON. Words of the script stand last."""
    words = list(map(str, arguments))
    behind = words.index("--") if "--" in words else len(words)
    options, rest = [*words[:behind], "--trl", "0.12.2"], words[behind:]
    text, data = (
        CliRunner().invoke(scan.command, [*options, *more, *rest], standalone_mode=False) for more in ((), ("--json",))
    )
    assert text.exception is None
    ((trainer,),) = (file["trainers"] for file in json.loads(data.stdout)["files"])
    return " ".join(text.stdout.split()), trainer


def hit(trainer: Any) -> Any:
    return next(bug for bug in (*trainer["hits"], *trainer["cannot_tell"]) if bug["id"] == DROPPED)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    return file


def test_each_place_stands_once(script: Path) -> None:
    text, trainer = scanned(script)
    block = text.partition(f"hit {DROPPED}")[2].partition("cannot tell")[0]
    assert block.count("line 3") == 1
    assert block.count("line 4") == 1
    assert hit(trainer)["positions"] == ["line 3", "line 4"]


def test_a_value_of_a_config_stands_in_that_file(tmp_path: Path) -> None:
    file, config = tmp_path / "train.py", tmp_path / "c.yaml"
    file.write_text(PARSED)
    config.write_text("beta: 0.1\nprecompute_ref_log_probs: true\n")
    text, trainer = scanned(file, "--", "--config", config)
    assert f"precompute_ref_log_probs=True ({config}, line 2)" in text
    assert f"{config}, line 2" in hit(trainer)["positions"]
    assert hit(trainer)["lines"] == [4]
    text, trainer = scanned(file, "--", "--precompute_ref_log_probs")
    assert "precompute_ref_log_probs=True (the command line)" in text
    assert "the command line" in hit(trainer)["positions"]


def test_a_value_of_a_script_that_reads_the_command_line_stands_there_too(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(PARSED.replace('DPOTrainer("gpt2", args=args)', "DPOTrainer('x', args=DPOConfig(**vars(args)))"))
    _, trainer = scanned(file, "--", "--precompute_ref_log_probs")
    assert DROPPED in {bug["id"] for bug in (*trainer["hits"], *trainer["cannot_tell"])}


def test_a_notebook_has_cells_and_no_other_lines(tmp_path: Path) -> None:
    first, second = SCRIPT.split("\n\n")
    cells = [{"cell_type": "code", "source": part} for part in (first, second)]
    file = tmp_path / "book.ipynb"
    file.write_text(json.dumps({"cells": cells}))
    text, trainer = scanned(file)
    assert "precompute_ref_log_probs=True (cell 2, line 1)" in text
    assert "(line" not in text
    assert hit(trainer)["positions"] == ["cell 2, line 1", "cell 2, line 2"]
    assert not any("(line" in reason for reason in hit(trainer)["because"])


def test_a_reason_stands_once_for_what_it_leaves_unknown(tmp_path: Path) -> None:
    file = tmp_path / "dpo.yaml"
    file.write_text("precompute_ref_log_probs: true\n")
    text, trainer = scanned(file, "--trainer", "DPO")
    assert text.count("made by trl dpo") == 1
    assert (
        hit(trainer)["unknown"][0]
        == "ref_model and model are unknown: made by trl dpo, whose script is not in this file"
    )
    assert "is not a literal" not in text


def test_a_folded_command_can_be_copied(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    output = CliRunner().invoke(scan.command, [str(script), "--trl", "0.12.2"], standalone_mode=False).stdout
    folded = output.partition("This would answer more:\n")[2].partition("FILE\n")[0]
    assert all(line.endswith(" \\") for line in folded.splitlines()[:-1])
    words = shlex.split(f"{folded}FILE".replace("\\\n", ""))
    assert words == ["trl-hotfix", "scan", str(script), "--trl", "0.12.2", "--dataset", "FILE"]


def test_a_value_that_may_be_one_of_two_is_shown(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT.replace("=True", "=True if x else False"))
    text, _ = scanned(file)
    assert "precompute_ref_log_probs=True (line 3) or precompute_ref_log_probs=False (line 3)" in text


def test_the_command_that_would_answer_is_complete(script: Path, tmp_path: Path) -> None:
    text, trainer = scanned(script)
    command = f"trl-hotfix scan {script} --trl 0.12.2 --dataset FILE"
    assert trainer["ask"] == command
    assert f"This would answer more: {command}" in text
    data = tmp_path / "my data.jsonl"
    data.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    _, trainer = scanned(script, "--dataset", data)
    assert trainer["ask"] is None
    script.write_text(PARSED)
    _, trainer = scanned(script, "--dataset", data, "--with", "deepspeed==0.15.2")
    assert trainer["ask"].startswith(f"trl-hotfix scan {script} --trl 0.12.2 --with deepspeed==0.15.2")
    assert f"--dataset '{data}'" in trainer["ask"]
    assert trainer["ask"].endswith(" --deepspeed FILE -- ARGUMENTS")
    _, trainer = scanned(script, "--", "--gradient_accumulation_steps", "4", "--output_dir", "my run")
    assert trainer["ask"].endswith("-- --gradient_accumulation_steps 4 --output_dir 'my run'")
