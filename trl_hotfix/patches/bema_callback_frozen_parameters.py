"""BEMACallback writes its averages into the wrong tensors, or fails, as soon as one parameter is frozen.

``on_train_begin`` keeps the parameters that are trained, by name and in order. ``_update_bema_weights`` pairs them with
``self.running_model.parameters()``, which are all of them. The first frozen parameter shifts the pairs: the average of
one weight is written into another. If the shapes differ that is ``RuntimeError: The size of tensor a (...) must match
the size of tensor b (...)``; if they fit, up to 0.24.0 nothing is raised and the averaged model that is saved is wrong,
and from 0.25.0 on, where the pairs are made with ``strict=True``, ``ValueError: zip() argument 4 is longer than
arguments 1-3``. TRL's pull request 7043 describes it.

Here ``running_model`` is, for the call, something whose ``parameters()`` are those of the real one by the names that
were kept. The frozen ones are right already: ``on_train_begin`` has copied the whole model. With nothing frozen, and
where the copy has other names, the call is left as it is.
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
    """Let ``parameters()`` of the averaged model be the trained ones, in the order in which they were kept."""
    every = dict(instance.running_model.named_parameters())
    if not set(instance.param_names) < set(every):
        return wrapped(*args, **kwargs)
    kept = [every[name] for name in instance.param_names]
    with shadowed(instance, "running_model", SimpleNamespace(parameters=lambda: kept)):
        return wrapped(*args, **kwargs)


def averages_are_in_their_own_parameters(module: ModuleType) -> Outcome:
    """A frozen weight of 7 and a trained one that goes from 1 to 2, of one shape: where is the average of the second?

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
    # The pairs are written before zip(strict=True) finds one too many.
    except ValueError as failure:
        error = str(failure)
    frozen, trained = (float(each[0].detach()) for each in callback.running_model.parameters())
    right = 1 + 11**-0.5 + 11**-0.2
    if abs(frozen - (7.0 if trained != 1.0 else right)) > 1e-5:
        raise AssertionError(f"the frozen weight is {frozen} and the trained one {trained}")
    return judge(trained, right=right, wrong=1.0, frozen=frozen, error=error)
