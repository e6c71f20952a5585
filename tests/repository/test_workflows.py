"""The workflows and forms on the forge: pinned, with the least rights, and fed by the commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

GITHUB = Path(__file__).parents[2] / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
USED = re.compile(r"uses: +(\S+)(.*)$", re.MULTILINE)


@pytest.mark.parametrize("path", WORKFLOWS, ids=[path.stem for path in WORKFLOWS])
def test_each_action_is_pinned_by_commit_and_each_version_is_one_commit(path: Path) -> None:
    for used, rest in USED.findall(path.read_text(encoding="utf-8")):
        assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", used), used
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", rest), f"{used}: expected its version after it"
    everywhere = dict.fromkeys(match for path in WORKFLOWS for match in USED.findall(path.read_text(encoding="utf-8")))
    assert len({used.partition("@")[0] for used, _ in everywhere}) == len(everywhere), "one action at two commits"


@pytest.mark.parametrize("path", WORKFLOWS, ids=[path.stem for path in WORKFLOWS])
def test_no_workflow_has_rights_that_no_job_names(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert re.search(r"^permissions: \{\}$", text, re.MULTILINE)
    written = set(re.findall(r"^ {6}([\w-]+): write", text, re.MULTILINE))
    assert written == ({"id-token", "attestations", "contents"} if path.stem == "release" else set())
    assert "secrets." not in text
    assert "pull_request_target" not in text


@pytest.mark.parametrize(
    ("form", "commands"),
    [
        ("bug-of-trl", ["scan"]),
        ("not-repaired", ["doctor", "status"]),
        ("scan-answer", ["scan", "doctor"]),
    ],
)
def test_the_forms_ask_for_what_the_commands_print(form: str, commands: list[str]) -> None:
    text = (GITHUB / "ISSUE_TEMPLATE" / f"{form}.yml").read_text(encoding="utf-8")
    for command in commands:
        assert f"`trl-hotfix {command}" in text


def test_a_pull_request_has_the_lines_of_the_check() -> None:
    check = (GITHUB.parent / "bench" / "proving" / "check.py").read_text(encoding="utf-8")
    lines = check.partition("def lines(")[2].partition("\ndef ")[0]
    names = re.findall(r'yield f"([a-z -]+?)  +', lines)
    form = (
        (GITHUB / "pull_request_template.md").read_text(encoding="utf-8").partition("```text\n")[2].partition("```")[0]
    )
    assert form.splitlines()[1:] == names
