"""BEMACallback pairs the trained parameters with all parameters of the averaged model.

``on_train_begin`` keeps the names of the trained parameters, in order. ``_update_bema_weights`` pairs these parameters
with ``self.running_model.parameters()``, so the first frozen parameter shifts all pairs after it. From 0.25.0 on the
pairs are made with ``strict=True``. TRL's pull request 7043 describes the bug.

For the call, ``running_model`` is an object whose ``parameters()`` are those of the real one, looked up by the kept
names. The frozen parameters need no update, since ``on_train_begin`` has copied the whole model.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, judge, shadowed, wrapper
from ...model import Outcome, Verdict


@wrapper
def pair_parameters_by_name(call: Call) -> None:
    """Let ``parameters()`` of the averaged model return the trained ones, in the order in which they were kept."""
    callback = call.trainer
    parameters = dict(callback.running_model.named_parameters())
    if not set(callback.param_names) < set(parameters):
        call()
        return
    trained = [parameters[name] for name in callback.param_names]
    with shadowed(callback, "running_model", SimpleNamespace(parameters=lambda: trained)):
        call()


def averages_are_in_their_own_parameters(module: ModuleType) -> Outcome:
    """Check where the averages of two trained weights are written, with a frozen weight between them, in three steps.

    In an unpatched release the average of the second trained weight is written into the frozen one. If all weights are
    trained, or are named otherwise than those of the averaged model, TRL's own method has to be given its own model.
    """
    for renamed in (False, True):
        callback, trajectories, errors = _three_updates(module, frozen=False, renamed=renamed)
        averages = dict(callback.running_model.named_parameters())
        distances = [_distance(averages[name], _averaged(values)) for name, values in trajectories.items()]
        if errors or max(distances) > 1e-5 or callback.running_model.asked != 3:
            raise AssertionError(
                f"nothing is frozen: {errors}, the averages are off by {distances}, and the averaged model was asked "
                f"for its parameters {callback.running_model.asked} times"
            )
    callback, trajectories, errors = _three_updates(module, frozen=True)
    averages = dict(callback.running_model.named_parameters())
    right = {name: _averaged(values) for name, values in trajectories.items()}
    measured = float(averages["after"][1])
    error = errors[0] if errors else None
    outcome = judge(measured, right=float(right["after"][1]), wrong=float(trajectories["after"][0][1]), error=error)
    if outcome.verdict is Verdict.REPRODUCED:
        right |= {"frozen": right["after"], "after": trajectories["after"][0]}
    distances = [_distance(averages[name], right[name]) for name in right]
    if max(distances) > 1e-5 or (errors and outcome.verdict is Verdict.FIXED):
        raise AssertionError(f"{error}; the averages of {list(right)} are off by {distances}")
    return outcome


def _three_updates(
    module: ModuleType, *, frozen: bool, renamed: bool = False
) -> tuple[Any, dict[str, list[Any]], list[str]]:
    """Return a callback after three updates, each weight before and after each step, and the errors of the updates.

    The order of the weights is not that of their names. The frozen one, if it is frozen, stays as it is.
    """
    import torch

    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.config = config
            self.asked = 0
            self.before, self.frozen, self.after = (
                torch.nn.Parameter(torch.tensor([start, start + 0.5], dtype=torch.float32, device="cpu"))
                for start in (1.0, 7.0, 3.0)
            )

        def parameters(self, recurse: bool = True) -> Any:
            self.asked += 1
            return super().parameters(recurse)

    model = Model(None)
    model.frozen.requires_grad_(not frozen)
    callback = module.BEMACallback(update_freq=1)
    callback.on_train_begin(None, None, None, model=model)
    if renamed:
        callback.param_names = [f"module.{name}" for name in callback.param_names]
    weights = dict(model.named_parameters())
    trajectories, errors = {name: [weight.detach().clone()] for name, weight in weights.items()}, []
    for step in (1, 2, 3):
        for number, (name, weight) in enumerate(weights.items(), 1):
            if weight.requires_grad:
                weight.data = weight.data * (1 + 0.1 * step * number)
            trajectories[name].append(weight.detach().clone())
        try:
            callback.on_step_end(None, SimpleNamespace(global_step=step), None, model=model)
        # zip(strict=True) raises after the pairs have been written.
        except ValueError as failure:
            errors.append(str(failure))
    return callback, trajectories, errors


def _averaged(trajectory: Sequence[Any]) -> Any:
    """Return the averaged weight after the last step. The first of ``trajectory`` is the weight before training.

    BEMA (arXiv:2508.00180): ``ema = (1 - beta) * ema + beta * weight``, and the averaged weight is
    ``ema + alpha * (weight - initial)``, with ``beta = age ** -0.5``, ``alpha = age ** -0.2`` and ``age = 10 + step``.
    """
    ema = trajectory[0]
    for step, weight in enumerate(trajectory[1:], 1):
        beta = (10 + step) ** -0.5
        ema = (1 - beta) * ema + beta * weight
    return ema + (9 + len(trajectory)) ** -0.2 * (trajectory[-1] - trajectory[0])


def _distance(one: Any, other: Any) -> float:
    return float((one - other).abs().max())
