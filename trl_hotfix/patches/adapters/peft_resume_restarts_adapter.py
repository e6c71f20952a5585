"""A resumed run on a ``PeftModel`` trains its adapter from the beginning.

The trainers give a model with a trained adapter a second one, "ref". PEFT saves the adapter "default" in the folder of
a checkpoint, and any other in a folder within it. Where there is such a folder, ``Trainer._load_from_checkpoint`` of
transformers loads the adapters in these folders and not the one beside them. Step, optimizer and scheduler go on.
transformers 5.23.0 loads both.

The method is not TRL's, so the trainer is given one of its own that calls it, after the constructor: what datasets hash
there is not changed. The weights are copied into the parameters. ``load_adapter`` would make those of bfloat16 float32.
"""

from __future__ import annotations

import functools
import inspect
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, judge, wrapper
from ...model import Outcome
from ...testing import base_for_adapters, begin_trainer, single_process


@wrapper
def load_the_trained_adapter(call: Call) -> None:
    """Make the trainer. If its model has an adapter "ref", a resumed run loads the adapter "default" too."""
    trainer = call.trainer
    call()
    if "ref" in getattr(trainer.model, "peft_config", ()):
        load = trainer._load_from_checkpoint
        trainer._load_from_checkpoint = functools.partial(_load, trainer, load, call.act_later())


def _load(
    trainer: Any, load: Callable[..., None], act: Callable[[], None], resume_from_checkpoint: Any, model: Any = None
) -> None:
    """Load a checkpoint as before, and the adapter "default" if it is trained and was passed over.

    Where a ``model`` is given, it is one of FSDP or SageMaker, which load what they have saved themselves.
    """
    load(resume_from_checkpoint, *(() if model is None else (model,)))
    folder = Path(resume_from_checkpoint)
    passed_over = any(folder.glob("*/adapter_model.*")) and any(folder.glob("adapter_model.*"))
    if model is None and passed_over and "default" in trainer.model.active_adapters:
        from peft import load_peft_weights, set_peft_model_state_dict

        # PEFT sets the weights of the adapter "default" unless another is named.
        set_peft_model_state_dict(trainer.model, load_peft_weights(str(folder)))
        act()


def resumed_run_has_the_trained_adapter(module: ModuleType) -> Outcome:
    """Load a checkpoint whose adapters have the weight 2 as a resumed run does, into a model whose adapter has 1."""
    import torch
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import save_file

    trainer_class = getattr(module, module.__name__.rpartition(".")[2].removesuffix("_trainer").upper() + "Trainer")
    # The constructor may be wrapped.
    if "ref" not in inspect.unwrap(trainer_class.__init__).__code__.co_consts:
        return absent("in this release this trainer makes no adapter of its own")

    def prepare(trainer: Any) -> None:
        trainer.accelerator.state = SimpleNamespace(deepspeed_plugin=None, fsdp_plugin=None)
        ignored = dict.fromkeys(("add_callback", "remove_callback"), lambda callback: None)
        trainer.callback_handler = SimpleNamespace(**ignored, callbacks=[])

    model = get_peft_model(base_for_adapters(), LoraConfig(r=1, target_modules=["q_proj"]))
    layer = "base_model.model.self_attn.q_proj"
    weight = model.get_parameter(f"{layer}.lora_A.default.weight")
    weight.data.fill_(1.0)
    saved = {f"{layer}.lora_A.weight": torch.full((1, 4), 2.0), f"{layer}.lora_B.weight": torch.zeros(4, 1)}
    with single_process(module), tempfile.TemporaryDirectory() as folder:
        trainer = begin_trainer(module, trainer_class, model, parent=prepare, gradient_checkpointing=False)
        for place in (Path(folder), Path(folder, "ref")):
            place.mkdir(exist_ok=True)
            save_file(saved, place / "adapter_model.safetensors")
        trainer._load_from_checkpoint(folder)
    return judge(float(weight.mean()), right=2.0, wrong=1.0)
