from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_hotfix.relations.claims import ALL, EFFECTS, EVALUATED, SEEDED, TRAINED
from trl_hotfix.relations.compare import differences, shares, unexpected
from trl_hotfix.relations.run import Run
from trl_hotfix.relations.setting import Setting
from trl_hotfix.relations.tolerance import tolerance

torch = pytest.importorskip("torch")


def run(gradient: float = 1.0, first_step: int = 1, steps: int = 2, **logs: float) -> Run:
    return Run(
        gradients=[{"weight": torch.tensor([gradient, 0.5])}] * steps,
        weights={"weight": torch.tensor([3.0])},
        logs=[dict(logs)] * steps,
        first_step=first_step,
    )


def test_equal_runs_agree() -> None:
    assert not list(differences(run(loss=1.0), run(loss=1.0), ALL))


def test_rounding_is_no_difference_and_one_percent_is() -> None:
    assert not list(differences(run(1.0, loss=0.12344), run(1.00001, loss=0.1235), ALL))
    found = [each.what for each in differences(run(1.0, loss=1.0), run(1.01, loss=1.01), ALL)]
    assert found == ["gradient of step 1: norm", "gradient of step 2: norm", "loss of step 1"]


def test_what_is_not_asked_for_is_not_compared() -> None:
    assert not list(differences(run(1.0, loss=1.0), run(2.0, loss=2.0), EVALUATED))


def test_a_resumed_run_is_compared_with_the_same_steps() -> None:
    whole, resumed = run(loss=1.0, steps=3), run(loss=1.0, first_step=3, steps=1)
    whole.gradients[:2] = [{"weight": torch.zeros(2)}] * 2
    assert not list(differences(whole, resumed, ALL))
    resumed.gradients = [{"weight": torch.zeros(2)}]
    assert [each.what for each in differences(whole, resumed, ALL)] == ["gradient of step 3: norm"]


def test_a_metric_that_one_run_does_not_log_is_a_difference() -> None:
    (found,) = differences(run(kl=0.5), run(), ALL)
    assert found.what == "kl of step 1"
    assert math.isnan(found.right)


def test_another_number_of_steps_is_a_difference() -> None:
    assert [each.what for each in differences(run(), run(steps=3), TRAINED)] == ["number of steps"]


def test_other_tensors_are_a_difference() -> None:
    other = run()
    other.weights = {"another": torch.tensor([3.0])}
    assert [each.what for each in differences(run(), other, ALL)] == ["weights at the end: tensors"]


def test_a_gradient_that_is_not_a_number_is_a_difference() -> None:
    assert list(differences(run(), run(math.nan), ALL))


def test_a_gradient_that_is_not_a_number_is_a_difference_in_any_tensor() -> None:
    left, right = run(steps=1), run(steps=1)
    left.gradients = [{"first": torch.ones(2), "second": torch.ones(2)}]
    right.gradients = [{"first": torch.ones(2), "second": torch.tensor([1.0, math.nan])}]
    assert [each.what for each in differences(left, right, ALL)] == ["gradient of step 1: norm"]


def test_what_a_trainer_has_changed_is_a_difference() -> None:
    changed = run()
    changed.effects = {"tokenizer padding_side": ("'left'", "'right'")}
    (found,) = differences(changed, changed, EFFECTS)
    assert found.what == "tokenizer padding_side: 'left' became 'right'"


def test_two_runs_that_learn_nothing_do_not_agree() -> None:
    nothing = run(steps=1)
    nothing.gradients = [{"weight": torch.zeros(2)}]
    assert [each.what for each in differences(nothing, nothing, ALL)] == ["gradient of step 1: zero in both"]


def test_a_random_state_that_differs_is_a_difference() -> None:
    left, right = run(), run()
    left.random, right.random = {"numpy": "a", "torch": "b"}, {"numpy": "a", "torch": "c"}
    assert [each.what for each in differences(left, right, SEEDED)] == ["random state of torch at the end"]


def test_a_weight_with_a_gradient_must_move_and_one_without_need_not() -> None:
    stuck = Run(
        gradients=[{"weight": torch.tensor([1.0, 1.0, 0.0, 0.0])}],
        start={"weight": torch.zeros(4)},
        weights={"weight": torch.tensor([0.1, 0.0, 0.0, 0.0])},
    )
    (found,) = shares(stuck)
    assert (found.what, found.right) == ("share of weight that moves", 0.5)
    stuck.weights = {"weight": torch.tensor([0.1, 0.1, 0.0, 0.0])}
    assert not list(shares(stuck))


def test_one_set_of_several_is_compared_as_if_it_were_alone() -> None:
    several = run()
    several.evaluations = [{"eval_first_loss": 1.0, "eval_reward": 2.0}, {"eval_second_loss": 3.0, "eval_reward": 4.0}]
    # The reward might be that of either.
    assert several.of_set("first").evaluations == [{"eval_loss": 1.0}]
    assert several.of_set("") is several


def test_numbers_that_the_first_step_must_log() -> None:
    assert not list(unexpected(run(loss=0.69315, kl=0.0), {"loss": math.log(2), "kl": 0.0}))
    found = [each.what for each in unexpected(run(loss=0.7), {"loss": math.log(2), "kl": 0.0})]
    assert found == ["loss of step 1", "kl of step 1"]


@given(st.integers(1, 10**9))
def test_the_tolerance_grows_with_the_root_of_the_terms_and_with_the_unit_of_the_dtype(terms: int) -> None:
    assert tolerance(torch.float32, 4 * terms) == pytest.approx(2 * tolerance(torch.float32, terms))
    ratio = tolerance(torch.bfloat16, terms) / tolerance(torch.float32, terms)
    assert ratio == pytest.approx(torch.finfo(torch.bfloat16).eps / torch.finfo(torch.float32).eps)


def test_a_setting_says_what_is_not_plain() -> None:
    assert str(Setting()) == "plain"
    setting = Setting(batch_size=2, arguments={"max_steps": 4}).but(accumulation=4, arguments={"beta": 0.0})
    assert str(setting) == "max_steps=4 beta=0.0 batch_size=2 accumulation=4"
    assert str(Setting(order=(1, 0, 3, 2))) == "order=1,0,3,... of 4"
