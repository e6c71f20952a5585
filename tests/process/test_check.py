"""``check`` from the command line, with the TRL that is installed here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers import check_materials

pytestmark = pytest.mark.needs_trl

HEAD = """
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

model, tokenizer = AutoModelForCausalLM.from_pretrained("model"), AutoTokenizer.from_pretrained("model")
"""

WRONG = """
class Louder(DPOTrainer):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs) * self.args.gradient_accumulation_steps

rows = load_dataset("json", data_files="pairs.jsonl", split="train")
rows = rows.map(lambda row: {name: row[name][0]["content"] for name in ("prompt", "chosen", "rejected")})
sizes = {"per_device_train_batch_size": 2, "max_length": 64, "max_prompt_length": 32}
args = DPOConfig("out", gradient_accumulation_steps=4, **sizes)
Louder(model, args=args, train_dataset=rows, tokenizer=tokenizer).train()
open("after", "w").write("the script went on")
"""

CLEAN = """
def make(say):
    class Says(SFTTrainer):
        def log(self, logs, *args, **kwargs):
            say(logs)
            return super().log(logs, *args, **kwargs)
    return Says

rows = load_dataset("json", data_files="text.jsonl", split="train")
args = SFTConfig("out", dataset_text_field="text", max_seq_length=64)
make(lambda logs: None)(model, args=args, train_dataset=rows, tokenizer=tokenizer).train()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    check_materials.write(tmp_path)
    return tmp_path


def checked(folder: Path, text: str, *options: str, **variables: str) -> tuple[int, Any]:
    (folder / "train.py").write_text(HEAD + text)
    return said(folder, "train.py", *options, **variables)


def said(folder: Path, *options: str, **variables: str) -> tuple[int, Any]:
    command = [sys.executable, "-m", "trl_hotfix", "check", *options]
    paths = os.pathsep.join([str(Path.cwd()), *filter(None, sys.path)])
    variables = {**os.environ, "PYTHONPATH": paths, **variables}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, json.loads(done.stdout) if "--json" in options else done.stdout + done.stderr


def test_the_users_method_is_named(folder: Path) -> None:
    code, answer = checked(folder, WRONG, "--json")
    assert code == 1
    wrong = [each for each in answer["relations"] if each["whose"] == "yours"]
    assert {each["relation"] for each in wrong} == {"accumulation"}
    assert all(each["place"].startswith("compute_loss (train.py:") for each in wrong)
    assert not (folder / "after").exists()
    assert not (folder / "out").exists()


def test_dry_run_asks_nothing(folder: Path) -> None:
    code, text = checked(folder, CLEAN, "--dry-run")
    assert code == 0
    assert "accumulation  the run = 2x4" in text
    assert "evaluation    cannot be asked: the run has no rows to evaluate" in text


def test_rows_that_are_not_here(folder: Path) -> None:
    code, text = checked(folder, 'load_dataset("an-org/some-rows")')
    assert code == 2
    assert "--rows an-org/some-rows=FILE" in " ".join(text.split())


def test_a_repaired_run_is_checked_as_it_is_without(folder: Path) -> None:
    applies = "import trl_hotfix\ntrl_hotfix.apply(strict=True)\n"
    code, answer = checked(folder, applies + WRONG, "--json", TRL_HOTFIX="1", TRL_HOTFIX_SKIP="no-such-patch")
    assert (code, answer["error"]) == (1, None)
    assert {each["relation"] for each in answer["relations"] if each["whose"] == "yours"} == {"accumulation"}


def test_a_model_of_the_hub_is_taken_from_the_cache(folder: Path) -> None:
    cached = folder / "hf" / "hub" / "models--acme--small"
    shutil.copytree(folder / "model", cached / "snapshots" / ("0" * 40))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0" * 40)
    clean = CLEAN.replace("make(lambda logs: None)(model,", 'make(lambda logs: None)("acme/small",')
    code, answer = checked(folder, clean, "--dry-run", "--json", HF_HOME=str(folder / "hf"))
    assert (code, answer["error"]) == (0, None)
    assert any(line.startswith("acme/small: two layers with random weights") for line in answer["taken"])


def test_a_script_that_needs_all_rows_gets_them(folder: Path) -> None:
    (folder / "text.jsonl").write_text("".join(f'{{"text": "w1 w2 w{number % 7}"}}\n' for number in range(100)))
    held_out = CLEAN.replace('split="train")', 'split="train").select(range(50, 100))')
    code, answer = checked(folder, held_out, "--dry-run", "--json")
    assert (code, answer["error"]) == (0, None)


def test_a_recipe_is_asked_where_there_is_no_script(folder: Path) -> None:
    (folder / "mine.py").write_text("def make(setting, folder):\n    raise NotImplementedError('a recipe of tests')\n")
    code, text = said(folder, "--recipe", "mine:make")
    assert code == 2
    assert "mine:make: the process ended with code 1: NotImplementedError: a recipe of tests" in text


@pytest.mark.parametrize("arguments", [(), ("train.py", "--recipe", "mine:make")])
def test_a_script_or_a_recipe(folder: Path, arguments: tuple[str, ...]) -> None:
    code, text = said(folder, *arguments)
    assert code == 2
    assert "expected a training script, or --recipe MODULE:FUNCTION, and not both" in text
