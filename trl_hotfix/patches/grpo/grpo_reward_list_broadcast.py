"""GRPO and RLOO spread the one reward that a reward function returns over all completions.

``rewards_per_func[:, i] = torch.tensor(...)`` in ``_calculate_rewards``, up to 0.18 in the method that generates, takes
a list of one number for every number of completions. TRL 1.10.0 counts the rewards before, and raises a ``ValueError``.

The wrapper lets TRL call each reward function through a view that counts what it returns. The error is raised within
TRL's method, as that of the function itself would be, so that it ends the run and does not switch the patch off.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from ...authoring import Call, absent, absent_on, judge, shadowed, wrapper
from ...model import Outcome
from ...testing import scored_completions, single_process, stub_that_scores, tiny_causal_lm


@wrapper
def refuse_another_number_of_rewards(call: Call) -> Any:
    """Raise if a reward function does not return a reward for each completion. Reward models always do."""
    from torch import nn

    # Nothing else is changed, and a call that raises is not counted.
    call.act_later()
    # What generates and scores in one method may be a stand-in that only generates.
    functions = getattr(call.trainer, "reward_funcs", ())
    functions = [function if isinstance(function, nn.Module) else _counted(function) for function in functions]
    with shadowed(call.trainer, "reward_funcs", functions):
        return call()


def _counted(function: Any) -> Any:
    """Return a view of a reward function, asynchronous or not, that refuses another number of rewards."""
    import wrapt

    class View(wrapt.CallableObjectProxy):  # type: ignore[type-arg]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            rewards, completions = self.__wrapped__(*args, **kwargs), len(kwargs["completions"])
            if inspect.isawaitable(rewards):
                return self._awaited(rewards, completions)
            return self._checked(rewards, completions)

        async def _awaited(self, rewards: Any, completions: int) -> Any:
            return self._checked(await rewards, completions)

        def _checked(self, rewards: Any, completions: int) -> Any:
            counted = rewards
            if isinstance(rewards, Iterator):
                rewards, copy = itertools.tee(rewards)
                counted = list(copy)
            number = _number_of(counted)
            if number is not None and number != completions:
                name = getattr(self, "__name__", type(self.__wrapped__).__name__)
                raise ValueError(
                    f"the reward function {name!r} returned {number} reward{'s' * (number != 1)} for {completions} "
                    "completions; it must return one for each (trl_hotfix: grpo-reward-list-broadcast)"
                )
            return rewards

    return View(function)


def _number_of(rewards: Any) -> int | None:
    """Return how many rewards these are, or None if they are not such as TRL takes."""
    if isinstance(rewards, (int, float)) or getattr(rewards, "ndim", None) == 0:
        return 1
    if not hasattr(rewards, "__len__"):
        return None
    if len(rewards) == 1:
        (only,) = rewards
        # A tensor of shape (1, n) has been right.
        is_row = hasattr(only, "__len__") and getattr(only, "ndim", None) != 0
        return len(only) if is_row else 1
    return len(rewards)


@absent_on(ValueError, "were expected (one per prompt-completion pair)", "this release counts the rewards")
def one_reward_is_not_spread(module: ModuleType) -> Outcome:
    """Have a function return one reward for two completions, and count those that it becomes the reward of."""
    if not hasattr(module, "GRPOTrainer") and not hasattr(module.RLOOTrainer, "_calculate_rewards"):
        return absent("this release scores completions in no method of its own")
    spread: list[int] = []

    def reward(completions: Any, **kwargs: Any) -> list[float]:
        spread.append(len(completions))
        return [1.0]

    model, rows = tiny_causal_lm(vocabulary=16), [{"prompt": "a"}] * 2
    trainer = stub_that_scores(module, [[5, 1]] * 2, [0.0] * 2, model=model, reference=model, num_generations=1)
    trainer.reward_funcs = [reward]
    try:
        with single_process(module):
            if hasattr(trainer, "_calculate_rewards"):
                trainer._calculate_rewards(rows, ["a"] * 2, ["b"] * 2, [[5]] * 2)
            elif hasattr(trainer, "_get_per_token_logps"):
                scored_completions(trainer)
            else:
                trainer.compute_loss(model, rows)
    except ValueError as error:
        if "returned 1 reward for 2 completions" not in str(error):
            raise
        spread.clear()
    return judge(sum(spread), right=0, wrong=2)
