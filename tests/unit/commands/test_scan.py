"""``trl-hotfix scan``: its screen, its JSON, its errors and its exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from trl_hotfix.catalogue import loading
from trl_hotfix.commands import scan, scan_answer
from trl_hotfix.commands.common import Exit
from trl_hotfix.matching import versions
from trl_hotfix.model import Bug, Severity
from trl_hotfix.reporting.sentences import repair_of

from helpers.command_line import runner

BUGS: tuple[Bug, ...] = (*loading.load(), *loading.without_repair())
DROPPED = "dpo-precomputed-ref-logps-dropped"
UNTOLD = ("dpo-vlm-pixel-values-dropped", "dpo-extra-eos-conversational", "dpo-last-token-dropped")
"""What scan cannot tell about ``DPO`` on 0.12.2."""

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
    answers = [line.strip() for line in lines if line.startswith(("  hit", "  cannot"))]
    assert answers == [f"hit  {DROPPED}", *(f"cannot tell  {bug_id}" for bug_id in UNTOLD)]
    shown = [bug for bug in BUGS if repair_of(bug) != "if named" and bug.severity is not Severity.DIAGNOSIS]
    assert lines[-2] == f"1 hit, 3 unknown; {len(shown) - 4} of the {len(shown)} known bugs it does not hit."


def test_no_id_is_cut_on_a_narrow_screen(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert f"  hit  {DROPPED}\n" in run(str(script), "--trl", "0.12.2").output


def test_the_json_has_the_declared_shape(script: Path) -> None:
    answer = json.loads(run(str(script), "--trl", "0.12.2", "--json", "--all").output)
    assert answer == json.loads(run(str(script), "--trl", "0.12.2", "--format", "json", "--all").output)
    assert list(answer) == list(scan.Answer.__annotations__)
    (file,) = answer["files"]
    assert list(file) == list(scan_answer.File.__annotations__)
    (trainer,) = file["trainers"]
    assert list(trainer) == list(scan_answer.Trainer.__annotations__)
    (hit,) = trainer["hits"]
    assert list(hit) == list(scan_answer.Bug.__annotations__)
    assert (hit["id"], hit["lines"], hit["on_by_default"]) == (DROPPED, [6, 9], True)
    assert hit["positions"] == ["line 6", "line 9"]
    assert trainer["rest"] + len(trainer["hits"]) + len(trainer["cannot_tell"]) == len(BUGS)


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        (DPO, {"hit": Exit.DEGRADED, "unknown": Exit.DEGRADED, "never": Exit.FINE}),
        (DPO.replace("=True", "=read()"), {"hit": Exit.FINE, "unknown": Exit.DEGRADED, "never": Exit.FINE}),
        (
            "from trl.experimental.prm import PRMTrainer\nPRMTrainer('gpt2').train()\n",
            dict.fromkeys(("hit", "unknown"), Exit.FINE),
        ),
        ("print('nothing')\n", {"hit": Exit.FINE, "unknown": Exit.DEGRADED}),
    ],
)
def test_the_exit_code_is_what_fail_on_says(tmp_path: Path, text: str, codes: dict[str, Exit]) -> None:
    file = tmp_path / "x.py"
    file.write_text(text)
    # Of what hits PRM there, transformers 4.55 leaves nothing that the script alone could tell.
    place = ("1.16.0", "--with", "transformers==4.55.0") if "PRM" in text else ("0.12.2",)
    assert run(str(file), "--trl", *place).return_value is codes["hit"]
    for word, code in codes.items():
        assert run(str(file), "--trl", *place, "--fail-on", word).return_value is code


def test_a_diagnosis_and_an_option_that_is_off_are_no_bugs_unless_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text("from trl import GRPOTrainer\nGRPOTrainer('gpt2', reward_funcs=len)\n")
    ids = {"grpo-zero-loss-diagnosis", "grpo-loss-normalisation"}

    def told(*options: str) -> set[str]:
        (trainer,) = json.loads(run(str(file), "--trl", "0.16.1", "--json", *options).output)["files"][0]["trainers"]
        return {bug["id"] for bug in (*trainer["hits"], *trainer["cannot_tell"])}

    assert not ids & told()
    assert ids <= told("--all")


def test_a_file_without_a_trainer_says_so(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text("print('nothing')\nraise SystemExit(7)\n")
    result = run(str(file), "--trl", "0.12.2")
    assert result.output == f"{file}: no trainer of TRL is made in it\n"


def test_a_folder_stands_for_its_scripts_and_notebooks(tmp_path: Path, script: Path) -> None:
    for name, text in {"b/c.py": DPO, "b/none.py": "x = 1\n", ".venv/d.py": DPO, "b/site-packages/e.py": DPO}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "broken.py").write_text("print 'Python 2'\n")
    result = run(str(tmp_path), "--trl", "0.12.2")
    assert [line.partition(",")[0] for line in result.output.splitlines() if ": DPOTrainer on" in line] == [
        f"{script}",
        f"{tmp_path / 'b/c.py'}",
    ]
    assert f"{tmp_path / 'broken.py'}, line 1 is not Python" in result.output
    assert result.output.endswith("1 more file makes no trainer of TRL.\n")
    assert result.return_value is Exit.DEGRADED
    by_pattern = run(f"{tmp_path}/b/*.py", "--trl", "0.12.2", "--json")
    assert [file["file"] for file in json.loads(by_pattern.output)["files"]] == [
        str(tmp_path / "b/c.py"),
        str(tmp_path / "b/none.py"),
    ]
    assert "matches no file" in run(f"{tmp_path}/*.nothing", "--trl", "0.12.2").exception.format_message()


def test_a_cell_of_a_notebook_is_named(tmp_path: Path) -> None:
    first, second = DPO.split("\n\n")
    cells = [
        {"cell_type": "code", "source": ["!pip install trl\n", "%load_ext autoreload\n", first]},
        {"cell_type": "markdown", "source": ["# not Python"]},
        {"cell_type": "code", "source": second},
    ]
    file = tmp_path / "book.ipynb"
    file.write_text(json.dumps({"cells": cells}))
    result = run(str(file), "--trl", "0.12.2")
    assert result.output.startswith(f"{file}, cell 3, line 5: DPOTrainer on TRL 0.12.2\n")
    assert f"hit  {DROPPED}" in result.output


COMMAND_LINE = """\
from trl import DPOConfig, DPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config

def main(script_args, training_args, model_args):
    trainer = DPOTrainer(
        model_args.model_name_or_path, args=training_args, peft_config=get_peft_config(model_args)
    )
    trainer.train()

if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, DPOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
    main(script_args, training_args, model_args)
"""


@pytest.mark.parametrize(
    ("words", "hit", "unsure"),
    [
        ([], False, True),
        (["--"], False, False),
        (["--", "--precompute_ref_log_probs"], True, False),
        (["--", "--precompute-ref-log-probs", "true", "--beta", "0.2"], True, False),
        (["--", "--no_precompute_ref_log_probs"], False, False),
        (["--", "--precompute_ref_log_probs=false"], False, False),
        (["--", "--config", "CONFIG"], True, False),
        (["--", "--config", "CONFIG", "--precompute_ref_log_probs", "false"], False, False),
    ],
)
def test_the_command_line_of_the_script_can_be_told(tmp_path: Path, words: list[str], hit: bool, unsure: bool) -> None:
    file, config = tmp_path / "x.py", tmp_path / "c.yaml"
    file.write_text(COMMAND_LINE)
    config.write_text("precompute_ref_log_probs: true\n")
    words = [str(config) if word == "CONFIG" else word for word in words]
    words += ["--model_name_or_path", "gpt2"] if words else []
    answer = json.loads(run(str(file), "--trl", "0.12.2", "--json", *words).output)
    ((trainer,),) = (file["trainers"] for file in answer["files"])
    assert (DROPPED in {bug["id"] for bug in trainer["hits"]}) is hit
    assert (DROPPED in {bug["id"] for bug in trainer["cannot_tell"]}) is unsure


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("beta",), "expected options such as --beta 0.1 behind --, found beta"),
        (("--config", "gone.yaml"), "gone.yaml cannot be read"),
    ],
)
def test_a_wrong_command_line_is_an_error_with_its_reason(
    tmp_path: Path, words: tuple[str, ...], expected: str
) -> None:
    file = tmp_path / "x.py"
    file.write_text(COMMAND_LINE)
    assert expected in run(str(file), "--trl", "0.12.2", "--", *words).exception.format_message()


MADE_BY_FUNCTION = """\
def make_parser(subparsers=None, prog=None):
    dataclass_types = (ScriptArguments, DPOConfig, ModelConfig)
    if subparsers is not None:
        parser = subparsers.add_parser("dpo", help="DPO", dataclass_types=dataclass_types)
    else:
        parser = TrlParser(dataclass_types, prog=prog)
    return parser

if __name__ == "__main__":
    parser = make_parser()
"""
PARSING = "parser.parse_args_and_config()"


@pytest.mark.parametrize(
    ("old", "new", "is_told"),
    [
        ("", "", True),
        ("parse_args_and_config()", "parse_args_and_config(fail_with_unknown_args=False)", True),
        (PARSING, f"{PARSING}; parser.print_help()", True),
        ("subparsers.add_parser", "subparsers.add", False),
        ("prog=prog)", "prog=prog); change(parser)", False),
        ("TrlParser(dataclass_types", "TrlParser((ScriptArguments, ModelConfig)", False),
        ("    return parser", "        return parser\n    return other", False),
        ("def make_parser", "@changed\ndef make_parser", False),
        # What the parser has been told itself, and the words that it is given instead of the command line's.
        ("parser = make_parser()", "parser = make_parser(); parser.set_defaults(precompute_ref_log_probs=True)", False),
        ("parse_args_and_config()", "parse_args_and_config(['--precompute_ref_log_probs'])", False),
        ("parse_args_and_config()", "parse_args_and_config(args=words)", False),
    ],
)
def test_a_parser_is_followed_as_far_as_nothing_else_is_done_with_it(
    tmp_path: Path, old: str, new: str, is_told: bool
) -> None:
    file = tmp_path / "x.py"
    head, _, parsing = COMMAND_LINE.partition('if __name__ == "__main__":\n')
    text = head + MADE_BY_FUNCTION + parsing.partition("\n")[2]
    assert old in text
    file.write_text(text.replace(old, new, 1))
    words = ["--", "--precompute_ref_log_probs", "--model_name_or_path", "gpt2"]
    answer = json.loads(run(str(file), "--trl", "0.12.2", "--json", *words).output)
    (trainer,) = answer["files"][0]["trainers"]
    assert (DROPPED in {bug["id"] for bug in trainer["hits"]}) is is_told
    assert (DROPPED in {bug["id"] for bug in trainer["cannot_tell"]}) is not is_told


def test_words_that_the_parser_finds_in_a_file_are_not_told(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text(COMMAND_LINE)
    (tmp_path / "x.args").write_text("--no_precompute_ref_log_probs")
    words = ["--", "--precompute_ref_log_probs", "--model_name_or_path", "gpt2"]
    answer = json.loads(run(str(file), "--trl", "0.12.2", "--json", *words).output)
    assert DROPPED in {bug["id"] for bug in answer["files"][0]["trainers"][0]["cannot_tell"]}


def test_a_version_that_is_given_excludes_whatever_else_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "installed", lambda name: None if name == "peft" else "5.23.0")
    file = tmp_path / "x.py"
    file.write_text(
        "from trl import DPOTrainer\nfrom peft import PeftModel\n\n"
        "DPOTrainer(PeftModel.from_pretrained(x, 'y')).train(resume_from_checkpoint=True)\n"
    )

    def answer(*options: str) -> dict[str, str]:
        output = run(str(file), "--trl", "1.16.0", *options, "--json").stdout
        (trainer,) = json.loads(output)["files"][0]["trainers"]
        return {bug["id"]: "; ".join(bug["unknown"]) for bug in (*trainer["cannot_tell"], *trainer["hits"])}

    name = "peft-resume-restarts-adapter"
    assert "needs peft >=0.8.0, and its version is not known" in answer()[name]
    assert "transformers <5.23.0, and its version is not known (5.23.0 is installed here)" in answer()[name]
    assert name not in answer("--with", "transformers==5.23.0")
    assert name in answer("--with", "transformers==5.22.0")


def test_a_release_that_was_not_proved_is_never_hit(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text("from trl import SFTTrainer\nSFTTrainer('m').train(resume_from_checkpoint=True)\n")
    assert run(str(file), "--trl", "1.16.0", "--json").return_value is Exit.DEGRADED
    options = [str(file), "--trl", "9.9.9", "--json", "--fail-on", "hit"]
    result = runner().invoke(scan.command, options, standalone_mode=False)
    assert result.return_value is Exit.FINE
    doubt = "TRL 9.9.9 is not among the releases that were proved (newest 1.16.0)"
    assert doubt in result.stderr
    (trainer,) = json.loads(result.stdout)["files"][0]["trainers"]
    assert trainer["hits"] == []
    assert any(doubt in bug["unknown"] for bug in trainer["cannot_tell"])


def test_versions_of_other_libraries_can_be_told(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text("from trl import SFTConfig, SFTTrainer\nSFTTrainer('gpt2', args=SFTConfig())\n")

    def hits(version: str) -> bool:
        output = run(str(file), "--trl", "0.23.0", "--with", f"transformers=={version}", "--json").output
        return "sft-loss-normaliser-counts-first-token" in output

    assert [hits(version) for version in ("4.57.1", "5.10.1")] == [True, False]
    for text, expected in {
        "transformers": "expected NAME==VERSION",
        "trl==1.0.0": "give the release of TRL as --trl 1.0.0",
    }.items():
        assert expected in run(str(file), "--with", text).exception.format_message()


def test_sarif_has_a_rule_for_each_bug_and_a_result_for_each_answer(script: Path) -> None:
    log = json.loads(run(str(script), "--trl", "0.12.2", "--format", "sarif").output)
    (only,) = log["runs"]
    rules = only["tool"]["driver"]["rules"]
    assert {rule["id"] for rule in rules} < {bug.id for bug in BUGS}
    hit, *may_hit = only["results"]
    assert (hit["ruleId"], rules[hit["ruleIndex"]]["id"], hit["level"]) == (DROPPED, DROPPED, "error")
    assert hit["locations"][0]["physicalLocation"]["region"] == {"startLine": 6}
    assert [(result["ruleId"], result["level"]) for result in may_hit] == [(bug_id, "note") for bug_id in UNTOLD]
    assert hit["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == script.as_posix()


def test_github_gets_an_error_for_each_hit(script: Path) -> None:
    hit, notice = run(str(script), "--trl", "0.12.2", "--format", "github").output.splitlines()
    assert hit.startswith(f"::error file={script.as_posix()},line=6,title={DROPPED} (wrong-gradient) on TRL 0.12.2::")
    assert notice.startswith(f"::notice file={script.as_posix()},line=10,title=3 known bugs")
    command = f"trl-hotfix scan {script} --trl 0.12.2 --dataset FILE"
    assert notice.endswith(f"DPOTrainer may hit {', '.join(UNTOLD)}. This would answer more: {command}")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("gone.py", None, "cannot be read: No such file or directory"),
        ("bad.py", b"def f(:\n", "line 1 is not Python"),
        ("bad.py", b"x = 'a\n", "line 1 is not Python"),
        ("null.py", b"a\0b", "is not Python"),
        ("latin.py", b"x = '\xff'\n", "is not Python"),
        ("book.ipynb", b"{}", "is not a notebook"),
        ("book.ipynb", b"[1]", "is not a notebook"),
        ("book.ipynb", b'{"cells": 1}', "is not a notebook"),
        ("x.json", b"{}", "is neither Python, a notebook nor YAML"),
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
    assert run(str(file), "--trainer", "dpotrainer", "--trl", "0.12.2").return_value is Exit.FINE


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


KEEPS_END = "dpo-keep-end-zeroes-samples"
REWARD = "from trl import RewardTrainer\nRewardTrainer(model='Qwen/Qwen2-0.5B')\n"


def test_a_bug_without_a_repair_is_told_as_such_in_every_form(tmp_path: Path) -> None:
    file, bug_id = tmp_path / "gold.py", "gold-eos-masked-when-pad-is-eos"
    file.write_text(
        "from trl.experimental.gold import GOLDConfig, GOLDTrainer\nGOLDTrainer('gpt2', args=GOLDConfig())\n"
    )
    result = run(str(file), "--trl", "0.27.0", "--fail-on", "unknown")
    assert f"  cannot tell  {bug_id}" in result.output.splitlines()
    assert "(wrong-gradient, data; known, no repair here; fixed in TRL 1.9.0)" in result.output
    assert result.return_value is Exit.DEGRADED
    (trainer,) = json.loads(run(str(file), "--trl", "0.27.0", "--json").output)["files"][0]["trainers"]
    repairs = {bug["id"]: (bug["repair"], bug["on_by_default"], bug["fixed_in"]) for bug in trainer["cannot_tell"]}
    assert repairs[bug_id] == ("none", False, "1.9.0")
    (log,) = json.loads(run(str(file), "--trl", "0.27.0", "--format", "sarif").output)["runs"]
    rules = {rule["id"]: rule for rule in log["tool"]["driver"]["rules"]}
    text = rules[bug_id]["help"]["text"]
    assert text == f"trl_hotfix: known, no repair here; fixed in TRL 1.9.0\n\ntrl-hotfix explain {bug_id}"
    assert bug_id in run(str(file), "--trl", "0.27.0", "--format", "github").output
    clean = run(str(file), "--trl", "1.9.0", "--json")
    (trainer,) = json.loads(clean.output)["files"][0]["trainers"]
    assert bug_id not in {bug["id"] for bug in (*trainer["hits"], *trainer["cannot_tell"])}


@pytest.mark.parametrize(
    ("script", "trl", "bug", "answer"),
    [
        (REWARD, "0.28.0", "reward-trainer-two-label-model", "cannot_tell"),
        (REWARD, "0.29.0", "reward-trainer-two-label-model", None),
        ("from trl import DPOTrainer\nDPOTrainer('gpt2')\n", "0.17.0", KEEPS_END, "cannot_tell"),
        (
            "from trl import DPOConfig, DPOTrainer\nDPOTrainer('gpt2', args=DPOConfig(truncation_mode='keep_start'))\n",
            "0.17.0",
            KEEPS_END,
            None,
        ),
        ("from trl import GRPOTrainer\nGRPOTrainer('gpt2')\n", "0.15.2", "grpo-temperature-not-applied", "hits"),
        (
            "from trl import GRPOConfig, GRPOTrainer\nGRPOTrainer('gpt2', args=GRPOConfig(temperature=1.0))\n",
            "0.15.2",
            "grpo-temperature-not-applied",
            None,
        ),
        (
            "from trl import GRPOConfig as C, GRPOTrainer as T\nT('gpt2', args=C(mask_truncated_completions=True))\n",
            "1.8.0",
            "grpo-dapo-normaliser-counts-masked-tokens",
            "hits",
        ),
        (
            "from trl import SFTConfig as C, SFTTrainer as T\nT(args=C(packing=True, packing_strategy='wrapped'))\n",
            "1.13.0",
            "sft-wrapped-packing-duplicates",
            "cannot_tell",
        ),
        (
            "from trl import SFTConfig as C, SFTTrainer as T\nT('gpt2', args=C(loss_type='nll'))\n",
            "1.14.2",
            "fused-lm-head-not-the-models-own",
            None,
        ),
    ],
)
def test_the_arguments_decide_who_is_hit_by_a_bug(
    tmp_path: Path, script: str, trl: str, bug: str, answer: str | None
) -> None:
    file = tmp_path / "train.py"
    file.write_text(script)
    (trainer,) = json.loads(run(str(file), "--trl", trl, "--json").output)["files"][0]["trainers"]
    found = [name for name in ("hits", "cannot_tell") if bug in {found["id"] for found in trainer[name]}]
    assert found == ([answer] if answer is not None else [])


def model(folder: Path, config: dict[str, Any], **others: Any) -> str:
    folder.mkdir()
    for name, content in {"config": config, **others}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return str(folder)


MIXTRAL = {"model_type": "mixtral", "num_local_experts": 8, "output_router_logits": True}
UNROUTED = {**MIXTRAL, "output_router_logits": False}
OFFLOADED = "deepspeed-offload-drops-micro-batches"
UNBALANCED = "moe-aux-loss-lost-under-deepspeed"


@pytest.mark.parametrize(
    ("config", "launch", "line", "expected"),
    [
        (MIXTRAL, "DEEPSPEED", "", "hits"),
        (MIXTRAL, "MULTI_GPU", "", "hits"),
        (MIXTRAL, "FSDP", "", None),
        (MIXTRAL, "NO", "", "cannot_tell"),
        ({**MIXTRAL, "output_router_logits": False}, "DEEPSPEED", "", None),
        (
            {**MIXTRAL, "output_router_logits": False},
            "DEEPSPEED",
            "m.config.output_router_logits = True",
            "cannot_tell",
        ),
        ({"model_type": "llama"}, "DEEPSPEED", "", None),
        ({"model_type": "llama"}, "DEEPSPEED", "m.config.output_router_logits = True", None),
        (MIXTRAL, "FSDP", "# deepspeed=... is in the config", "cannot_tell"),
    ],
)
def test_the_files_of_the_model_and_the_launch_decide(
    tmp_path: Path, config: dict[str, Any], launch: str, line: str, expected: str | None
) -> None:
    script, accelerate = tmp_path / "train.py", tmp_path / "accelerate.yaml"
    script.write_text(f"from trl import DPOTrainer\n{line}\nDPOTrainer('m')\n")
    accelerate.write_text(f"distributed_type: {launch}\nnum_processes: 8\n")
    folder = model(tmp_path / "model", config)
    told = ("--model", folder, "--accelerate", str(accelerate))
    answer = json.loads(run(str(script), "--trl", "0.11.4", *told, "--json").output)
    assert (answer["model"], answer["accelerate"]) == (folder, str(accelerate))
    (trainer,) = answer["files"][0]["trainers"]
    found = [name for name in ("hits", "cannot_tell") if UNBALANCED in {bug["id"] for bug in trainer[name]}]
    assert found == ([expected] if expected is not None else [])
    without = json.loads(run(str(script), "--trl", "0.11.4", "--json").output)
    assert UNBALANCED in {bug["id"] for bug in without["files"][0]["trainers"][0]["cannot_tell"]}
    assert (without["model"], without["accelerate"]) == (None, None)


@pytest.mark.parametrize(
    ("micro_batches", "zero", "expected"),
    [
        (4, {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "hits"),
        (2, {"stage": 2, "offload_optimizer": {"device": "cpu"}}, None),
        (4, {"stage": 3, "offload_optimizer": {"device": "cpu"}}, None),
        (4, {"stage": 2}, None),
    ],
)
def test_the_config_of_deepspeed_decides(
    tmp_path: Path, micro_batches: int, zero: dict[str, Any], expected: str | None
) -> None:
    script, config = tmp_path / "train.py", tmp_path / "ds.json"
    settings = f"SFTConfig(gradient_accumulation_steps={micro_batches}, deepspeed='ds.json')"
    script.write_text(f"from trl import SFTConfig, SFTTrainer\nSFTTrainer('m', args={settings})\n")
    config.write_text(json.dumps({"zero_optimization": zero}))
    beside = ("--trl", "1.16.0", "--with", "deepspeed==0.17.5", "--json")
    answer = json.loads(run(str(script), *beside, "--deepspeed", str(config)).output)
    assert answer["deepspeed"] == str(config)
    (trainer,) = answer["files"][0]["trainers"]
    found = [name for name in ("hits", "cannot_tell") if OFFLOADED in {bug["id"] for bug in trainer[name]}]
    assert found == ([expected] if expected is not None else [])
    other = json.loads(run(str(script), "--trl", "1.16.0", "--with", "deepspeed==0.19.0", "--json").output)
    found = [bug["id"] for name in ("hits", "cannot_tell") for bug in other["files"][0]["trainers"][0][name]]
    assert OFFLOADED not in found


def test_a_fact_that_decides_is_among_the_reasons(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("from trl import SFTTrainer\nSFTTrainer('m')\n")
    folder = model(tmp_path / "model", {}, tokenizer_config={"eos_token": "a", "pad_token": "a"})
    output = run(str(script), "--trl", "0.11.4", "--model", folder).output
    assert "pad_is_eos=True (tokenizer_config.json)" in output
    words = run(str(script), "--trl", "0.11.4", "--model", folder, "--", "--pad_token", "b").output
    assert "pad_is_eos=True" not in words
    assert "cannot tell  sft-eos-masked-when-pad-is-eos" in words

    config = tmp_path / "c.yaml"
    config.write_text("pad_token: b\n")
    assert (
        "pad_is_eos=True"
        not in run(str(script), "--trl", "0.11.4", "--model", folder, "--", "--config", str(config)).output
    )


PREFILLED = "grpo-prefilled-assistant-turn-closed"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([{"role": "user", "content": "a"}], None),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "hits"),
        ("a", None),
        (1, "cannot_tell"),
    ],
)
def test_the_dataset_decides(tmp_path: Path, prompt: Any, expected: str | None) -> None:
    script, dataset = tmp_path / "train.py", tmp_path / "train.jsonl"
    script.write_text("from trl import GRPOTrainer\nGRPOTrainer('m')\n")
    dataset.write_text(json.dumps({"prompt": prompt}))
    answer = json.loads(run(str(script), "--trl", "1.9.0", "--dataset", str(dataset), "--json").output)
    assert answer["dataset"] == str(dataset)
    (trainer,) = answer["files"][0]["trainers"]
    found = [name for name in ("hits", "cannot_tell") if PREFILLED in {bug["id"] for bug in trainer[name]}]
    assert found == ([expected] if expected is not None else [])


def test_a_model_that_cannot_be_read_is_one_clear_error(script: Path) -> None:
    message = run(str(script), "--model", "Qwen/Qwen2-0.5B").exception.format_message()
    assert message.startswith("--model: Qwen/Qwen2-0.5B is no folder")
    assert "is not there" in run(str(script), "--dataset", "gone.jsonl").exception.format_message()
    assert "No such file or directory" in run(str(script), "--accelerate", "gone.yaml").exception.format_message()


UNCERTAIN = "from trl import SFTTrainer\n\nregister(SFTTrainer)\n"


def test_a_trainer_that_cannot_be_seen_is_uncertain_in_every_form(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(UNCERTAIN)
    reason = "line 3 uses TRL's SFTTrainer, and scan cannot see where the script makes one"
    result = run(str(file), "--trl", "0.12.2")
    assert (result.output, result.return_value) == (f"{file}, line 3: uncertain: {reason}\n", Exit.FINE)
    (shown,) = json.loads(run(str(file), "--trl", "0.12.2", "--json").output)["files"]
    assert shown["uncertain"] == [{"line": 3, "position": "line 3", "reason": reason}]
    assert list(shown["uncertain"][0]) == list(scan_answer.Unseen.__annotations__)
    assert reason in run(str(file), "--trl", "0.12.2", "--format", "github").output
    sarif = json.loads(run(str(file), "--trl", "0.12.2", "--format", "sarif").output)
    assert reason in sarif["runs"][0]["invocations"][0]["toolExecutionNotifications"][0]["message"]["text"]


def test_a_trainer_that_cannot_be_seen_fails_as_what_cannot_be_told(tmp_path: Path) -> None:
    for name, text in (("a.py", UNCERTAIN), ("b.py", "from trl import SFTTrainer\nSFTTrainer('m')\n")):
        (tmp_path / name).write_text(text)
    for fail_on, code in (("hit", Exit.FINE), ("unknown", Exit.DEGRADED), ("never", Exit.FINE)):
        assert run(str(tmp_path / "a.py"), "--trl", "1.0.0", "--fail-on", fail_on).return_value is code
    assert "a.py, line 3: uncertain" in run(str(tmp_path), "--trl", "1.0.0").output


@pytest.mark.parametrize("name", [None, "config.yaml", "notes.txt", ".hidden/train.py"])
def test_a_folder_without_a_script_says_what_it_looked_for(tmp_path: Path, name: str | None) -> None:
    if name is not None:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("packing: true\n")
    result = run(str(tmp_path), "--trl", "0.12.2")
    assert result.exception.exit_code == 1
    assert "looked for .py and .ipynb in it and its folders" in result.exception.message
    assert "a YAML config has to be named itself" in result.exception.message
