"""A completion that no reward function judges has the advantage 0, and the others are compared among themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from trl.trainer import grpo_trainer, rloo_trainer

from trl_hotfix.testing import scored_completions, stub_that_scores, tiny_causal_lm

import tiny

ID = "grpo-none-reward-counts-as-zero"
GROUP = 4
WEIGHTS = torch.tensor([1.0, 0.5])
BETA, CLIPPED = 0.5, (0.5, 4.0)

Rows = Sequence[tuple[float | None, float | None]]
"""What the two reward functions return for each completion of two groups."""

UNJUDGED = (None, None)
SOME: Rows = ((1, None), UNJUDGED, (2, None), (None, 3), UNJUDGED, (5, 1), UNJUDGED, (0, 2))
"""One function judges only one completion of a group."""
ONE: Rows = ((7, 1), (None, 2), (2, 6), UNJUDGED, (4, 8), (3, None), (1, 1), (6, 2))
MOST: Rows = (*[UNJUDGED] * 5, (3, 1), *[UNJUDGED] * 2)
JUDGED: Rows = ((1, 3), (4, 2), (2, 2), (0, 5), (5, 1), (0, None), (9, 4), (None, 3))
"""Each completion has a reward."""

COMPLETIONS = ((5, 7, 1), (10, 3, 1), (8, 9, 1), (3, 11, 1), (9, 8, 1), (6, 3, 1), (3, 4, 1), (13, 10, 1))
"""They are equally long, so that a mean over tokens is one over sequences."""
LAST_OF_PROMPT = 4

Formula = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Makes advantages ``(completions,)`` of the totals, NaN where not judged, and the rewards ``(completions, 2)``."""

generations = pytest.mark.parametrize("rows", [SOME, ONE, MOST], ids=["some", "one", "most"])
each_mode = pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])


def skip_unless_it_scores(module: ModuleType) -> None:
    if not hasattr(module, "GRPOTrainer") and not hasattr(module.RLOOTrainer, "_generate_and_score_completions"):
        pytest.skip("RLOO of this release takes no reward functions in this method")


@pytest.fixture(params=[grpo_trainer, rloo_trainer], ids=["GRPO", "RLOO"])
def module(request: pytest.FixtureRequest) -> Any:
    skip_unless_it_scores(request.param)
    return request.param


@pytest.fixture
def rloo() -> ModuleType:
    skip_unless_it_scores(rloo_trainer)
    return rloo_trainer


def target_of(trainer: Any) -> str:
    trainer_class = type(trainer).__mro__[1]
    return f"{trainer_class.__module__}:{trainer_class.__name__}._generate_and_score_completions"


def language_model() -> Any:
    """Return a model that computes the logits of the last ``logits_to_keep`` tokens alone, as 0.19.0 relies on."""
    model = tiny_causal_lm(vocabulary=16)

    def keep(model: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        if kwargs.get("logits_to_keep"):
            outputs.logits = outputs.logits[:, -kwargs["logits_to_keep"] :]

    model.register_forward_hook(keep, with_kwargs=True)
    return model


def stub(module: ModuleType, *, training: bool = True, rows: int = len(COMPLETIONS), **settings: Any) -> Any:
    policy, reference = language_model(), language_model()
    with torch.no_grad():
        reference.weight.add_(torch.cos(torch.arange(256.0)).reshape(16, 16))
    defaults = {"num_generations": GROUP, "num_generations_eval": GROUP, "beta": 0.0, "temperature": 1.0}
    trainer = stub_that_scores(
        module,
        COMPLETIONS[:rows],
        [0.0] * rows,
        model=policy,
        reference=reference,
        training=training,
        **{**defaults, "loss_type": "bnpo", **settings},
    )
    vars(trainer).update(
        reward_func_names=["first", "second"],
        reward_processing_classes=[None, None],
        reward_weights=WEIGHTS.clone(),
        epsilon_low=0.2,
        epsilon_high=0.2,
        current_gradient_accumulation_steps=1,
        use_liger_loss=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
    )
    return trainer


def scored(trainer: Any, rows: Rows) -> dict[str, Any]:
    """Return the batch that the trainer makes of a generation with these rewards."""

    def first(**kwargs: Any) -> list[float | None]:
        return [reward for reward, _ in rows]

    def second(**kwargs: Any) -> list[float | None]:
        return [reward for _, reward in rows]

    trainer.reward_funcs = [first, second]
    return scored_completions(trainer)


def advantages(trainer: Any, rows: Rows) -> torch.Tensor:
    found: torch.Tensor = scored(trainer, rows)["advantages"]
    return found


def expected(rows: Rows, formula: Formula, of_unjudged: float = torch.nan) -> torch.Tensor:
    """Return the advantages by the formula, with this total of what is not judged."""
    rewards = torch.tensor([[torch.nan if reward is None else reward for reward in row] for row in rows])
    totals = (rewards * WEIGHTS).nansum(1).masked_fill(rewards.isnan().all(1), of_unjudged)
    return formula(totals, rewards).nan_to_num(0.0)


def deviation(values: torch.Tensor) -> torch.Tensor:
    return values[~values.isnan()].std()


def centred(totals: torch.Tensor) -> torch.Tensor:
    groups = totals.view(-1, GROUP)
    return (groups - groups.nanmean(1, keepdim=True)).flatten()


def by_group(totals: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
    deviations = torch.stack([deviation(group) for group in totals.view(-1, GROUP)])
    return centred(totals) / (deviations.repeat_interleave(GROUP) + 1e-4)


def by_batch(totals: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
    return centred(totals) / (deviation(totals) + 1e-4)


def not_scaled(totals: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
    return centred(totals)


def by_function(totals: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
    """Normalise what each function returns by group, and the sum by batch."""
    columns = torch.stack([by_group(column, rewards) for column in rewards.T], dim=1)
    sums = (columns * WEIGHTS).nansum(1).masked_fill(totals.isnan(), torch.nan)
    return (sums - sums.nanmean()) / (deviation(sums) + 1e-4)


def left_one_out(totals: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
    groups = totals.view(-1, GROUP)
    of_others = groups.nansum(1, keepdim=True) - groups
    return (groups - of_others / ((~groups.isnan()).sum(1, keepdim=True) - 1)).flatten()


def left_one_out_and_normalised(totals: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
    values = left_one_out(totals, rewards)
    return (values - values.nanmean()) / (deviation(values) + 1e-4)


def left_one_out_of_clipped(totals: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
    return left_one_out(totals.clamp(*CLIPPED), rewards)


def log_probs(model: Any) -> torch.Tensor:
    """Return the log-probs of the completions, ``(completions, tokens)``."""
    tokens = torch.tensor(COMPLETIONS)
    previous = torch.cat([torch.full((len(tokens), 1), LAST_OF_PROMPT), tokens[:, :-1]], dim=1)
    found: torch.Tensor = model.weight[previous].log_softmax(-1).gather(2, tokens[..., None])[..., 0]
    return found


def scalings() -> list[Any]:
    """Return the values of ``scale_rewards`` in this release."""
    default = grpo_trainer.GRPOConfig.__dataclass_fields__["scale_rewards"].default
    return [True, False] if default is True else ["group", "batch", "none"]


def formula_of(scaling: Any) -> Formula:
    """Return how this release scales rewards that are complete: 0.22.0 and 0.22.1 mistake the scalings (TRL 3992)."""
    complete = advantages(stub(grpo_trainer, scale_rewards=scaling), JUDGED)
    return next(
        formula
        for formula in (by_group, by_batch, not_scaled)
        if torch.allclose(complete, expected(JUDGED, formula), atol=1e-5)
    )


def assert_equal(found: torch.Tensor, right: torch.Tensor) -> None:
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)


@each_mode
@generations
@pytest.mark.parametrize("scaling", scalings())
def test_grpo_scales_the_rewards_of_the_judged(scaling: Any, rows: Rows, training: bool) -> None:
    trainer = stub(grpo_trainer, scale_rewards=scaling, training=training)
    assert_equal(advantages(trainer, rows), expected(rows, formula_of(scaling)))


@each_mode
@generations
def test_grpo_normalises_each_function_among_the_judged(rows: Rows, training: bool) -> None:
    if "multi_objective_aggregation" not in grpo_trainer.GRPOConfig.__dataclass_fields__:
        pytest.skip("this release adds the rewards up before it scales them")
    trainer = stub(grpo_trainer, multi_objective_aggregation="normalize_then_sum", training=training)
    assert_equal(advantages(trainer, rows), expected(rows, by_function))


@each_mode
@generations
@pytest.mark.parametrize(
    ("settings", "formula"),
    [
        ({}, left_one_out),
        ({"normalize_advantages": True}, left_one_out_and_normalised),
        ({"reward_clip_range": CLIPPED}, left_one_out_of_clipped),
    ],
    ids=["as they are", "normalised", "clipped"],
)
def test_rloo_compares_a_reward_with_the_others_that_are_judged(
    rloo: ModuleType, settings: dict[str, Any], formula: Formula, rows: Rows, training: bool
) -> None:
    assert_equal(advantages(stub(rloo, training=training, **settings), rows), expected(rows, formula))


@each_mode
@generations
def test_rloo_takes_the_divergence_from_the_rewards_of_the_judged(rloo: ModuleType, rows: Rows, training: bool) -> None:
    trainer = stub(rloo, beta=BETA, training=training)
    penalties = BETA * (log_probs(trainer.model) - log_probs(trainer.ref_model)).sum(1).detach()
    right = expected(rows, lambda totals, rewards: left_one_out(totals - penalties, rewards))
    assert_equal(advantages(trainer, rows), right)


@generations
def test_the_loss_and_its_gradient_are_those_of_these_advantages(module: ModuleType, rows: Rows) -> None:
    trainer = stub(module)
    output = scored(trainer, rows)
    if module is grpo_trainer:
        right = expected(rows, formula_of(trainer.scale_rewards))
        of_policy = log_probs(trainer.model)
    else:
        right = expected(rows, left_one_out)
        of_policy = log_probs(trainer.model).sum(1, keepdim=True)
    by_formula = -(right[:, None] * (of_policy - of_policy.detach()).exp()).mean()
    loss = getattr(trainer, "_compute_loss", trainer.compute_loss)(trainer.model, output)
    assert_equal(loss, by_formula)
    (gradient,), (of_formula,) = (torch.autograd.grad(value, trainer.model.weight) for value in (loss, by_formula))
    torch.testing.assert_close(gradient, of_formula, rtol=1e-4, atol=1e-6)


def test_each_generation_of_each_trainer_is_scored_by_itself(module: ModuleType) -> None:
    trainers = stub(module), stub(module)
    fresh = {rows: advantages(stub(module), rows) for rows in (SOME, ONE, MOST, JUDGED)}
    for step, rows in enumerate((SOME, JUDGED, ONE, MOST, SOME)):
        for trainer in trainers:
            trainer.state.global_step = step
            assert advantages(trainer, rows).equal(fresh[rows])
    assert [tiny.acts(ID, target_of(trainer), trainer) for trainer in trainers] == [4, 4]


@generations
def test_the_advantages_are_a_plain_tensor_and_those_of_the_log(module: ModuleType, rows: Rows) -> None:
    trainer = stub(module)
    found = advantages(trainer, rows)
    assert type(found) is torch.Tensor
    logged = trainer._logs["advantages"]
    assert found.tolist() == logged or not logged


@each_mode
def test_the_metrics_leave_out_what_is_not_judged(module: ModuleType, training: bool) -> None:
    trainer = stub(module, training=training, rows=4)
    # The weight of the first function is 1: some releases log rewards without their weights.
    advantages(trainer, [(1, None), (3, None), UNJUDGED, (5, None)])
    metrics = trainer._metrics["train" if training else "eval"]
    assert metrics["reward"] == [pytest.approx(3.0)]
    assert metrics["reward_std"] == [pytest.approx(2.0)]


def test_the_trainer_keeps_its_rewards(module: ModuleType) -> None:
    trainer = stub(module)
    weights = trainer.reward_weights
    advantages(trainer, SOME)
    assert trainer.reward_weights is weights
    assert "_calculate_rewards" not in vars(trainer)


@each_mode
def test_complete_rewards_are_scored_as_trl_does(module: ModuleType, training: bool, switch: Any) -> None:
    trainer = stub(module, training=training)
    patched = advantages(trainer, JUDGED)
    assert tiny.acts(ID, target_of(trainer), trainer) == 0
    with switch.off():
        assert patched.equal(advantages(stub(module, training=training), JUDGED))


def test_an_advantage_that_is_no_number_stays_so_where_each_completion_is_judged(module: ModuleType) -> None:
    assert advantages(stub(module), [(float("inf"), 1), *JUDGED[1:]]).isnan().any()


@generations
def test_trl_takes_none_for_a_reward_of_0(module: ModuleType, rows: Rows, switch: Any) -> None:
    formula = formula_of(stub(module).scale_rewards) if module is grpo_trainer else left_one_out
    with switch.off():
        assert_equal(advantages(stub(module), rows), expected(rows, formula, of_unjudged=0.0))
