"""``trl-hotfix scan``: its screen, its JSON, its errors and its exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from trl_hotfix.catalogue import loading
from trl_hotfix.commands import scan
from trl_hotfix.commands.common import Exit
from trl_hotfix.matching import versions

PATCHES = loading.load()
DROPPED = "dpo-precomputed-ref-logps-dropped"
DPO = """\
import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2-0.5B")
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2-0.5B")
dataset = load_dataset("trl-lib/ultrafeedback_binarized")
training_args = DPOConfig(output_dir="out", precompute_ref_log_probs=True)
trainer = DPOTrainer(
    model=model, args=training_args, train_dataset=dataset["train"], processing_class=tokenizer
)
trainer.train()
"""


def run(*arguments: str) -> Any:
    return CliRunner().invoke(scan.command, list(arguments), standalone_mode=False)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "train.py"
    file.write_text(DPO)
    return file


def test_each_trainer_has_a_section_with_hits_first(script: Path) -> None:
    result = run(str(script), "--trl", "0.12.2")
    assert result.exception is None
    assert result.return_value is Exit.DEGRADED
    lines = result.output.splitlines()
    assert lines[0] == f"{script}, line 10: DPOTrainer on TRL 0.12.2"
    order = [line.split()[0] for line in lines if DROPPED in line or "dpo-extra-eos-conversational" in line]
    assert order == ["hit", "cannot"]
    assert "on by default" in result.output
    assert lines[-2].startswith("1 hit, 1 cannot be told; 42 of the 44 known bugs") or len(PATCHES) != 44


def test_the_json_has_the_declared_shape(script: Path) -> None:
    answer = json.loads(run(str(script), "--trl", "0.12.2", "--json").output)
    assert list(answer) == list(scan.Answer.__annotations__)
    (trainer,) = answer["trainers"]
    assert list(trainer) == list(scan.Trainer.__annotations__)
    (hit,) = trainer["hits"]
    assert list(hit) == list(scan.Bug.__annotations__)
    assert (hit["id"], hit["lines"], hit["on_by_default"]) == (DROPPED, [6, 9], True)
    assert trainer["rest"] + len(trainer["hits"]) + len(trainer["cannot_tell"]) == len(PATCHES)


def test_nothing_hit_and_nothing_untold_is_exit_0(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text("from trl import RewardTrainer\nRewardTrainer('gpt2')\n")
    result = run(str(file), "--trl", "1.16.0")
    assert result.return_value is Exit.FINE
    assert "0 hit, 0 cannot be told" in result.output


def test_a_file_without_a_trainer_is_exit_1(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text("print('nothing')\nraise SystemExit(7)\n")
    result = run(str(file), "--trl", "0.12.2")
    assert result.return_value is Exit.DEGRADED
    assert result.output == f"{file}: no trainer of TRL is made in it\n"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("gone.py", None, "cannot be read: No such file or directory"),
        ("bad.py", b"def f(:\n", "line 1 is not Python"),
        ("bad.py", b"x = 'a\n", "line 1 is not Python"),
        ("null.py", b"a\0b", "is not Python"),
        ("latin.py", b"x = '\xff'\n", "is not Python"),
        ("book.ipynb", b"{}", "a notebook can be saved as a script (.py)"),
        ("x.yaml", b"output_dir: x\n", "name it, as in --trainer DPO"),
    ],
)
def test_a_file_that_cannot_be_scanned_is_one_clear_line(
    tmp_path: Path, name: str, content: bytes | None, expected: str
) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    result = run(str(file), "--trl", "0.12.2")
    assert result.exception is not None
    message = result.exception.format_message()
    assert expected in message
    assert "\n" not in message
    assert result.exception.exit_code in (1, 2)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--trl", "newest"), "'newest' is not a version such as 0.12.2"),
        (("--trl", "0.12.7"), "there is no TRL 0.12.7; did you mean '0.12."),
        (("--trainer", "DPO"), "--trainer is for a YAML config"),
    ],
)
def test_wrong_usage_is_an_error_with_its_reason(script: Path, arguments: tuple[str, ...], expected: str) -> None:
    result = run(str(script), *arguments)
    assert expected in result.exception.format_message()


def test_an_unknown_trainer_has_a_suggestion(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("output_dir: x\n")
    assert "no trainer 'DPOO' is known; did you mean 'DPO'?" in run(str(file), "--trainer", "DPOO").exception.message
    assert run(str(file), "--trainer", "dpotrainer", "--trl", "0.12.2").return_value is Exit.DEGRADED


@pytest.mark.parametrize(("installed", "trl"), [(None, None), ("0.9.4", None), ("1.0.0", "0.8.0")])
def test_no_trl_is_exit_4(
    script: Path, monkeypatch: pytest.MonkeyPatch, installed: str | None, trl: str | None
) -> None:
    monkeypatch.setattr(versions, "installed", lambda distribution: installed)
    result = run(str(script), *(("--trl", trl) if trl else ()))
    assert result.return_value is Exit.NO_TRL
    assert "as in --trl 0.12.2" in result.output


def test_without_trl_option_it_is_the_installed_release(script: Path) -> None:
    answer = json.loads(run(str(script), "--json").output)
    assert answer["trl"] == versions.installed("trl")


def test_nothing_of_the_script_is_run(tmp_path: Path) -> None:
    output = tmp_path / "output"
    file = tmp_path / "x.py"
    file.write_text(f"import no_such_module\nopen({str(output)!r}, 'w')\nfrom trl import DPOTrainer\nDPOTrainer('x')\n")
    before = set(sys.modules)
    run(str(file), "--trl", "0.12.2")
    assert not output.exists()
    assert not {"trl", "torch", "transformers"} & (set(sys.modules) - before)
