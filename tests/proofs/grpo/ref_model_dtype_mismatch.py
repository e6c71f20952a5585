"""The proof: one step of GRPOTrainer, and from 0.29.0 on of DPOTrainer, with a policy that has an attention of its own.

Rounding in bfloat16 differs between releases by more than parity allows. In the trained models, which are in float32,
the attention therefore distinguishes policy and reference: "loud" is sdpa with values fifty times as large. Whether a
reference has the dtype of its policy is checked on every trainer that loads a reference, without training it.
"""

from __future__ import annotations

import inspect
import math
import tempfile
from typing import Any

from trl_hotfix.authoring import absent, judge

import tiny

PATCH = "ref-model-dtype-mismatch"
DPO = "trl.trainer.dpo_trainer:DPOTrainer.__init__"
OVERLAYS = ()
PARITY = True
MUTANTS_ON = ("0.25.1",)
VARIANTS = {"lora": "with an adapter the reference is the model without it"}
EQUIVALENT = {"applied twice": "the second finds the dtype and the attention among the options"}


def train() -> tiny.TrainingResult:
    import torch
    from trl.trainer import grpo_trainer

    _register_loud_attention()
    with tempfile.TemporaryDirectory() as folder:
        kl, loss, gradients = _grpo(folder, "loud")
        losses = {}
        if _dpo_loads_a_reference():
            losses["dpo"], dpo_gradients = _dpo(_policy(folder, attn_implementation="loud"))
            gradients |= dpo_gradients
        names = _trainers_loading_a_reference()
        dtypes = [_trainer(folder, name, torch.bfloat16).ref_model.dtype for name in names]
    if getattr(grpo_trainer, "create_reference_model", None) is not None and kl < 1e-6:
        return tiny.TrainingResult(absent("the reference is a copy of the policy"), loss, gradients)
    right = kl < 1e-6
    if {dtype is torch.bfloat16 for dtype in dtypes} != {right}:
        raise AssertionError(f"the kl is {kl}, and the references of policies in bfloat16 are in {dtypes}")
    if any((abs(dpo_loss - math.log(2)) < 1e-5) != right for dpo_loss in losses.values()):
        raise AssertionError(f"the kl is {kl}, and the losses are {losses}")
    dtype_names = dict(zip(names, map(str, dtypes), strict=True))
    outcome = judge(float(not right), right=0.0, wrong=1.0, kl=kl, dtypes=dtype_names, **losses)
    return tiny.TrainingResult(outcome, loss, gradients)


def unaffected() -> tiny.TrainingResult:
    """Train a policy in float32 with sdpa, one that is given by name, and one with a reference of the user's."""
    with tempfile.TemporaryDirectory() as folder:
        _, loss, gradients = _grpo(folder, "sdpa")
        if _dpo_loads_a_reference():
            reference = _policy(folder)
            gradients |= _dpo(f"{folder}/llama-0")[1]
            # The wrapper does not say that it acts where the reference is the user's.
            trainer = _dpo_trainer(_policy(folder), ref_model=reference)
            assert tiny.acts(PATCH, DPO, trainer) in (None, 0)
    return tiny.TrainingResult(absent("the policy is as the reference is loaded anyway"), loss, gradients)


def _register_loud_attention() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def loud(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        return sdpa_attention_forward(module, query, key, 50 * value, *args, **kwargs)

    AttentionInterface.register("loud", loud)
    AttentionMaskInterface.register("loud", sdpa_mask)


def _policy(folder: str, **settings: Any) -> Any:
    from transformers import AutoModelForCausalLM

    tiny.llama(folder, seed=0)
    return AutoModelForCausalLM.from_pretrained(f"{folder}/llama-0", **settings)


def _grpo(folder: str, attention: str) -> tuple[float, float, dict[str, Any]]:
    """Return the kl, the loss and the gradients of the first step."""
    from trl import GRPOTrainer

    policy = _policy(folder, attn_implementation=attention)
    trainer = tiny.grpo_of_one_length(tiny.measured(GRPOTrainer), policy, loss_type="grpo")
    trainer.train()
    return float(trainer.state.log_history[0]["kl"]), trainer.losses[0], trainer.step.gradients


def _dpo_loads_a_reference() -> bool:
    return "DPO" in _trainers_loading_a_reference()


def _trainers_loading_a_reference() -> list[str]:
    """Return the trainers that can load a reference of their own in this release."""
    names = []
    for name in ("GRPO", "RLOO", "DPO", "KTO"):
        trainer = _classes(name)[0]
        source = inspect.getsource(inspect.unwrap(trainer.__init__)) if trainer is not None else ""
        if "self.ref_model = create_model_from_path(" in source or "self.ref_model = architecture" in source:
            names.append(name)
    return names or ["GRPO"]


def _classes(name: str) -> tuple[Any, Any]:
    """Return a trainer and its config, or None twice. KTO was experimental from 1.2.0 to 1.7.1."""
    import trl

    if name == "KTO":
        return tiny.classes(name)
    return getattr(trl, f"{name}Trainer", None), getattr(trl, f"{name}Config", None)


def _trainer(folder: str, name: str, dtype: Any) -> Any:
    """Return a trainer that has loaded its reference, with a policy of this dtype."""
    policy = _policy(folder, dtype=dtype)
    trainer_class, config_class = _classes(name)
    if name == "GRPO":
        return tiny.grpo_of_one_length(trainer_class, policy)
    if name == "RLOO":
        return tiny.grpo(trainer_class, policy, config_class, beta=1.0)
    data = tiny.preferences() if name == "DPO" else tiny.labelled()
    args = tiny.config(config_class, max_length=16, beta=0.5)
    return tiny.trainer(trainer_class, model=policy, args=args, train_dataset=data, tokenizer=tiny.tokenizer())


def _dpo(policy: Any) -> tuple[float, dict[str, Any]]:
    trainer = _dpo_trainer(policy)
    trainer.train()
    return trainer.losses[0], {f"dpo {name}": gradient for name, gradient in trainer.step.gradients.items()}


def _dpo_trainer(policy: Any, **arguments: Any) -> Any:
    from trl import DPOConfig, DPOTrainer

    return tiny.trainer(
        tiny.measured(DPOTrainer),
        model=policy,
        args=tiny.config(DPOConfig, max_length=16, beta=0.5),
        train_dataset=tiny.preferences(),
        tokenizer=tiny.tokenizer(),
        **arguments,
    )
