"""The proof: one step of SFTTrainer with a quantised model that has an adapter already, and one of GRPOTrainer.

The model is a stand-in that is only marked as quantised, so that the release prepares it as such; its weights are
floats. With gradient checkpointing the unpatched step does not fail: it trains nothing.
"""

from __future__ import annotations

import tempfile
from typing import Any

from trl_hotfix.authoring import absent, judge

import tiny

OVERLAYS = ()
PARITY = True
VARIANTS = {"full": "There is no PeftModel then."}

# In 0.20 and 0.21. Later it is a function, whose calls belong to no trainer.
ID, TARGET = "qlora-peftmodel-frozen", "trl.trainer.sft_trainer:SFTTrainer._prepare_peft_model"


def with_adapter(folder: str) -> Any:
    """Return a PeftModel as it is loaded to continue its training."""
    from peft import get_peft_model

    model = get_peft_model(tiny.quantised(tiny.llama(folder, seed=0)), tiny.lora())
    tiny.set_adapters(model)
    # Up to 0.19 SFT leaves a PeftModel as it is: its caller has to do this.
    model.enable_input_require_grads()
    return model


def sft(model: Any, **arguments: Any) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    words = " ".join(f"w{index}" for index in range(6))
    return tiny.trainer(
        tiny.measured(SFTTrainer),
        model=model,
        args=tiny.config(SFTConfig, max_length=16, gradient_checkpointing=True),
        train_dataset=Dataset.from_list([{"text": words}] * 8),
        tokenizer=tiny.tokenizer(),
        **arguments,
    )


def grpo(folder: str) -> Any:
    from trl import GRPOTrainer

    return tiny.grpo_of_one_length(
        tiny.measured(GRPOTrainer), with_adapter(folder), gradient_checkpointing=True, loss_type="grpo"
    )


def train() -> tiny.TrainingResult:
    with tempfile.TemporaryDirectory() as folder:
        sft_trainer = sft(with_adapter(folder))
        sft_trainer.train()
        gradients = {f"sft {name}": gradient for name, gradient in sft_trainer.step.gradients.items()}
        right = 8
        try:
            grpo_trainer = grpo(folder)
        except ValueError as error:
            # This is another bug of 0.22: grpo-qlora-constructor-crash.
            if "can not be both configured" not in str(error):
                raise
        else:
            grpo_trainer.train()
            gradients |= {f"grpo {name}": gradient for name, gradient in grpo_trainer.step.gradients.items()}
            right += 8
    moving = [name for name, gradient in gradients.items() if gradient.abs().max() > 1e-9]
    outcome = judge(len(moving), right=right, wrong=right - 8 if _grpo_is_right() else 0)
    return tiny.TrainingResult(outcome, sft_trainer.losses[0], gradients)


def _grpo_is_right() -> bool:
    """Up to 0.21 GRPO does not prepare the model at all."""
    from trl.trainer import grpo_trainer

    return not hasattr(grpo_trainer, "prepare_peft_model")


def unaffected() -> tiny.TrainingResult:
    """Train a new adapter on a quantised model, an adapter on a model that is not quantised, and all weights."""
    import torch
    from peft import get_peft_model

    loss, gradients = 0.0, {}
    with tempfile.TemporaryDirectory() as folder:
        not_quantised = get_peft_model(tiny.llama(folder, seed=0), tiny.lora())
        tiny.set_adapters(not_quantised)
        runs = {
            "new adapter": (tiny.quantised(tiny.llama(folder, seed=0)), {"peft_config": tiny.lora()}),
            "not quantised": (not_quantised, {}),
            "all weights": (tiny.llama(folder, seed=0), {}),
        }
        for name, (model, arguments) in runs.items():
            torch.manual_seed(0)
            trainer = sft(model, **arguments)
            trainer.train()
            assert trainer.step.gradients, name
            assert tiny.acts(ID, TARGET, trainer) in (None, 0), name
            loss += trainer.losses[0]
            gradients |= {f"{name} {key}": value for key, value in trainer.step.gradients.items()}
    return tiny.TrainingResult(absent("whom it does not hit"), loss, gradients)
