"""``trl-hotfix compare``: what an upgrade repairs, what stays, and what it brings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from trl_hotfix.catalogue import loading
from trl_hotfix.commands import compare
from trl_hotfix.commands.common import Exit
from trl_hotfix.matching import gates
from trl_hotfix.model import Severity

PATCHES = [patch for patch in loading.load() if patch.severity is not Severity.DIAGNOSIS]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(compare.command, list(arguments), standalone_mode=False)


def ids(answer: dict[str, Any], name: str) -> set[str]:
    return {bug["id"] for bug in answer[name]}


def test_each_bug_of_both_releases_is_in_one_list() -> None:
    answer = json.loads(run("0.16.1", "1.16.0", "--json").output)
    assert list(answer) == list(compare.Answer.__annotations__)
    first, second = ({patch.id for patch in PATCHES if gates.targets_for(patch, trl)} for trl in ("0.16.1", "1.16.0"))
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


def test_nothing_and_the_unknown_are_said_in_words() -> None:
    assert run("0.9.6", "0.16.1").return_value is Exit.FINE
    assert "TRL 0.16.1 brings: nothing that is known" in run("0.16.1", "0.16.1").output
    assert "TRL 99.0.0 is newer than every release that has been looked at." in run("0.16.1", "99.0.0").output
    assert run("0.8.6", "0.16.1").return_value is Exit.NO_TRL


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
