"""``trl-hotfix audit``: which known bugs a set of pins brings, and which of them hit an old run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trl_hotfix import __version__
from trl_hotfix.catalogue import loading
from trl_hotfix.commands import audit, audit_answer
from trl_hotfix.commands.common import Exit
from trl_hotfix.matching import gates

from helpers.command_line import runner
from helpers.old_runs import output_folder

NORMALISER = "sft-loss-normaliser-counts-first-token"
EXTRA_EOS = "dpo-extra-eos-conversational"


def run(*arguments: str) -> Any:
    return runner().invoke(audit.command, list(arguments), standalone_mode=False)


def answers(*arguments: str) -> dict[str, tuple[str, str]]:
    answer = json.loads(run(*arguments, "--json").output)
    assert list(answer) == list(audit.Answer.__annotations__)
    assert all(list(bug) == list(audit_answer.Bug.__annotations__) for bug in answer["bugs"])
    return {bug["id"]: (bug["answer"], bug["repaired"]) for bug in answer["bugs"]}


def pins(folder: Path, text: str) -> str:
    file = folder / "requirements.txt"
    file.write_text(text)
    return str(file)


def test_the_pins_decide_which_bugs_are_here(tmp_path: Path) -> None:
    file = pins(tmp_path, "trl==0.16.1\ntransformers==4.50.3\n")
    bugs = answers(file)
    assert bugs[NORMALISER] == ("here", "by default")
    assert bugs["grpo-loss-normalisation"] == ("here", "if named")
    assert "grpo-zero-loss-diagnosis" not in bugs
    assert NORMALISER not in answers(pins(tmp_path, "trl==0.16.1\ntransformers==4.45.0\n"))
    assert answers(pins(tmp_path, "trl==0.16.1\n"))[NORMALISER] == ("cannot tell", "by default")
    pins(tmp_path, "trl==0.16.1\ntransformers==4.50.3\n")
    assert run(file).return_value is Exit.DEGRADED
    assert run(file, "--fail-on", "never").return_value is Exit.FINE
    lines = run(file).output.splitlines()
    assert lines[0] == f"{file}: pins on TRL 0.16.1 (transformers 4.50.3)"
    assert lines[2].split() == ["bug", "severity", "bug", "of", "fixed", "in", "repaired", "here", "answer"]
    (row,) = [line.split() for line in lines if line.strip().startswith(f"{NORMALISER} ")]
    assert row[1:] == ["wrong-gradient,", "scale", "transformers", "transformers", "5.10.1", "by", "default", "here"]


def test_pins_bring_known_bugs_without_a_repair_too(tmp_path: Path) -> None:
    file = pins(tmp_path, "trl==0.28.0\n")
    assert answers(file)["gold-eos-masked-when-pad-is-eos"] == ("here", "none")
    output = run(file).output
    (row,) = [line.split() for line in output.splitlines() if "gold-eos-masked-when-pad-is-eos" in line]
    assert row == ["gold-eos-masked-when-pad-is-eos", "wrong-gradient,", "data", "TRL", "TRL", "1.9.0", "no", "here"]
    without = [bug.id for bug in loading.without_repair() if gates.has_bug("0.28.0", bug)]
    assert f"and has no repair for {len(without)}. " in output
    of_4_48 = answers(pins(tmp_path, "trl==0.13.0\ntransformers==4.48.1\n"))
    assert of_4_48["preference-grad-accum-scaling"] == ("here", "by default")
    assert "preference-grad-accum-scaling" not in answers(pins(tmp_path, "trl==0.13.0\ntransformers==4.48.0\n"))


def test_an_old_run_is_told_of_a_bug_without_a_repair_whatever_its_record_says(tmp_path: Path) -> None:
    folder = output_folder(tmp_path / "out", "GOLDConfig", lmbda=0.5)
    (folder / "README.md").write_text("- TRL: 1.0.0\n- Transformers: 4.57.0\n")
    (folder / "trl_hotfix.json").write_text(json.dumps({"trl": "1.0.0", "patches": []}))
    assert answers(str(folder))["gold-eos-masked-when-pad-is-eos"] == ("cannot tell", "none")


def test_the_arguments_of_an_old_run_decide_which_bugs_hit_it(tmp_path: Path) -> None:
    folder = output_folder(tmp_path / "out", precompute_ref_log_probs=True, padding_free=False)
    (folder / "README.md").write_text("- TRL: 0.12.2\n- Transformers: 4.46.3\n")
    bugs = answers(str(folder))
    assert bugs[EXTRA_EOS] == ("cannot tell", "unknown")
    assert bugs["dpo-precomputed-ref-logps-dropped"][0] in ("hit", "cannot tell")
    assert "dpo-padding-free-contamination" not in bugs
    record = {"trl": "0.12.2", "patches": [{"id": EXTRA_EOS, "revision": 1, "word": "repaired"}]}
    (folder / "trl_hotfix.json").write_text(json.dumps(record))
    bugs = answers(str(folder))
    assert bugs[EXTRA_EOS][1] == "repaired"
    assert bugs["dpo-precomputed-ref-logps-dropped"][1] == "no"
    output = " ".join(run(str(folder)).output.split())
    assert "its record has the patch: repaired" in output
    retrain = {patch.id: patch.retrain for patch in loading.load()}
    assert f"train again? {retrain['dpo-precomputed-ref-logps-dropped']}" in output
    assert f"train again? {retrain[EXTRA_EOS]}" not in output


def test_what_the_run_found_out_itself_comes_before_what_its_files_tell(tmp_path: Path) -> None:
    folder = output_folder(tmp_path / "out", precompute_ref_log_probs=True, padding_free=True)
    (folder / "README.md").write_text("- TRL: 0.12.2\n- Transformers: 4.46.3\n")
    reference, dropped = "dpo-eval-reference-from-trained-policy", "dpo-precomputed-ref-logps-dropped"
    inferred = answers(str(folder))
    assert inferred[EXTRA_EOS][0] == inferred[reference][0] == "cannot tell"
    assert dropped in inferred
    hit = {"id": EXTRA_EOS, "severity": "wrong-gradient", "answer": "hit", "symptom": "an end too many"}
    of_pack = {**hit, "id": "of-a-pack", "because": ["beta=0.1"]}
    diagnosis = {**hit, "id": "a-diagnosis", "severity": "diagnosis"}
    unsure = {**hit, "id": reference, "answer": "cannot tell", "unknown": ["if it evaluates"]}
    patches = [
        {"id": EXTRA_EOS, "revision": 1, "word": "called"},
        {"id": dropped, "revision": 1, "word": "standing by"},
    ]
    record = {
        "trl": "0.12.2",
        "trl_hotfix": __version__,
        "patches": patches,
        "hits": [hit, of_pack, diagnosis, unsure],
    }
    (folder / "trl_hotfix.json").write_text(json.dumps(record))
    witnessed = answers(str(folder))
    assert witnessed[EXTRA_EOS] == ("hit", "called")
    assert witnessed["of-a-pack"] == ("hit", "no")
    assert witnessed[reference] == ("cannot tell", "no")
    assert not {dropped, "a-diagnosis"} & witnessed.keys()
    others = {EXTRA_EOS, reference, dropped, "of-a-pack"}
    assert {name for name in witnessed if name not in others} == {name for name in inferred if name not in others}
    sources = {bug["id"]: bug["source"] for bug in json.loads(run(str(folder), "--json").output)["bugs"]}
    assert {name for name, source in sources.items() if source == "record"} == others - {dropped}
    assert "found out by the run itself; beta=0.1" in " ".join(run(str(folder)).output.split())


def test_the_trainers_narrow_the_answer(tmp_path: Path) -> None:
    file = pins(tmp_path, "trl==1.16.0\ntransformers==4.57.6\n")
    everything, of_sft = answers(file), answers(file, "--trainers", "sft")
    assert 0 < len(of_sft) < len(everything)
    assert of_sft.items() <= everything.items()
    assert not any(name.startswith(("grpo-", "dpo-")) for name in of_sft)
    assert "if named" in {repaired for _, repaired in everything.values()}
    assert "if named" not in {repaired for _, repaired in of_sft.values()}
    assert "these trainers" in run(file, "--trainers", "SFT,DPOTrainer").output
    assert "no trainer 'SFTT' is known; did you mean 'SFT'?" in run(file, "--trainers", "SFTT").exception.message
    narrowed = json.loads(run(file, "--trainers", "SFT", "--json").output)["narrowed"]
    assert narrowed["trainers"] == ["SFTTrainer"]
    assert narrowed["left_out"] == len(everything) - len(of_sft)


def test_the_scripts_beside_the_file_narrow_the_answer(tmp_path: Path) -> None:
    file = pins(tmp_path, "trl==1.16.0\ntransformers==4.57.6\n")
    everything = answers(file)
    assert run(file).return_value is Exit.DEGRADED
    (tmp_path / "other.py").write_text("print('nothing')\n")
    assert answers(file) == everything
    script = tmp_path / "train.py"
    script.write_text("from trl import GRPOConfig, GRPOTrainer\nGRPOTrainer('gpt2', args=GRPOConfig('x')).train()\n")
    result = run(file)
    assert result.return_value is Exit.FINE
    assert result.output.startswith(f"{file}: GRPOTrainer on TRL 1.16.0 (transformers 4.57.6)\n")
    assert len(result.output.splitlines()) < 25
    assert {answer for answer, _ in answers(file).values()} == {"cannot tell"}
    assert answers(file, "--all") == everything
    answer = json.loads(run(file, "--json").output)
    assert answer["narrowed"]["scripts"] == [str(script)]
    assert answer["narrowed"]["left_out"] == len(everything) - len(answer["bugs"])
    (tmp_path / "more.py").write_text("import trl\ngetattr(trl, f'{name}Trainer')()\n")
    assert f"uncertain: {tmp_path / 'more.py'}, line 2" in run(file).output
    script.write_text(
        "from trl import DPOConfig as C, DPOTrainer as T\nT('m', args=C(precompute_ref_log_probs=True))\n"
    )
    pins(tmp_path, "trl==0.12.2\ntransformers==4.46.3\n")
    hit = run(file)
    assert hit.return_value is Exit.DEGRADED
    dropped = "dpo-precomputed-ref-logps-dropped"
    assert answers(file)[dropped] == ("hit", "by default")
    hits = [name for name, (answer, _) in answers(file).items() if answer == "hit"]
    accepted = [word for name in hits for word in ("--ignore", name)]
    assert run(file, *accepted).return_value is Exit.FINE
    assert f"accepted: {dropped}: --ignore" in run(file, *accepted).output


def test_what_a_policy_repairs_does_not_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_HOTFIX", "1")
    file = pins(tmp_path, "trl==1.16.0\ntransformers==4.57.6\n")
    bugs = json.loads(run(file, "--fail-on", "unrepaired", "--json").output)["bugs"]
    unrepaired = [bug["id"] for bug in bugs if bug["answer"] == "here" and not bug["run_repairs"]]
    assert unrepaired
    assert len(unrepaired) < len(bugs)
    ignored = [word for name in unrepaired for word in ("--ignore", name)]
    assert run(file, "--fail-on", "unrepaired", *ignored).return_value is Exit.FINE
    assert run(file, *ignored).return_value is Exit.DEGRADED
    assert "by this run" in run(file, "--fail-on", "unrepaired").output


def test_sarif_and_annotations_are_at_the_pin_of_trl(tmp_path: Path) -> None:
    file = pins(tmp_path, "transformers==4.57.6\n# trl-like things\ntrl==1.16.0\n")
    bugs = json.loads(run(file, "--json").output)["bugs"]
    (log,) = json.loads(run(file, "--format", "sarif").output)["runs"]
    assert {made["ruleId"] for made in log["results"]} == {bug["id"] for bug in bugs}
    assert {rule["id"] for rule in log["tool"]["driver"]["rules"]} == {bug["id"] for bug in bugs}
    for made in log["results"]:
        (location,) = made["locations"]
        assert location["physicalLocation"]["region"] == {"startLine": 3}
        assert log["tool"]["driver"]["rules"][made["ruleIndex"]]["id"] == made["ruleId"]
    levels = {made["ruleId"]: made["level"] for made in log["results"] if made["level"] != "note"}
    lines = run(file, "--format", "github").output.splitlines()
    of_github = {
        line.partition("title=")[2].split(" ")[0]: line.split(" ")[0][2:] for line in lines if "::notice" not in line
    }
    assert of_github == levels
    assert all(f"file={file},line=3," in line for line in lines)


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("torch==2.13.0\n", (), "does not pin trl to one version"),
        ("trl>=0.16\n", (), "--trl tells it"),
        ("trl==0.16.1\ntrl==0.17.0 ; python_version > '3'\n", (), "does not pin trl to one version"),
        ("trl==0.16.1\n", ("--trl", "newest"), "'newest' is not a version"),
    ],
)
def test_what_is_not_told_is_one_clear_error(
    tmp_path: Path, text: str, options: tuple[str, ...], expected: str
) -> None:
    assert expected in run(pins(tmp_path, text), *options).exception.format_message()


def test_a_run_that_does_not_tell_enough_is_one_clear_error(tmp_path: Path) -> None:
    folder = output_folder(tmp_path / "out", class_name="TrainingArguments")
    assert "does not tell its trainer" in run(str(folder)).exception.format_message()
    (folder / "README.md").write_text("no versions")
    assert "does not tell its release of TRL" in run(str(folder)).exception.format_message()


TWO_NEEDS = "peft-resume-restarts-adapter"


def test_a_version_that_is_given_excludes_whatever_else_is_not_known(tmp_path: Path) -> None:
    file = pins(tmp_path, "trl==1.16.0\n")
    assert answers(file)[TWO_NEEDS] == ("cannot tell", "by default")
    assert TWO_NEEDS not in answers(file, "--with", "transformers==5.23.0")
    assert answers(file, "--with", "transformers==5.22.0")[TWO_NEEDS] == ("cannot tell", "by default")
    assert answers(file, "--with", "transformers==5.22.0", "--with", "peft==0.18.0")[TWO_NEEDS][0] == "here"
    of_sft = run(file, "--trainers", "SFT", "--json", "--with", "transformers==5.23.0").stdout
    assert TWO_NEEDS not in {bug["id"] for bug in json.loads(of_sft)["bugs"]}
    assert TWO_NEEDS not in answers(pins(tmp_path, "trl==1.16.0\ntransformers==5.23.0\n"))


def test_the_version_of_an_old_run_that_is_not_known_is_not_none(tmp_path: Path) -> None:
    folder = output_folder(tmp_path / "out", class_name="SFTConfig")
    (folder / "README.md").write_text("- TRL: 1.16.0\n- Transformers: 5.22.0\n")
    assert " here is " not in run(str(folder)).output
    (folder / "README.md").write_text("- TRL: 1.16.0\n- Transformers: 5.23.0\n")
    assert TWO_NEEDS not in answers(str(folder))


def test_a_release_that_was_not_proved_has_no_certain_bug(tmp_path: Path) -> None:
    result = run(pins(tmp_path, "trl==9.9.9\n"), "--json")
    assert "TRL 9.9.9 is not among the releases that were proved (newest " in result.stderr
    assert {bug["answer"] for bug in json.loads(result.stdout)["bugs"]} == {"cannot tell"}
    assert result.return_value is Exit.FINE


def test_an_old_trl_is_exit_4(tmp_path: Path) -> None:
    result = run(pins(tmp_path, "trl==0.8.6\n"))
    assert result.return_value is Exit.NO_TRL


def test_a_long_pin_is_cut_on_the_screen_and_whole_in_the_json(tmp_path: Path) -> None:
    version = f"0.16.1+{'a' * 200_000}"
    file = pins(tmp_path, f"trl=={version}\n")
    screen = run(file, "--fail-on", "never").output
    assert max(map(len, screen.splitlines())) < 2_100
    assert " more)" in screen
    assert json.loads(run(file, "--json").output)["trl"] == version
    longer = f"0.16.1+{'a' * 1_000_100}"
    assert json.loads(run(pins(tmp_path, f"trl=={longer}\n"), "--json").output)["trl"].endswith("... (107 more)")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a==1\n" * 10_001, "more than 10000 pins"),
        ("a==1(\n" * 10_001, "more than 10000 pins"),
        ("\n" * 100_001, "more than 100000 lines"),
    ],
)
def test_a_file_with_too_many_pins_is_one_clear_error(tmp_path: Path, text: str, found: str) -> None:
    result = run(pins(tmp_path, text + "trl==0.16.1\n"))
    assert f"it is too large: it has {found}" in str(result.exception)
