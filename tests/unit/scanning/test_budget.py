"""A scan takes a bounded number of steps, whatever the script asks for, and what takes more is unknown: too large."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from trl_hotfix.catalogue.conditions import Argument, Kind
from trl_hotfix.errors import ScriptError
from trl_hotfix.scanning.bindings import ScriptBindings
from trl_hotfix.scanning.budget import REASON, STEPS_OF_SCRIPT, Budget, TooLargeError, literal
from trl_hotfix.scanning.scripts import MOST_TRAINERS, read
from trl_hotfix.scanning.trainer_calls import trainer_calls

from helpers.hostile_files import HEAD, TRAINER, scripts

NAMES = ("beta", "model", "model.x", "ref_model", "callbacks", "loss_type", "train.resume_from_checkpoint")


def scanned(text: str) -> tuple[ScriptBindings, dict[str, Argument]]:
    """Return the script, and the arguments of its last trainer, when those of all have been asked for."""
    script = ScriptBindings(ast.parse(text))
    answers = [{name: call.argument(name) for name in NAMES} for call in trainer_calls(script).calls[:MOST_TRAINERS]]
    return script, answers[-1] if answers else {}


def levels(first: str, expression: str, count: int) -> str:
    lines = [f"k{level} = {expression.format(f'k{level - 1}')}" for level in range(1, count + 1)]
    call = f"DPOTrainer('m', args=DPOConfig('x', **k{count}), callbacks=k{count})"
    return "\n".join(["from trl import DPOConfig, DPOTrainer", f"k0 = {first}", *lines, call])


@given(scripts())
@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_script_takes_more_steps_than_it_may(text: str) -> None:
    try:
        script, _ = scanned(text)
    except (SyntaxError, RecursionError, MemoryError, TooLargeError, ValueError):
        return
    assert script.budget.spent <= STEPS_OF_SCRIPT


def test_options_that_double_with_each_level_are_read_once_at_each() -> None:
    script, answers = scanned(levels("dict(beta=2)", "dict(**{0}, **{0})", 40))
    assert (answers["beta"].kind, answers["beta"].value) == (Kind.LITERAL, 2)
    assert script.budget.spent < 2_000


@pytest.mark.parametrize("count", [100, 200, 400])
def test_the_steps_grow_with_the_lines(count: int) -> None:
    text = "from trl import DPOTrainer\n" + "x = 1\nprint(x)\n" * count + "DPOTrainer('m', beta=x)\n"
    script, _ = scanned(text)
    assert script.budget.spent < 20 * count


@pytest.mark.parametrize(
    ("first", "expression", "count", "name"),
    [
        ("dict(beta=2)", "dict(**{0}, **{0})", 4_000, "beta"),
        ("9 ** 9", "{0} * {0}", 60, "callbacks"),
        ("999999999", "{0} * {0}", 30, "callbacks"),
        ("['a']", "[{0}, {0}, {0}, {0}]", 15, "callbacks"),
        ("0x" + "f" * 5_000, "{0}", 3, "callbacks"),
        ("[C()]", "[{0}, {0}, {0}]", 30, "callbacks"),
    ],
)
def test_a_value_that_is_too_large_is_unknown(first: str, expression: str, count: int, name: str) -> None:
    script, answers = scanned(levels(first, expression, count))
    assert answers[name].kind in (Kind.UNKNOWN, Kind.OBJECT)
    assert answers[name].kind is Kind.UNKNOWN or not answers[name].complete
    assert script.budget.spent < STEPS_OF_SCRIPT / 4
    assert len(answers[name].describe(name)) < 200


@pytest.mark.parametrize(
    "lines",
    [
        "k = dict(**k)\n",
        "k = {**k}\n",
        "k = {'a': args}\nk = {'b': k}\n",
        "a, b = c\nc, d = a\nargs = a\n",
        "args = args\n",
        "class A(B): pass\nclass B(A): pass\nDPOTrainer(args=A())\n",
        "x = 1\n" * 9_000,
        "args.beta = 1\n" * 9_000,
        "k = [args]\n" * 9_000,
        "".join(f"a{number} = args\nargs = a{number}\n" for number in range(4_000)),
        "x0 = [x0, x0]\n" * 1_000,
    ],
)
def test_what_goes_in_a_circle_or_has_no_end_is_asked_for_in_a_few_steps(lines: str) -> None:
    script, answers = scanned(f"{HEAD}{lines}trainer = DPOTrainer('m', x0, args=args, **k)\n")
    assert set(answers) == set(NAMES)
    assert script.budget.spent <= STEPS_OF_SCRIPT


def test_a_question_that_takes_too_long_leaves_the_steps_of_the_others() -> None:
    budget = Budget(of_script=100, of_question=40)

    def takes(steps: int) -> str:
        return "".join(budget.counted("x" * steps))

    assert [budget.ask(lambda steps=steps: takes(steps), None) for steps in (41, 30, 41, 1)] == [
        None,
        "x" * 30,
        None,
        None,
    ]
    assert budget.spent == 100


def test_what_is_too_large_is_never_called_harmless(scan: object) -> None:
    many = "".join(f"args.k{number} = print(args)\n" for number in range(9_000))
    (trainer,) = scan(
        f"from trl import DPOConfig, DPOTrainer\nargs = DPOConfig('x')\n{many}DPOTrainer('m', args=args)\n"
    )  # type: ignore[operator]
    assert not trainer.hits
    assert "dpo-precomputed-ref-logps-dropped" in trainer.unknown
    assert REASON in trainer.unknown["dpo-precomputed-ref-logps-dropped"]


def test_trainers_that_are_too_many_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("from trl import DPOTrainer\n" + "DPOTrainer()\n" * 10_000)
    calls, unseen, *_ = read(file)
    assert len(calls) == MOST_TRAINERS
    ((line, reason),) = unseen
    assert (line, reason) == (
        MOST_TRAINERS + 2,
        f"too large: it makes 10000 trainers of TRL, and {10_000 - MOST_TRAINERS} of them are not judged",
    )


def test_calls_that_cannot_be_followed_are_counted() -> None:
    rebound = "".join(f"T = x{number}\n" for number in range(8_000))
    _, unseen, *_ = trainer_calls(ScriptBindings(ast.parse(f"{rebound}" + "T()\n" * 800)))
    ((_, reason),) = unseen
    assert reason.startswith("too large: ")


def test_functions_that_are_within_each_other_a_hundred_times_are_one_clear_error(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(f"from trl import DPOTrainer\nx = {'lambda: ' * 80}x\n")
    with pytest.raises(ScriptError, match="nested too deeply"):
        read(file)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (2**70, Kind.LITERAL),
        (2**5_000, Kind.UNKNOWN),
        ("a" * 10_000, Kind.LITERAL),
        ("a" * 10_001, Kind.OBJECT),
        (b"a" * 10_001, Kind.UNKNOWN),
        ([[1] * 30] * 30, Kind.LITERAL),
        ([[1] * 40] * 40, Kind.UNKNOWN),
        ({"a": {"b": 2**300}}, Kind.UNKNOWN),
    ],
)
def test_a_literal_has_a_size(value: object, kind: Kind) -> None:
    assert literal(value, 1).kind is kind


def test_the_trainer_of_the_hostile_files_is_found() -> None:
    _, answers = scanned(HEAD + TRAINER)
    assert answers["beta"].value == 2
