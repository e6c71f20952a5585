"""``trl-hotfix compare``: what an upgrade repairs, what stays, and what it brings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trl_hotfix.catalogue import loading
from trl_hotfix.commands import compare, compare_answer
from trl_hotfix.commands.common import Exit
from trl_hotfix.matching import gates
from trl_hotfix.model import Bug, Severity

from helpers.command_line import runner

KNOWN: tuple[Bug, ...] = (*loading.load(), *loading.without_repair())
BUGS = [bug for bug in KNOWN if bug.severity is not Severity.DIAGNOSIS]


def run(*arguments: str) -> Any:
    return runner().invoke(compare.command, list(arguments), standalone_mode=False)


def ids(answer: dict[str, Any], name: str) -> set[str]:
    return {bug["id"] for bug in answer[name]}


def test_each_bug_of_both_releases_is_in_one_list() -> None:
    answer = json.loads(run("0.16.1", "1.16.0", "--json").output)
    assert list(answer) == list(compare_answer.Answer.__annotations__)
    first, second = ({bug.id for bug in BUGS if gates.has_bug(trl, bug)} for trl in ("0.16.1", "1.16.0"))
    assert ids(answer, "repaired") == first - second != set()
    assert ids(answer, "stay") == first & second != set()
    assert ids(answer, "brought") == second - first != set()
    assert {bug["hits"] for name in ("repaired", "stay", "brought") for bug in answer[name]} == {None}


def test_back_is_the_reverse_of_forth() -> None:
    forth, back = (json.loads(run(*pair, "--json").output) for pair in (("0.16.1", "0.29.0"), ("0.29.0", "0.16.1")))
    assert ids(forth, "repaired") == ids(back, "brought")
    assert ids(forth, "brought") == ids(back, "repaired")
    assert ids(forth, "stay") == ids(back, "stay")


def test_a_script_leaves_what_hits_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "from trl import DPOConfig, DPOTrainer\nDPOTrainer('gpt2', args=DPOConfig(precompute_ref_log_probs=True))\n"
    )
    answer = json.loads(run("0.12.2", "0.13.0", str(script), "--json").output)
    hits = {bug["id"]: bug["hits"] for bug in answer["repaired"]}
    assert hits["dpo-precomputed-ref-logps-dropped"] == "hit"
    assert not any(bug["id"].startswith(("grpo", "kto")) for bug in (*answer["repaired"], *answer["stay"]))
    assert f"TRL 0.13.0 has repaired that hit {script}, or may" in run("0.12.2", "0.13.0", str(script)).output


def test_a_bug_without_a_repair_is_told_as_such() -> None:
    answer = json.loads(run("1.8.0", "1.9.0", "--json").output)
    (bug,) = (bug for bug in answer["repaired"] if bug["id"] == "dpo-evaluate-precomputes-with-trained-policy")
    assert (bug["repair"], bug["on_by_default"], bug["fixed_in"]) == ("none", False, "1.9.0")
    shown = [bug for name in ("repaired", "stay", "brought") for bug in answer[name]]
    without = sum(bug["repair"] == "none" for bug in shown)
    lines = run("1.8.0", "1.9.0").output.splitlines()
    assert lines[-1] == f"trl_hotfix repairs them in the release that has them, all but {without}."
    assert sum("known, no repair here" in line for line in lines) == without


def defaults_of(tmp_path: Path, config: str, *releases: str, trainer: str = "DPO") -> dict[str, Any]:
    script = tmp_path / "train.py"
    script.write_text(
        f"from trl import {trainer}Config, {trainer}Trainer\n{trainer}Trainer('gpt2', args={trainer}Config({config}))\n"
    )
    answer = json.loads(run(*(releases or ("0.16.1", "1.16.0")), str(script), "--json").stdout)
    (entry,) = answer["defaults"]
    assert list(entry) == list(compare_answer.TrainerDefaults.__annotations__)
    assert all(list(change) == list(compare_answer.Default.__annotations__) for change in entry["changes"])
    assert (entry["trainer"], entry["position"]) == (f"{trainer}Trainer", "line 2")
    changes = {change["name"]: (change["change"], change["before"], change["after"]) for change in entry["changes"]}
    return {"unknown": entry["unknown"], **changes}


def test_a_default_that_changes_is_told_where_the_script_leaves_it_to_trl(tmp_path: Path) -> None:
    changes = defaults_of(tmp_path, "")
    assert changes["truncation_mode"] == ("default", "'keep_end'", "'keep_start'")
    assert changes["logging_steps"] == ("default", "that of transformers", "10")
    assert changes["loss_weights"] == ("new", None, "None")
    assert not {"beta", "max_length", "use_liger_kernel", "max_prompt_length"} & changes.keys()
    assert changes["unknown"] is None


def test_what_the_script_sets_does_not_change_unless_it_is_gone(tmp_path: Path) -> None:
    changes = defaults_of(tmp_path, "truncation_mode='keep_end', max_prompt_length=256, logging_steps=5")
    assert not {"truncation_mode", "logging_steps"} & changes.keys()
    assert changes["max_prompt_length"] == ("gone", "512", None)


def test_what_the_script_may_set_may_change(tmp_path: Path) -> None:
    changes = defaults_of(tmp_path, "**settings")
    assert changes["truncation_mode"] == ("may be set", "'keep_end'", "'keep_start'")
    assert "loss_weights" not in changes
    output = run("0.16.1", "1.16.0", str(tmp_path / "train.py")).output
    assert "  truncation_mode: 'keep_end' -> 'keep_start' (unless the script sets it: line 2)" in output.splitlines()


def test_defaults_that_cannot_be_told_have_a_reason(tmp_path: Path) -> None:
    assert defaults_of(tmp_path, "", "0.13.0", "0.14.0", trainer="GRPO") == {"unknown": "TRL 0.13.0 has no GRPOConfig"}
    assert "TRL 99.0.0 are not on record" in defaults_of(tmp_path, "", "0.16.1", "99.0.0")["unknown"]
    assert json.loads(run("0.16.1", "1.16.0", "--json").output)["defaults"] is None
    assert "Defaults of" not in run("0.16.1", "1.16.0").output


def test_the_same_release_changes_no_default(tmp_path: Path) -> None:
    assert defaults_of(tmp_path, "", "0.16.1", "0.16.1") == {"unknown": None}
    assert (
        "Defaults of DPOConfig that change for DPOTrainer, line 2: none"
        in run("0.16.1", "0.16.1", str(tmp_path / "train.py")).output
    )


def test_nothing_and_the_unknown_are_said_in_words() -> None:
    assert run("0.9.6", "0.16.1").return_value is Exit.FINE
    assert "TRL 0.16.1 brings: nothing that is known" in run("0.16.1", "0.16.1").output
    assert "TRL 99.0.0 is not among the releases that were proved (newest " in run("0.16.1", "99.0.0").stderr
    assert run("0.8.6", "0.16.1").return_value is Exit.NO_TRL


def test_a_version_that_is_given_leaves_out_what_needs_another(tmp_path: Path) -> None:
    name, script = "sft-loss-normaliser-counts-first-token", tmp_path / "train.py"
    script.write_text("from trl import SFTTrainer\nSFTTrainer('gpt2')\n")

    def stays(*arguments: str) -> dict[str, Any]:
        answer = json.loads(run("1.15.0", "1.16.0", *arguments, "--json").stdout)
        return {bug["id"]: bug["hits"] for bug in answer["stay"]}

    assert name in stays()
    assert name in stays("--with", "transformers==4.57.6")
    assert name not in stays("--with", "transformers==5.23.0")
    assert stays(str(script))[name] == "cannot tell"
    assert stays(str(script), "--with", "transformers==4.57.6")[name] == "hit"
    assert name not in stays(str(script), "--with", "Transformers=5.23.0")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("newest", "0.16.1"), "'newest' is not a version"),
        (("0.16.1", "0.16.7"), "there is no TRL 0.16.7"),
        (("0.16.1", "0.17.0", "gone.py"), "gone.py cannot be read"),
    ],
)
def test_wrong_usage_is_one_clear_error(arguments: tuple[str, ...], expected: str) -> None:
    assert expected in run(*arguments).exception.format_message()
