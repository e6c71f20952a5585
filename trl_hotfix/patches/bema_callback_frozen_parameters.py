"""BEMACallback pairs the trained parameters with all parameters of the averaged model.

``on_train_begin`` keeps the names of the trained parameters, in order. ``_update_bema_weights`` pairs these parameters
with ``self.running_model.parameters()``, so the first frozen parameter shifts all pairs after it. From 0.25.0 on the
pairs are made with ``strict=True``. TRL's pull request 7043 describes the bug.

For the call, ``running_model`` is an object whose ``parameters()`` are those of the real one, looked up by the kept
names. The frozen parameters need no update, since ``on_train_begin`` has copied the whole model.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from ..authoring import judge, shadowed
from ..model import Outcome


def pair_parameters_by_name(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Let ``parameters()`` of the averaged model return the trained ones, in the order in which they were kept."""
    parameters = dict(instance.running_model.named_parameters())
    if not set(instance.param_names) < set(parameters):
        return wrapped(*args, **kwargs)
    trained = [parameters[name] for name in instance.param_names]
    with shadowed(instance, "running_model", SimpleNamespace(parameters=lambda: trained)):
        return wrapped(*args, **kwargs)


def averages_are_in_their_own_parameters(module: ModuleType) -> Outcome:
    """Check where the average of a trained weight is written, beside a frozen weight of the same shape.

    The frozen weight is 7; the trained one goes from 1 to 2.

    BEMA (arXiv:2508.00180): ``ema = (1 - beta) * 1 + beta * 2`` and the averaged weight is ``ema + alpha * (2 - 1)``,
    with ``beta = lag_t ** -0.5``, ``alpha = lag_t ** -0.2`` and ``lag_t = 10 + 1``.
    """
    import torch

    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.config = config
            self.frozen = torch.nn.Parameter(torch.full((2,), 7.0), requires_grad=False)
            self.trained = torch.nn.Parameter(torch.ones(2))

    model, error = Model(None), None
    callback = module.BEMACallback(update_freq=1)
    callback.on_train_begin(None, None, None, model=model)
    with torch.no_grad():
        model.trained.fill_(2.0)
    try:
        callback.on_step_end(None, SimpleNamespace(global_step=1), None, model=model)
    # zip(strict=True) raises after the pairs have been written.
    except ValueError as failure:
        error = str(failure)
    frozen, trained = (float(parameter[0].detach()) for parameter in callback.running_model.parameters())
    right = 1 + 11**-0.5 + 11**-0.2
    if abs(frozen - (7.0 if trained != 1.0 else right)) > 1e-5:
        raise AssertionError(f"the frozen weight is {frozen} and the trained one {trained}")
    return judge(trained, right=right, wrong=1.0, frozen=frozen, error=error)
