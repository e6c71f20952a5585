"""``trl-hotfix audit``: which known bugs a set of pins brings, and which of them hit an old run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from helpers.old_runs import output_folder

from trl_hotfix import __version__
from trl_hotfix.catalogue import loading
from trl_hotfix.commands import audit
from trl_hotfix.commands.common import Exit
from trl_hotfix.matching import gates

NORMALISER = "sft-loss-normaliser-counts-first-token"
EXTRA_EOS = "dpo-extra-eos-conversational"


def run(*arguments: str) -> Any:
    return CliRunner().invoke(audit.command, list(arguments), standalone_mode=False)


def answers(*arguments: str) -> dict[str, tuple[str, str]]:
    answer = json.loads(run(*arguments, "--json").output)
    assert list(answer) == list(audit.Answer.__annotations__)
    assert all(list(bug) == list(audit.Bug.__annotations__) for bug in answer["bugs"])
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
    assert f"  here  {NORMALISER}" in lines


def test_pins_bring_known_bugs_without_a_repair_too(tmp_path: Path) -> None:
    file = pins(tmp_path, "trl==0.28.0\n")
    assert answers(file)["gold-eos-masked-when-pad-is-eos"] == ("here", "none")
    output = run(file).output
    assert "known, no repair here; fixed in TRL 1.9.0" in output
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
    assert "its record has the patch: repaired" in run(str(folder)).output


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


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("torch==2.13.0\n", (), "pins no version of trl"),
        ("trl>=0.16\n", (), "--trl tells it"),
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


def test_an_old_trl_is_exit_4(tmp_path: Path) -> None:
    result = run(pins(tmp_path, "trl==0.8.6\n"))
    assert result.return_value is Exit.NO_TRL
