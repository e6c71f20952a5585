"""The variables of trl_hotfix that are set here; ``test_doctor`` has the problem of each variable."""

from __future__ import annotations

import pytest

from trl_hotfix import settings
from trl_hotfix.catalogue import loading
from trl_hotfix.commands.doctor.answer import Problems
from trl_hotfix.commands.doctor.variables import checked_variables

PATCHES = loading.load()


@pytest.fixture(autouse=True)
def no_variable_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "",
        "_ONLY",
        "_SKIP",
        "_OPTIONS",
        "_PACKS",
        "_CALLBACK",
        "_PATIENCE",
        "_UNKNOWN_BODY",
        "_LOG",
        "_LOG_FORMAT",
    ):
        monkeypatch.delenv(f"TRL_HOTFIX{name}", raising=False)


def test_every_variable_has_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in settings.VARIABLES:
        monkeypatch.setenv(name, "0")
    problems = [variable["problem"] or "" for variable in checked_variables(PATCHES, None, Problems())]
    assert len(problems) == len(settings.VARIABLES)
    assert not any("no such variable" in problem for problem in problems)


def test_only_our_variables_are_listed_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"TRL_HOTFIX_SKIP": PATCHES[0].id, "TRL_HOTFIX": "1", "HF_TOKEN": "secret"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    problems = Problems()
    variables = checked_variables(PATCHES, None, problems)
    assert [tuple(variable.values()) for variable in variables] == [
        ("TRL_HOTFIX", "1", None),
        ("TRL_HOTFIX_SKIP", PATCHES[0].id, None),
    ]
    assert problems.entries == []


def test_a_problem_comes_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_HOTFIX_CALLBACK", "ma\nybe")
    problems = Problems()
    (variable,) = checked_variables(PATCHES, None, problems)
    assert variable["value"] == r"'ma\nybe'"
    assert problems.entries == [
        {
            "problem": f"TRL_HOTFIX_CALLBACK={variable['value']}: {variable['problem']}",
            "remedy": "correct it, or unset TRL_HOTFIX_CALLBACK",
        }
    ]


def test_without_a_catalogue_no_id_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest that cannot be read is a problem of its own."""
    monkeypatch.setenv("TRL_HOTFIX_ONLY", "some-patch")
    problems = Problems()
    assert checked_variables((), None, problems)[0]["problem"] is None
    assert "unknown patch" in str(checked_variables(PATCHES, None, problems)[0]["problem"])


@pytest.mark.parametrize(("value", "is_off"), [("0", True), ("off", True), ("", False), ("1", False)])
def test_a_variable_that_turns_everything_off_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, value: str, is_off: bool
) -> None:
    monkeypatch.setenv("TRL_HOTFIX", value)
    problems = Problems()
    checked_variables(PATCHES, None, problems)
    assert ["turns everything off" in entry["problem"] for entry in problems.entries] == [True] * is_off


@pytest.mark.parametrize(("value", "is_fine"), [("", True), ("0", True), ("2.5", True), ("-1", False), ("inf", False)])
def test_patience_is_a_number_of_seconds(monkeypatch: pytest.MonkeyPatch, value: str, is_fine: bool) -> None:
    monkeypatch.setenv("TRL_HOTFIX_PATIENCE", value)
    (variable,) = checked_variables(PATCHES, None, Problems())
    assert (variable["problem"] is None) == is_fine
