"""BEMACallback keeps its averages in lists and in a second model, and no checkpoint has them.

``on_train_begin`` takes the weights that the model has then for theta 0, the average and the averaged model. In a
resumed run these are the weights of the checkpoint.

transformers tells callbacks when it has saved, by ``on_save``. TRL's class has no such method, and the one that it
inherits is not TRL's. So ``on_train_begin`` gives it to the callback itself, which transformers asks for it.
"""

from __future__ import annotations

import logging
import tempfile
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, judge, keep_beside_checkpoint, kept_beside_checkpoint, wrapper
from ...model import Outcome
from ...testing import recorded_warnings

_FILE = "trl_hotfix_bema.safetensors"

_log = logging.getLogger("trl_hotfix")


@wrapper
def go_on_with_the_averages_of_the_checkpoint(call: Call) -> None:
    """Take theta 0, the average and the averaged model from the checkpoint, and have them saved with the next ones."""
    call()
    callback, state = call.trainer, call["state"]
    callback.on_save = partial(_save, callback)
    if not getattr(state, "global_step", 0):
        return
    kept = kept_beside_checkpoint(call["args"], state, _FILE, call["model"])
    tensors = _tensors(callback)
    if kept is None or kept.keys() != tensors.keys():
        _log.warning(
            "bema-state-lost-on-resume: no averages of BEMACallback are found that belong to the checkpoint of "
            "step %s, so they begin again. If it is not in output_dir, name it as resume_from_checkpoint in the "
            "training arguments.",
            state.global_step,
        )
        return
    call.act()
    for name, tensor in tensors.items():
        tensor.data.copy_(kept[name])


def _save(callback: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
    """Keep the averages in the checkpoint that has been saved, and call the method of the callback's class."""
    keep_beside_checkpoint(args, state, _FILE, kwargs["model"], _tensors(callback))
    return type(callback).on_save(callback, args, state, control, **kwargs)


def _tensors(callback: Any) -> dict[str, Any]:
    """Return all parameters as averaged, and those that are trained as they were at the beginning and on average."""
    tensors = {f"averaged.{name}": parameter for name, parameter in callback.running_model.named_parameters()}
    for kind, parameters in (("initial", callback.theta0_params), ("average", callback.ema_params)):
        for name, parameter in zip(callback.param_names, parameters, strict=True):
            # A second training appends the same names again, and up to 0.24.0 TRL goes on with the first ones.
            tensors.setdefault(f"{kind}.{name}", parameter)
    return tensors


def averages_go_on_in_a_resumed_run(module: ModuleType) -> Outcome:
    """Read the averaged weight in a run that is resumed from step 1: 1, that of step 0, and 2 if it begins again."""
    import torch

    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, config: Any = None) -> None:
            super().__init__()
            self.config, self.weight = config, torch.nn.Parameter(torch.ones(1, device="cpu"))

    model, whole, resumed = Model(), module.BEMACallback(), module.BEMACallback()
    begin, stop = (SimpleNamespace(global_step=step) for step in (0, 1))
    with tempfile.TemporaryDirectory() as folder, recorded_warnings():
        args = SimpleNamespace(output_dir=folder, should_save=True)
        whole.on_train_begin(args, begin, None, model=model)
        model.weight.data.fill_(2.0)
        Path(folder, "checkpoint-1").mkdir()
        whole.on_save(args, stop, None, model=model)
        resumed.on_train_begin(args, stop, None, model=model)
    return judge(float(resumed.running_model.weight), right=1.0, wrong=2.0)
