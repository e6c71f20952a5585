"""BEMACallback saves its averaged model with the generation config of a new model.

``on_train_begin`` makes the averaged model by ``type(model)(model.config)`` and loads the weights. transformers derives
its ``generation_config`` from the config then: one EOS, greedy. ``on_train_end`` saves it in the folder ``bema``.

A generation config that transformers refuses to save stays out: it would cost the averaged weights.
"""

from __future__ import annotations

import copy
import tempfile
from types import ModuleType
from typing import Any

from ...authoring import Call, judge, wrapper
from ...model import Outcome


@wrapper
def copy_the_generation_config(call: Call) -> None:
    """Give the averaged model the generation config of the trained one."""
    call()
    averaged = call.trainer.running_model
    own = getattr(call.trainer._unwrap_model(call["model"]), "generation_config", None)
    if own is not None and own != averaged.generation_config and _can_be_saved(own):
        call.act()
        averaged.generation_config = copy.deepcopy(own)


def _can_be_saved(generation_config: Any) -> bool:
    """Return whether ``save_pretrained`` takes it: transformers loads contradictory ones, and refuses to save them."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            generation_config.save_pretrained(folder)
        except ValueError:
            return False
    return True


def averaged_model_stops_where_the_trained_one_does(module: ModuleType) -> Outcome:
    """Count the EOS tokens of the averaged model: 2, those of the trained one, and 1 if it has that of the config."""
    import torch
    from transformers import GenerationConfig

    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, config: Any = None) -> None:
            super().__init__()
            self.config, self.generation_config = config, GenerationConfig(eos_token_id=[1])

    model, callback = Model(), module.BEMACallback()
    model.generation_config.eos_token_id = [1, 5]
    callback.on_train_begin(None, None, None, model=model)
    return judge(len(callback.running_model.generation_config.eos_token_id), right=2, wrong=1)
