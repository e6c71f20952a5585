"""Never a silent no-op: changes of a trainer by other packages are reported, whenever they happen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from helpers import sharing

BEFORE = ("before apply", "while imported")
AFTER = ("after apply", "after the trainer was made")
FOREIGN, REPLACED, DELETED = "conflicted (foreign-wrapper)", "conflicted (replaced)", "conflicted (deleted)"
DISPLACED, GONE, APPLIED = "displaced (replaced)", "displaced (deleted)", "applied (proven)"

# The intruder; the state of the patch if the intruder came before it; the state if the intruder came after.
TABLE = [
    ("regenerated in a cache", FOREIGN, DISPLACED),
    # It looks like the class of a reload, which would be patched; its code tells them apart.
    ("regenerated in its module", REPLACED, REPLACED),
    ("deleted", DELETED, GONE),
    ("deleted and put anew", FOREIGN, DISPLACED),
    ("replaced", FOREIGN, DISPLACED),
    ("wrapped by a look alike", FOREIGN, DISPLACED),
    ("wrapped", FOREIGN, APPLIED),
    # A class that is only defined trains nothing. test_shapes.py trains such classes.
    ("overridden", APPLIED, APPLIED),
    ("overridden by a mixin", APPLIED, APPLIED),
    ("overridden with super of another method", APPLIED, APPLIED),
    ("overridden past the trainer", APPLIED, APPLIED),
    ("overridden with super", APPLIED, APPLIED),
]
EXPECTED = {
    **{f"{intruder}, {time}": before for intruder, before, _ in TABLE for time in BEFORE},
    **{f"{intruder}, {time}": after for intruder, _, after in TABLE for time in AFTER},
    "on the instance, after the trainer was made": APPLIED,
}

# ms-swift deletes a constructor of GRPO and overrides concatenated_forward of DPO.
RUNS = {
    "1.16.0": ("trl.trainer.grpo_trainer", "GRPOTrainer", "__init__", "grpo-zero-loss-diagnosis"),
    "0.28.0": ("trl.trainer.dpo_trainer", "DPOTrainer", "concatenated_forward", "dpo-padding-free-wrong-terms"),
}
SMOKE = [("1.16.0", "replaced, before apply"), ("1.16.0", "wrapped, after apply")]
Answers = Mapping[str, Mapping[str, Any]]


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest) -> Answers:
    """Return the answers of each release, by case."""
    words = ["-m", "bench.inside.intruders", "{out}"]
    return sharing.answers_by_release(request, lambda release: [*words, *RUNS[release]], 600)


@pytest.mark.parametrize(
    ("release", "case"), sharing.heavy([(release, case) for release in RUNS for case in EXPECTED], smoke=SMOKE)
)
def test_an_intruder_is_reported_everywhere(answers: Answers, release: str, case: str) -> None:
    answer = sharing.answer_of(answers, release, case)
    expected, patch = EXPECTED[case], RUNS[release][-1]
    assert (answer["apply"], answer["status"]) == (expected, expected), answer
    warned = [] if expected == APPLIED else [f"{patch}: {expected}"]
    # What keeps a patch from a trainer is named behind its state.
    said = [line.partition("): ")[0] + ")" if "): " in line else line for line in answer["train begin"]]
    assert said == warned


@pytest.mark.parametrize(("release", "case"), SMOKE[:1])
def test_every_case_is_expected(answers: Answers, release: str, case: str) -> None:
    assert set(answers[release]["cases"]) == EXPECTED.keys()
