"""Whatever shape a user's trainer has, its record says what its gradients are: the patched ones, or the unpatched.

Each case is trained for two steps, beside the same trainer with the patch and without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from helpers import sharing

RELEASES = ("0.16.1", "0.24.0", "1.16.0")
PATCHES = (
    *("SFT compute_loss step", "SFT compute_loss some-steps", "SFT training_step step", "SFT __init__ construction"),
    *("SFT __init__ import", "SFT _prepare_dataset preparation", "SFT _prepare_dataset some-constructions"),
    *("SFT get_train_dataloader preparation", "SFT _save_checkpoint save", "SFT get_batch_samples data"),
    *("SFT _load_optimizer_and_scheduler resume", "DPO compute_loss step", "DPO compute_loss some-steps"),
    *("DPO training_step step", "DPO training_step some-steps", "DPO __init__ construction"),
    *("DPO prediction_step evaluation", "DPO get_train_dataloader preparation", "DPO _save_checkpoint save"),
    *("KTO compute_loss step", "KTO prediction_step evaluation", "KTO __init__ construction", "KTO training_step step"),
    *("GRPO compute_loss step", "GRPO training_step step", "GRPO __init__ construction"),
    *("GRPO _generate_and_score_completions generation", "Reward compute_loss step", "Reward __init__ construction"),
    "Reward get_train_dataloader preparation",
)
SHAPES = (
    *("observed", "derived", "calls-super", "has-its-own", "names-super-and-does-not-call-it", "its-own-in-training"),
    *("super-in-every-other-step", "by-a-helper", "by-an-alias", "with-a-mixin", "with-a-mixin-that-calls-super"),
    *("a-copy-of-the-class", "a-copy-of-a-trainer", "a-copy-of-a-trainer-made-before", "made-before"),
    *("of-another-class-since", "beside-an-unused-class", "with-a-method-of-its-own", "applied-in-the-middle"),
    *("reverted-in-the-middle", "probed-by-a-callback", "plain", "unpatched", "calls-super-twice"),
)
CASES = [
    (release, f"{patch} {shape}")
    for release in RELEASES
    for patch in PATCHES
    for shape in SHAPES
    # Whether every other save, or evaluation, calls it shows in no gradient.
    if not (shape == "super-in-every-other-step" and patch.endswith((" save", " evaluation")))
    # Only a loss can be computed twice, and be the same.
    and not (shape == "calls-super-twice" and patch.split(" ")[1] not in ("compute_loss", "prediction_step"))
]
SMOKE = [
    ("0.16.1", f"{patch} {shape}")
    for patch in ("DPO compute_loss step", "SFT __init__ construction")
    for shape in ("derived", "has-its-own", "its-own-in-training", "a-copy-of-a-trainer-made-before", "plain")
]
DECIDED = ("step", "some-steps", "construction")
"""Moments of which strict can tell after the first step."""
STRICT = [
    (release, f"{case} strict")
    for release, case in CASES
    if case.split(" ")[2] in DECIDED and not case.endswith((" unpatched", " observed"))
]
STRICT_SMOKE = [("0.16.1", f"{case} strict") for _, case in SMOKE]
Answers = Mapping[str, Mapping[str, Any]]


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest) -> Answers:
    """Return the answers of each release, by case; a case is answered with the two that it is beside."""

    def arguments(release: str) -> list[str]:
        selected = [one["case"] for one in sharing.parameters(request) if one["release"] == release]
        patches = dict.fromkeys(" ".join(case.split(" ")[:3]) for case in selected)
        beside = [f"{patch} {shape}" for patch in patches for shape in ("plain", "unpatched")]
        without = [case.removesuffix(" strict") for case in selected if case.endswith(" strict")]
        return ["-m", "bench.inside.shapes", "{out}", *dict.fromkeys([*beside, *without])]

    return sharing.answers_by_release(request, arguments, 3_000)


@pytest.mark.parametrize(("release", "case"), sharing.heavy(CASES, smoke=SMOKE))
def test_the_record_says_what_the_gradients_are(answers: Answers, release: str, case: str) -> None:
    patch, _, shape = case.rpartition(" ")
    moment = patch.rpartition(" ")[2]
    one, plain, unpatched = (
        sharing.answer_of(answers, release, name) for name in (case, f"{patch} plain", f"{patch} unpatched")
    )
    measured = "evaluations" if moment == "evaluation" else "gradients"
    steps = [
        (value, right, wrong)
        for value, right, wrong in zip(one[measured], plain[measured], unpatched[measured], strict=True)
        if right != wrong
    ]
    assert steps, "the patch changes nothing"
    assert all(value in (right, wrong) for value, right, wrong in steps), one
    patched = [value == right for value, right, _ in steps]
    entry, problems = one["entry"], [line for line in one["problems"] if line.startswith("made-up")]
    word = entry["word"] if entry is not None else None
    assert (word == "repaired") is any(patched), one
    if all(patched):
        assert not one["unreached"], one
        assert not problems, one
    elif any(patched):
        assert problems or entry["steps"]["called"] < entry["steps"]["of"], one
    else:
        assert word != "called", one
        if moment in ("step", "construction") and shape not in ("unpatched", "observed"):
            assert one["unreached"], one
            assert problems, one


@pytest.mark.parametrize(("release", "case"), sharing.heavy(STRICT, smoke=STRICT_SMOKE))
def test_strict_ends_the_runs_that_train_wrongly_and_no_others(answers: Answers, release: str, case: str) -> None:
    """It ends them before their first step, or after it. What goes wrong later is a problem in the record."""
    name, method, moment, shape, _ = case.split(" ")
    patch = f"{name} {method} {moment}"
    one, plain, unpatched = (
        sharing.answer_of(answers, release, name) for name in (case, f"{patch} plain", f"{patch} unpatched")
    )
    right, wrong = plain["gradients"][0], unpatched["gradients"][0]
    assert right != wrong, "the patch changes nothing"
    if one["ended"] == 0:
        # The first step would have been a wrong one: the same shape without strict says so.
        assert sharing.answer_of(answers, release, f"{patch} {shape}")["gradients"][0] == wrong
    elif shape == "applied-in-the-middle":
        assert one["ended"] is None
    else:
        assert (one["gradients"][0] == wrong) is (one["ended"] == 1), one
