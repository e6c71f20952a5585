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
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...authoring import Call, absent, absent_on, judge, shadowed, wrapper
from ...model import Outcome
from ...testing import scored_completions, stub_that_scores, tiny_causal_lm, trainer_and_config


@wrapper
def leave_out_what_is_not_judged(call: Call) -> Any:
    """Score the completions that have a reward among themselves, and the others with an advantage of 0."""
    import torch

    trainer, act = call.trainer, call.act_later()

    def rewards_of_the_judged(rewards: Any) -> Any:
        unjudged = rewards.isnan().all(dim=1)
        if not unjudged.any():
            return rewards
        act()
        return _without_unjudged(rewards, unjudged)

    if hasattr(trainer, "_calculate_rewards"):
        calculate = trainer._calculate_rewards
        changed = shadowed(
            trainer,
            "_calculate_rewards",
            lambda *args, **kwargs: rewards_of_the_judged(calculate(*args, **kwargs)),
        )
    else:
        # Up to 0.18 the rewards are computed in the method itself. It multiplies them by their weights.
        changed = shadowed(trainer, "reward_weights", _Weights(trainer.reward_weights, rewards_of_the_judged))
    with changed:
        output = call()
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


@absent_on(TypeError, "not subscriptable", "the warning about a completion without a reward crashes")
def completions_are_scored_among_the_judged(module: ModuleType) -> Outcome:
    """Score a group with the rewards 1, 2, 6 and None, and divide the first and last advantage by the third.

    So it makes no difference how a release scales them. Up to a factor the advantages are -2, -1, 3 and 0, and if None
    is 0 they are -5, -1, 15 and -9.
    """
    trainer_class, _ = trainer_and_config(module, "GRPO", "RLOO")
    score = getattr(trainer_class, "_generate_and_score_completions", None)
    if score is None:
        return absent("this release takes no None, or scores completions in no method of its own")
    if "unscorable_mask" in inspect.unwrap(score).__code__.co_varnames:
        return absent("this release leaves out what no function judges")
    model = tiny_causal_lm(vocabulary=16)
    trainer = stub_that_scores(module, [[5, 1]] * 4, [1.0, 2.0, 6.0, None], model=model, reference=model, beta=0.0)
    first, _, third, last = scored_completions(trainer)["advantages"].tolist()
    return judge((first + last) / third, right=(-2 + 0) / 3, wrong=(-5 - 9) / 15)
