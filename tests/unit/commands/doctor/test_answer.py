from __future__ import annotations

from trl_hotfix.commands.doctor.answer import Problems


def test_a_problem_that_two_checks_report_is_listed_once() -> None:
    problems = Problems()
    for problem, remedy in (("a", "x"), ("b", "x"), ("a", "x"), ("a", "y")):
        problems.add(problem, remedy)
    assert [tuple(entry.values()) for entry in problems.entries] == [("a", "x"), ("b", "x"), ("a", "y")]
