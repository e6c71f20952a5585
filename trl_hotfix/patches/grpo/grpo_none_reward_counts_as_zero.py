"""GRPO and RLOO take a completion that no reward function judges for one of reward 0.

A reward function may return None, which becomes NaN. ``_generate_and_score_completions`` adds the functions up by
``nansum``, which is 0 where all of them are NaN. In TRL 1.6.0 (pull request 5902) such a row stays NaN, mean and
standard deviation leave it out, RLOO's mean of the others too, and in the end its advantage is 0.

The formulas in between are others in many releases. So the wrapper computes none of them: it gives the method a tensor
of rewards whose ``nansum`` keeps these rows NaN, and whose ``mean``, ``std`` and ``sum`` leave NaN out. Where all have
a reward the tensor is TRL's own. In 0.20 and 0.21 TRL's warning about such a row crashes.
"""

from __future__ import annotations

import inspect
import math
import statistics
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from ...authoring import absent, act_of_this_call, shadowed
from ...model import Outcome
from ...testing import judge_with_gradients, scored_completions, stub_that_scores, tiny_attention_model


def leave_out_what_is_not_judged(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Score the completions that have a reward among themselves, and the others with an advantage of 0."""
    import torch

    act = act_of_this_call()

    def rewards_of_the_judged(rewards: Any) -> Any:
        unjudged = rewards.isnan().all(dim=1)
        if not unjudged.any():
            return rewards
        act()
        return _without_unjudged(rewards, unjudged)

    if hasattr(instance, "_calculate_rewards"):
        calculate = instance._calculate_rewards
        changed = shadowed(
            instance,
            "_calculate_rewards",
            lambda *args, **kwargs: rewards_of_the_judged(calculate(*args, **kwargs)),
        )
    else:
        # Up to 0.18 the rewards are computed in the method itself. It multiplies them by their weights.
        changed = shadowed(instance, "reward_weights", _Weights(instance.reward_weights, rewards_of_the_judged))
    with changed:
        output = wrapped(*args, **kwargs)
    if type(output["advantages"]) is torch.Tensor:
        return output
    with torch._C.DisableTorchFunctionSubclass():
        return {**output, "advantages": output["advantages"].nan_to_num(0.0)}


class _Weights:
    """Weights of the reward functions, which change the rewards that are multiplied by them."""

    def __init__(self, weights: Any, change: Callable[[Any], Any]) -> None:
        self.weights, self.change = weights, change

    def to(self, device: Any) -> _Weights:
        return _Weights(self.weights.to(device), self.change)

    def unsqueeze(self, dim: int) -> _Weights:
        return _Weights(self.weights.unsqueeze(dim), self.change)

    def __rmul__(self, rewards: Any) -> Any:
        return self.change(rewards) * self.weights


def _without_unjudged(rewards: Any, unjudged: Any) -> Any:
    """Return ``rewards``, of shape ``(completions, functions)``, as a tensor whose statistics leave out NaN.

    So do those of whatever is computed from it. The sum over the functions is NaN where ``unjudged``.
    """
    import torch

    def deviation(values: Any, **dims: Any) -> Any:
        squares = (values - values.nanmean(**dims, keepdim=True)).square()
        count = (~values.isnan()).sum(**dims)
        return (squares.nanmean(**dims) * count / (count - 1)).sqrt()

    def sum_of_a_group(values: Any, **dims: Any) -> Any:
        # RLOO takes the reward itself away, and divides by one less than the completions of the group.
        others = values.nansum(**dims) - values
        divisor = (~values.isnan()).sum(**dims) - 1
        return values + others * (values.size(1) - 1) / divisor

    replaced = {
        torch.Tensor.nansum: lambda values, dim: values.nansum(dim).masked_fill(unjudged, torch.nan),
        torch.Tensor.mean: torch.nanmean,
        torch.Tensor.std: deviation,
        torch.Tensor.sum: sum_of_a_group,
        # What TRL copies are the advantages for its log.
        torch.Tensor.clone: lambda values: values.nan_to_num(0.0),
    }

    class Rewards(torch.Tensor):  # type: ignore[misc]
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return super().__torch_function__(replaced.get(function, function), types, args, kwargs)

    return rewards.as_subclass(Rewards)


def completions_are_scored_among_the_judged(module: ModuleType) -> Outcome:
    """Compare the advantages of generations, and the gradients of their losses, with the formulas."""
    name = "GRPO" if hasattr(module, "GRPOTrainer") else "RLOO"
    score = getattr(getattr(module, f"{name}Trainer"), "_generate_and_score_completions", None)
    if score is None:
        return absent("this release takes no None, or scores completions in no method of its own")
    if "unscorable_mask" in inspect.unwrap(score).__code__.co_varnames:
        return absent("this release leaves out what no function judges")
    cases = _grpo_cases if name == "GRPO" else _rloo_cases
    try:
        outcomes = [case.outcome() for case in cases(_Release(module))]
    except TypeError as error:
        if "not subscriptable" not in str(error):
            raise
        return absent("the warning about a completion without a reward crashes")
    if len({outcome.verdict for outcome in outcomes}) != 1:
        raise AssertionError(f"the generations are not of one kind: {outcomes}")
    return outcomes[0]


_Values = Sequence[float | None]
_Rows = Sequence[tuple[float | None, float | None]]
"""What the two reward functions return for each completion."""

_WEIGHTS = (1.0, 0.5)
_GROUP = 4
_UNJUDGED = (None, None)

_COMPLETE: _Rows = ((1, 3), (4, 2), (2, 2), (0, 5), (5, 1), (0, 2), (9, 4), (3, 3))
_GENERATIONS: tuple[_Rows, ...] = (
    ((1, None), _UNJUDGED, (2, None), (None, 3), _UNJUDGED, (5, 1), _UNJUDGED, (0, 2)),
    ((7, 1), (None, 2), (2, 6), _UNJUDGED, (4, 8), (3, None), (1, 1), (6, 2)),
    (*[_UNJUDGED] * 5, (3, 1), *[_UNJUDGED] * 2),
)
"""Two groups each. In the first generation one function judges only one completion of a group."""

_COMPLETIONS = (
    (5, 7, 13, 1),
    (10, 3, 4, 1),
    (8, 9, 6, 1),
    (3, 11, 4, 1),
    (9, 8, 12, 1),
    (6, 3, 5, 1),
    (3, 4, 7, 1),
    (13, 10, 9, 1),
)
"""Without 2, which ends a sequence by the configuration of the model.

They are equally long, so that a mean over tokens is one over sequences, to which another patch changes the loss.
"""
_CLIPPED = (0.5, 4.0)


class _Release:
    """The module, and the two models of all its trainers."""

    def __init__(self, module: ModuleType) -> None:
        import torch

        self.module = module
        self.policy, self.reference = tiny_attention_model(), tiny_attention_model()
        with torch.no_grad():
            self.reference.lm_head.weight.add_(torch.cos(torch.arange(128.0, device="cpu")).reshape(16, 8))


class _Case:
    """Two groups of completions with these rewards. ``formula`` makes advantages of the rewards of one kind."""

    def __init__(
        self,
        release: _Release,
        rows: _Rows,
        formula: Callable[[_Case, _Values], _Values],
        *,
        training: bool = True,
        **settings: Any,
    ) -> None:
        import torch

        self.rows, self.formula, self.settings = rows, formula, settings
        self.by_token = hasattr(release.module, "GRPOTrainer")
        of_the_groups = {"num_generations": _GROUP, "num_generations_eval": _GROUP, "temperature": 1.0}
        of_the_loss = {"beta": 0.0, "loss_type": "bnpo"}
        self.trainer = stub_that_scores(
            release.module,
            _COMPLETIONS,
            [0.0] * len(rows),
            model=release.policy,
            reference=release.reference,
            training=training,
            **{**of_the_groups, **of_the_loss, **settings},
        )

        def first(**kwargs: Any) -> list[float | None]:
            return [reward for reward, _ in rows]

        def second(**kwargs: Any) -> list[float | None]:
            return [reward for _, reward in rows]

        vars(self.trainer).update(
            reward_funcs=[first, second],
            reward_func_names=["first", "second"],
            reward_processing_classes=[None, None],
            reward_weights=torch.tensor(_WEIGHTS, device="cpu"),
            epsilon_low=0.2,
            epsilon_high=0.2,
            current_gradient_accumulation_steps=1,
            use_liger_loss=False,
            aux_loss_enabled=False,
            _entropy_bonus_enabled=False,
        )

    def advantages(self, of_unjudged: float | None) -> list[float]:
        """Return the advantages by the formula, with this reward of what is not judged."""
        totals = [
            sum(weight * reward for weight, reward in zip(_WEIGHTS, row, strict=True) if reward is not None)
            if row != _UNJUDGED
            else of_unjudged
            for row in self.rows
        ]
        return [advantage or 0.0 for advantage in self.formula(self, totals)]

    def scored(self) -> dict[str, Any]:
        """Return the batch that the trainer makes of the generation, whose advantages are those of its log."""
        import torch

        names = {"reward_weights", "_calculate_rewards"}
        before = {name: value for name, value in vars(self.trainer).items() if name in names}
        output = scored_completions(self.trainer)
        changed = {name: value for name, value in vars(self.trainer).items() if name in names} != before
        logged = [*self.trainer._logs["advantages"], *output["advantages"].tolist()][: len(self.rows)]
        if changed or type(output["advantages"]) is not torch.Tensor or logged != output["advantages"].tolist():
            raise AssertionError(f"the trainer is left with other rewards, or logs {logged}, and returns {output}")
        return output

    def outcome(self) -> Outcome:
        """Judge the advantages and the gradients. The loss itself may be 0, since the advantages of a group are."""
        import torch

        output = self.scored()
        right, wrong = (torch.tensor(self.advantages(reward), device="cpu") for reward in (None, 0.0))
        compute_loss = getattr(self.trainer, "_compute_loss", self.trainer.compute_loss)
        measured = compute_loss(self.trainer.model, output)
        losses = [measured, self.loss(right), self.loss(wrong)]
        if not any(torch.allclose(output["advantages"], kind, rtol=1e-5, atol=1e-6) for kind in (right, wrong)):
            raise AssertionError(f"the advantages {output['advantages']} are neither {right} nor {wrong}")
        # A term whose value tells the advantages apart. The gradients of RLOO are large next to the tolerance.
        shift = torch.cos(torch.arange(float(len(right)), device="cpu"))
        shifts = [(shift * kind).sum() for kind in (output["advantages"], right, wrong)]
        shifted = tuple((loss + shift) / 10 for loss, shift in zip(losses, shifts, strict=True))
        return judge_with_gradients(list(self.trainer.model.parameters()), [shifted])

    def loss(self, advantages: Any) -> Any:
        """Return the loss of completions with these advantages: a mean over tokens, or for RLOO over completions."""
        import torch

        ratios = [
            (row - row.detach() if self.by_token else (row.sum() - row.sum().detach())[None]).exp()
            for row in self.log_probs(self.trainer.model)
        ]
        gains = [advantage * ratio for advantage, ratio in zip(advantages, ratios, strict=True)]
        return -torch.cat(gains).mean()

    def log_probs(self, model: Any) -> list[Any]:
        """Return the log-probs of each completion. What pads it comes after it, and so changes nothing."""
        import torch

        prompt, longest = self.trainer.processing_class.prompt_ids, max(map(len, _COMPLETIONS))
        padded = [[*prompt, *completion, *[0] * (longest - len(completion))] for completion in _COMPLETIONS]
        ids = torch.tensor(padded, device="cpu")
        log_probs = model(input_ids=ids).logits[:, 1:-1].log_softmax(-1).gather(2, ids[:, 2:, None])[..., 0]
        return [row[: len(completion)] for row, completion in zip(log_probs, _COMPLETIONS, strict=True)]


def _grpo_cases(release: _Release) -> list[_Case]:
    fields = release.module.GRPOConfig.__dataclass_fields__
    first, *others = _GENERATIONS
    asked: tuple[Any, ...] = (True, False) if fields["scale_rewards"].default is True else ("group", "batch", "none")
    cases = []
    for scale in asked:
        formula = _scaled_as(release, scale)
        cases.append(_Case(release, first, formula, scale_rewards=scale))
        cases.append(_Case(release, others[0], formula, scale_rewards=scale, training=False))
    formula = _scaled_as(release, asked[0])
    cases += [_Case(release, rows, formula, scale_rewards=asked[0]) for rows in others]
    if "multi_objective_aggregation" in fields:
        for rows in _GENERATIONS[:2]:
            cases.append(
                _Case(release, rows, _normalised_by_function, multi_objective_aggregation="normalize_then_sum")
            )
    return cases


def _scaled_as(release: _Release, asked: Any) -> Callable[[_Case, _Values], _Values]:
    """Return how this release scales complete rewards. 0.22.0 and 0.22.1 scale as they should not (TRL 3992)."""
    formulas = (_scaled_by_group, _scaled_by_batch, _not_scaled)
    for formula in formulas:
        case = _Case(release, _COMPLETE, formula, scale_rewards=asked)
        measured, expected = case.scored()["advantages"].tolist(), case.advantages(None)
        if max(abs(one - other) for one, other in zip(measured, expected, strict=True)) < 1e-5:
            return formula
    raise AssertionError(f"this release scales complete rewards in a way of its own: {asked}")


def _rloo_cases(release: _Release) -> list[_Case]:
    cases = [_Case(release, rows, _left_one_out) for rows in (_COMPLETE, *_GENERATIONS)][1:]
    settings = ({"normalize_advantages": True}, {"beta": 0.5}, {"reward_clip_range": _CLIPPED})
    for setting in settings:
        cases.append(_Case(release, _GENERATIONS[0], _left_one_out, **setting))
        cases.append(_Case(release, _GENERATIONS[1], _left_one_out, training=False, **setting))
    return cases


def _mean(values: _Values) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else 0.0


def _deviation(values: _Values) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.stdev(known) if len(known) > 1 else None


def _normalised(values: _Values, deviation: float | None) -> _Values:
    mean = _mean(values)
    return [None if value is None or deviation is None else (value - mean) / (deviation + 1e-4) for value in values]


def _groups(values: Sequence[Any]) -> list[Sequence[Any]]:
    return [values[start : start + _GROUP] for start in range(0, len(values), _GROUP)]


def _scaled_by_group(case: _Case, rewards: _Values) -> _Values:
    return [value for group in _groups(rewards) for value in _normalised(group, _deviation(group))]


def _scaled_by_batch(case: _Case, rewards: _Values) -> _Values:
    return [value for group in _groups(rewards) for value in _normalised(group, _deviation(rewards))]


def _not_scaled(case: _Case, rewards: _Values) -> _Values:
    return [value for group in _groups(rewards) for value in _normalised(group, 1.0 - 1e-4)]


def _normalised_by_function(case: _Case, rewards: _Values) -> _Values:
    """Normalise what each function returns by group, and the sum by batch. ``rewards`` say what counts."""
    totals: list[float | None] = []
    for rows in _groups(case.rows):
        columns = [_normalised(column, _deviation(column)) for column in zip(*rows, strict=True)]
        for parts in zip(*columns, strict=True):
            totals.append(sum(weight * (part or 0.0) for weight, part in zip(_WEIGHTS, parts, strict=True)))
    totals = [None if reward is None else total for reward, total in zip(rewards, totals, strict=True)]
    return _normalised(totals, _deviation(totals))


def _left_one_out(case: _Case, rewards: _Values) -> _Values:
    """Return each reward, clipped and without the penalty for its divergence, less the mean of the group's others."""
    low, high = case.settings.get("reward_clip_range", (-math.inf, math.inf))
    beta = case.settings.get("beta", 0.0)
    log_probs = [case.log_probs(model) for model in (case.trainer.model, case.trainer.ref_model)]
    penalties = [beta * float((policy - reference).sum()) for policy, reference in zip(*log_probs, strict=True)]
    rewards = [
        None if reward is None else min(max(reward, low), high) - penalty
        for reward, penalty in zip(rewards, penalties, strict=True)
    ]
    advantages: list[float | None] = []
    for group in _groups(rewards):
        for place, reward in enumerate(group):
            others = [other for other in (*group[:place], *group[place + 1 :]) if other is not None]
            advantages.append(None if reward is None or not others else reward - _mean(others))
    return _normalised(advantages, _deviation(advantages)) if case.settings.get("normalize_advantages") else advantages
