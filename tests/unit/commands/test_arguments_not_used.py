"""Arguments behind ``--`` that a script does not use are named and fail the gate. What it refuses is an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from trl_hotfix.commands import scan
from trl_hotfix.commands.common import Exit

PLAIN = "from trl import DPOConfig, DPOTrainer\nDPOTrainer('gpt2', args=DPOConfig(output_dir='o')).train()\n"
ARGPARSE = """\
import argparse
from trl import DPOConfig, DPOTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--precompute", action="store_true")
parser.add_argument("--loss", choices=["sigmoid", "ipo"], default="sigmoid")
args = parser.parse_args()
DPOTrainer("gpt2", args=DPOConfig(precompute_ref_log_probs=args.precompute, loss_type=args.loss)).train()
"""
DROPPED = "dpo-precomputed-ref-logps-dropped"


def run(file: Path, *words: str, options: tuple[str, ...] = ()) -> Any:
    arguments = [str(file), "--trl", "0.12.2", *options, "--", *words]
    return CliRunner().invoke(scan.command, arguments, standalone_mode=False)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    file = tmp_path / "train.py"
    file.write_text(PLAIN)
    return file


@pytest.fixture
def parsing(tmp_path: Path) -> Path:
    file = tmp_path / "parsing.py"
    file.write_text(ARGPARSE)
    return file


def test_a_script_that_reads_no_command_line_names_each_argument(plain: Path) -> None:
    result = run(plain, "--foo", "3", "-4", "--bar")
    assert f"not used: --foo 3 -4: nothing in {plain} reads it\n" in result.stdout
    assert f"not used: --bar: nothing in {plain} reads it\n" in result.stdout
    assert result.return_value is Exit.DEGRADED


@pytest.mark.parametrize(
    ("gate", "code"),
    [("hit", Exit.DEGRADED), ("unknown", Exit.DEGRADED), ("unrepaired", Exit.DEGRADED), ("never", Exit.FINE)],
)
def test_each_gate_but_never_fails(plain: Path, gate: str, code: Exit) -> None:
    assert run(plain, "--foo", options=("--fail-on", gate)).return_value is code


def test_each_format_has_a_place_for_it(plain: Path) -> None:
    data = json.loads(run(plain, "--foo", "3", options=("--json",)).stdout)
    not_used = [{"words": "--foo 3", "reason": f"nothing in {plain} reads it"}]
    assert data["files"][0]["not_used"] == not_used
    (run_of_sarif,) = json.loads(run(plain, "--foo", "3", options=("--format", "sarif")).stdout)["runs"]
    (note,) = run_of_sarif["invocations"][0]["toolExecutionNotifications"]
    assert note["message"]["text"] == f"not used: --foo 3: nothing in {plain} reads it"
    annotations = run(plain, "--foo", "3", options=("--format", "github")).stdout.splitlines()
    error = next(line for line in annotations if "not used" in line)
    assert error.startswith(f"::error file={plain.as_posix()},line=1")


def test_what_the_script_reads_decides_and_is_used(parsing: Path) -> None:
    for words, hit in ((("--precompute",), True), ((), False), (("--loss", "ipo"), False)):
        data = json.loads(run(parsing, *words, options=("--json",)).stdout)
        (file,) = data["files"]
        assert file["not_used"] == []
        assert (DROPPED in {bug["id"] for bug in file["trainers"][0]["hits"]}) is hit
        assert DROPPED not in {bug["id"] for bug in file["trainers"][0]["cannot_tell"]}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--loss", "kto"), "invalid choice: 'kto'"),
        (("--nothing", "3"), "unrecognized arguments: --nothing 3"),
        (("--help",), "the script ends after its help or its version"),
    ],
)
def test_what_the_parser_of_the_script_refuses_is_an_error(
    parsing: Path, words: tuple[str, ...], expected: str
) -> None:
    message = run(parsing, *words).exception.format_message()
    assert message.startswith(f"{parsing}, line 7: the script refuses the arguments behind --: ")
    assert expected in message


def test_a_parser_that_cannot_be_followed_uses_nothing(parsing: Path) -> None:
    parsing.write_text(ARGPARSE.replace("args = parser", "change(parser)\nargs = parser"))
    result = run(parsing, "--precompute")
    assert "not used: --precompute: line 8 of" in result.stdout
    assert "change() may change the parser (line 7)" in result.stdout
    assert f"cannot tell  {DROPPED}" in result.stdout
    assert result.return_value is Exit.DEGRADED


def test_words_that_parse_known_args_leaves_are_named(parsing: Path) -> None:
    parsing.write_text(ARGPARSE.replace("args = parser.parse_args()", "args, _ = parser.parse_known_args()"))
    result = run(parsing, "--precompute", "--other", "x")
    assert f"not used: --other x: nothing in {parsing} reads it" in result.stdout
    assert f"hit  {DROPPED}" in result.stdout


def test_a_command_line_that_was_not_told_is_asked_for(parsing: Path) -> None:
    result = CliRunner().invoke(scan.command, [str(parsing), "--trl", "0.12.2"], standalone_mode=False)
    output = " ".join(result.stdout.split())
    assert f"cannot tell {DROPPED}" in output
    assert "args.precompute is of the command line, with the default False" in output
    assert "-- ARGUMENTS" in output


def test_a_config_reads_no_arguments(tmp_path: Path) -> None:
    file = tmp_path / "dpo.yaml"
    file.write_text("precompute_ref_log_probs: true\n")
    result = run(file, "--beta", "3", options=("--trainer", "DPO"))
    assert "not used: --beta 3: a config takes no arguments, as" in result.stdout


@pytest.mark.parametrize("package", ["click", "typer", "hydra", "fire", "sys"])
def test_a_parser_that_the_scan_does_not_follow_is_named(plain: Path, package: str) -> None:
    plain.write_text(f"import {package}\n{PLAIN}")
    expected = f"not used: --foo: {plain} uses {package}, whose command line the scan does not follow"
    assert expected in run(plain, "--foo").stdout


OWN = """\
from dataclasses import dataclass, field
from trl import DPOConfig, DPOTrainer, HfArgumentParser

@dataclass
class Mine:
    precompute: bool = True
    config: str = field(default="a.yaml")

(mine,) = HfArgumentParser(Mine).parse_args_into_dataclasses()
DPOTrainer("gpt2", args=DPOConfig(precompute_ref_log_probs=mine.precompute)).train()
"""


def test_a_dataclass_of_the_script_has_its_own_defaults_and_arguments(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)

    def answer(*words: str) -> Any:
        (scanned,) = json.loads(run(file, *words, options=("--json",)).stdout)["files"]
        hit = DROPPED in {bug["id"] for bug in scanned["trainers"][0]["hits"]}
        return hit, [given["words"] for given in scanned["not_used"]]

    assert answer() == (True, [])
    assert answer("--precompute", "false") == (False, [])
    # This parser reads no file: ``--config`` is an argument as any other.
    assert answer("--config", "gone.yaml") == (True, [])
    assert answer("--foo", "3", "--config", "b.yaml") == (True, ["--foo 3"])
    file.write_text(OWN.replace("    precompute: bool", "    def __post_init__(self): ...\n    precompute: bool"))
    assert answer()[0] is False
    assert f"cannot tell  {DROPPED}" in run(file).stdout


def test_a_command_of_click_reads_the_arguments(tmp_path: Path) -> None:
    file = tmp_path / "command.py"
    file.write_text(
        "import click\nfrom trl import DPOConfig, DPOTrainer\n\n@click.command()\n"
        "@click.option('--precompute/--no-precompute', default=True)\ndef main(precompute):\n"
        "    DPOTrainer('gpt2', args=DPOConfig(precompute_ref_log_probs=precompute)).train()\n\n"
        "if __name__ == '__main__':\n    main()\n"
    )
    assert f"hit  {DROPPED}" in run(file).stdout
    assert DROPPED not in run(file, "--no-precompute").stdout
    assert "not used" not in run(file, "--no-precompute").stdout
    assert "No such option" in run(file, "--foo").exception.format_message()


TYPER = """\
import typer
from trl import DPOConfig, DPOTrainer

app = typer.Typer()

@app.command()
def main(precompute: bool = True):
    DPOTrainer("gpt2", args=DPOConfig(precompute_ref_log_probs=precompute)).train()

app()
"""


def test_a_command_of_typer_reads_the_arguments(tmp_path: Path) -> None:
    file = tmp_path / "command.py"
    file.write_text(TYPER)
    assert f"hit  {DROPPED}" in run(file).stdout
    assert DROPPED not in run(file, "--no-precompute").stdout
    refused = run(file, "--gone").exception.format_message()
    assert "line 7: the script refuses the arguments behind --: No such option" in refused


def test_an_app_of_typer_with_several_commands_uses_nothing(tmp_path: Path) -> None:
    file = tmp_path / "command.py"
    file.write_text(TYPER.replace("app()\n", "@app.command()\ndef other():\n    pass\n\napp()\n"))
    result = run(file, "main", "--no-precompute")
    output = " ".join(result.stdout.split())
    assert f"cannot tell {DROPPED}" in output
    assert "not used: --no-precompute: line 7 of" in output
    assert "app has several commands (line 11)" in output


HYDRA = """\
import hydra
from trl import DPOConfig, DPOTrainer

@hydra.main(version_base=None, config_path=".", config_name="train")
def main(cfg):
    DPOTrainer(cfg.model, args=DPOConfig(**cfg.training)).train()

main()
"""


def test_a_script_of_hydra_reads_the_arguments(tmp_path: Path) -> None:
    file = tmp_path / "hydra_script.py"
    file.write_text(HYDRA)
    (tmp_path / "train.yaml").write_text("model: gpt2\ntraining:\n  precompute_ref_log_probs: true\n")
    result = run(file)
    assert f"hit  {DROPPED}" in result.stdout
    assert "precompute_ref_log_probs=True (train.yaml, line 3)" in result.stdout
    assert DROPPED not in run(file, "training.precompute_ref_log_probs=false").stdout
    refused = run(file, "training.gone=3").exception.format_message()
    assert "line 5: the script refuses the arguments behind --: could not override training.gone" in refused
    unread = run(file, "--config-name=other").stdout
    assert "not used: --config-name=other: line 5 of" in unread
    assert f"cannot tell  {DROPPED}" in unread
