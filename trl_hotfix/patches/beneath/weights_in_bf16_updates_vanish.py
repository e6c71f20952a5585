"""A model that was loaded by transformers 5 from a checkpoint in bfloat16 is trained in bfloat16.

Up to transformers 4 ``from_pretrained`` loads weights in float32 unless it is given a dtype; from 5.0 on it takes the
dtype of the checkpoint. TRL still loads a model that it is given by name in float32. The optimizer of torch has no copy
of the weights, and ``bf16=True`` casts activations only.

``create_optimizer`` comes before the first batch in each trainer that has transformers' loop. A resumed run has loaded
its checkpoint by then, so for the option the weights are cast before that: float32 in the checkpoint stays float32.
"""

from __future__ import annotations

import logging
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, Once, absent, judge, wrapper
from ...model import Options, Outcome
from ...testing import recorded_warnings, stub_trainer

_log = logging.getLogger("trl_hotfix")
_is_first_warning = Once()


@wrapper
def warn_or_train_in_float32(call: Call, options: Options) -> Any:
    """Warn of weights that are trained in bfloat16, once for each trainer, or cast them."""
    trainer = call.trainer
    in_bf16, all_trained = _trained(trainer)
    if options["weights"] == "float32":
        _cast(call, in_bf16)
    elif in_bf16 and _is_first_warning(trainer):
        call.act()
        if trainer.accelerator.is_main_process:
            _log.warning(
                "%s: %d of %d parameter tensors that are trained are in bfloat16, and an update of less than a 512th "
                "of a weight rounds to nothing, also with bf16=True. transformers 5 loads a checkpoint in its own "
                "dtype: load the model with dtype=torch.float32, or set "
                "TRL_HOTFIX_OPTIONS=weights-in-bf16-updates-vanish.weights=float32",
                type(trainer).__name__,
                len(in_bf16),
                all_trained,
            )
    return call()


@wrapper
def load_in_float32(call: Call, options: Options) -> Any:
    """Cast the weights before a checkpoint is loaded into them, if the option says so."""
    if options["weights"] == "float32":
        _cast(call, _trained(call.trainer)[0])
    return call()


def _trained(trainer: Any) -> tuple[list[Any], int]:
    """Return the trained tensors in bfloat16, and the number of all trained ones. Engines have a copy in float32."""
    import torch

    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        return [], 0
    trained = [tensor for tensor in trainer.model.parameters() if tensor.requires_grad]
    return [tensor for tensor in trained if tensor.dtype is torch.bfloat16], len(trained)


def _cast(call: Call, in_bf16: list[Any]) -> None:
    """Cast the model and its reference to float32, or the adapter of a model that has one."""
    if not in_bf16:
        return
    call.act()
    model, reference = call.trainer.model, getattr(call.trainer, "ref_model", None)
    if hasattr(model, "peft_config"):
        for tensor in in_bf16:
            tensor.data = tensor.data.float()
        return
    model.float()
    if reference is not None:
        reference.float()


def weights_in_bf16_are_reported(module: ModuleType, options: Options) -> Outcome:
    """Begin to train weights in bfloat16: they are reported, or cast to float32."""
    import torch
    import transformers

    if transformers.__version__.startswith("4."):
        return absent("transformers 4 loads weights in float32, unless somebody chooses bfloat16")
    trainer_class = getattr(module, "_BaseTrainer", None) or module.BaseTrainer
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    switches = dict.fromkeys(("is_deepspeed_enabled", "is_fsdp_enabled"), False)
    trainer = stub_trainer(trainer_class, SimpleNamespace(), model=model, optimizer="made by the user", **switches)
    with recorded_warnings() as lines:
        trainer.create_optimizer()
    if options["weights"] == "float32":
        return judge(torch.finfo(model.weight.dtype).bits, right=32, wrong=16)
    return judge(sum("bfloat16" in line for line in lines), right=1, wrong=0)
