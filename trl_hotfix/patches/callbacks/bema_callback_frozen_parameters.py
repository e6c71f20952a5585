"""BEMACallback pairs the trained parameters with all parameters of the averaged model.

``on_train_begin`` keeps the names of the trained parameters, in order. ``_update_bema_weights`` pairs these parameters
with ``self.running_model.parameters()``, so the first frozen parameter shifts all pairs after it. From 0.25.0 on the
pairs are made with ``strict=True``. TRL's pull request 7043 describes the bug.

For the call, ``running_model`` is an object whose ``parameters()`` looks up those of the real one by the kept names.
The frozen parameters need no update, since ``on_train_begin`` has copied the whole model.
"""

from __future__ import annotations

from contextlib import suppress
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, judge, shadowed, wrapper
from ...model import Outcome


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
    """Update the averages of a weight behind a frozen one: without powers its average is ``2 * weight - initial``.

    With the bug it is written into the frozen weight, and that of the trained one stays 1, the initial value.
    """
    import torch

    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, config: Any = None) -> None:
            super().__init__()
            self.config = config
            self.frozen, self.trained = (torch.nn.Parameter(torch.ones(1, device="cpu")) for _ in range(2))

    model = Model()
    model.frozen.requires_grad_(False)
    callback = module.BEMACallback(update_freq=1, ema_power=0.0, bias_power=0.0)
    callback.on_train_begin(None, None, None, model=model)
    model.trained.data.fill_(2.0)
    # zip(strict=True) raises after the pairs have been written.
    with suppress(ValueError):
        callback.on_step_end(None, SimpleNamespace(global_step=1), None, model=model)
    return judge(float(callback.running_model.trained), right=3.0, wrong=1.0)
