"""A resumed run leaves the tensors unrestored whose names differ between the checkpoint and the model.

``save_pretrained`` writes a checkpoint in the form that a model had on the Hub: without fused experts, and with the
older names of vision-language models. ``from_pretrained`` converts it. ``Trainer._load_from_checkpoint`` and
``_load_best_model`` hand it to ``load_state_dict(strict=False)`` as it is, so what has another name keeps the weights
that the model was made with. transformers 4.52 begins so with the names of vision-language models, and 5.0 with experts
(issues 40187, 43701, 48805; pull request 48822 is open). A WARNING names the keys, beside those of tied weights.

Both methods call ``_issue_warnings_after_load`` with the names. If a name is missing and another one is left over, the
wrapper has the class of the model load the checkpoint, and takes the missing tensors from there.
"""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, judge, shadowed, wrapper
from ...model import Outcome
from ...testing import class_with_steps, default_arguments, stub_trainer


@wrapper
def restore_what_is_missing(call: Call) -> Any:
    """Load the checkpoint that a run is resumed from."""
    return _load(call, call["resume_from_checkpoint"])


@wrapper
def restore_the_best(call: Call) -> Any:
    """Load the best checkpoint at the end of a training."""
    return _load(call, call.trainer.state.best_model_checkpoint)


def _load(call: Call, folder: str) -> Any:
    """Load a checkpoint as before, and what is missing then."""
    trainer, say = call.trainer, call.trainer._issue_warnings_after_load
    act = call.act_later()

    def restore_and_say(loaded: Any) -> None:
        restored: set[str] = set()
        if loaded.missing_keys and loaded.unexpected_keys and hasattr(trainer.model, "from_pretrained"):
            restored = _restore(trainer.model, folder, loaded.missing_keys)
        if restored:
            act()
            missing = [name for name in loaded.missing_keys if name not in restored]
            loaded = SimpleNamespace(missing_keys=missing, unexpected_keys=[])
        say(loaded)

    with shadowed(trainer, "_issue_warnings_after_load", restore_and_say):
        return call()


def _restore(model: Any, folder: str, missing: Any) -> set[str]:
    """Take the missing tensors from a model that transformers loads from the checkpoint, and return their names."""
    converted, report = type(model).from_pretrained(folder, config=model.config, output_loading_info=True)
    found = {name: value for name, value in converted.state_dict().items() if name in missing}
    for name in report["missing_keys"]:
        found.pop(name, None)
    model.load_state_dict(found, strict=False)
    return set(found)


def resumed_run_has_the_saved_weights(module: ModuleType) -> Outcome:
    """Resume a model whose weight is 1 from a checkpoint that has 2, by the name that Mixtral has on the Hub."""
    import torch
    from safetensors.torch import save_file
    from transformers import PretrainedConfig, PreTrainedModel, TrainingArguments

    trainer_class = class_with_steps(module)
    if trainer_class is None or any(base.__module__.startswith("trl.") for base in trainer_class.__mro__[1:]):
        return absent("this module has no trainer, one with a loop of its own, or one with a base in TRL")
    is_renamed = hasattr(PreTrainedModel, "_checkpoint_conversion_mapping")
    if not is_renamed and importlib.util.find_spec("transformers.core_model_loading") is None:
        return absent("this transformers saves each tensor by its own name")

    class Config(PretrainedConfig):  # type: ignore[misc]
        model_type = "mixtral"

    class Model(PreTrainedModel):  # type: ignore[misc]
        config_class = Config

        def __init__(self, config: Any, weight: float = 1.0) -> None:
            super().__init__(config)
            self.mlp = torch.nn.Linear(1, 1, bias=False)
            torch.nn.init.constant_(self.mlp.weight, weight)

        @classmethod
        def from_pretrained(cls, *args: Any, config: Any, **kwargs: Any) -> Any:
            # What transformers converts is the proof's: here it would write a progress bar.
            return cls(config, 2.0), {"missing_keys": set()}

    model = Model(Config())
    trainer = stub_trainer(
        trainer_class,
        default_arguments(TrainingArguments, save_safetensors=True),
        model=model,
        is_fsdp_enabled=False,
        _issue_warnings_after_load=lambda loaded: None,
    )
    with tempfile.TemporaryDirectory() as folder:
        save_file({"block_sparse_moe.weight": torch.full((1, 1), 2.0)}, Path(folder, "model.safetensors"))
        trainer._load_from_checkpoint(folder)
    return judge(float(model.mlp.weight.detach()), right=2.0, wrong=1.0)
