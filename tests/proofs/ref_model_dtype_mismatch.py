"""The proof: one step of GRPOTrainer, and from 0.29.0 on of DPOTrainer, with a policy that has an attention of its own.

Rounding in bfloat16 differs between releases by more than what parity allows. The attention is therefore what tells
policy and reference apart in what is trained, in float32: "loud" is sdpa with values of fifty times the size. That a
reference has the dtype of its policy is seen on trainers that are made and not trained, all that load a reference.
"""

from __future__ import annotations

import math
import tempfile
from typing import Any

from trl_hotfix.authoring import absent, judge

import tiny

OVERLAYS = ()
PARITY = True
VARIANTS = {"lora": "with an adapter the reference is the model without it"}


def train() -> tiny.TrainingResult:
    import torch
    import trl.trainer.grpo_trainer as leaf

    _have_an_attention()
    with tempfile.TemporaryDirectory() as folder:
        kl, loss, gradients = _grpo(folder, "loud")
        losses = {}
        if _dpo_loads():
            losses["dpo"], its = _dpo(_policy(folder, attn_implementation="loud"))
            gradients |= its
        made = [_made(folder, name, torch.bfloat16).ref_model.dtype for name in _that_load()]
    if getattr(leaf, "create_reference_model", None) is not None and kl < 1e-6:
        return tiny.TrainingResult(absent("the reference is a copy of the policy"), loss, gradients)
    right = kl < 1e-6
    if {each is torch.bfloat16 for each in made} != {right}:
        raise AssertionError(f"the kl is {kl}, and the references of policies in bfloat16 are in {made}")
    if any((abs(each - math.log(2)) < 1e-5) != right for each in losses.values()):
        raise AssertionError(f"the kl is {kl}, and the losses are {losses}")
    dtypes = dict(zip(_that_load(), map(str, made), strict=True))
    return tiny.TrainingResult(
        judge(float(not right), right=0.0, wrong=1.0, kl=kl, dtypes=dtypes, **losses), loss, gradients
    )


def unaffected() -> tiny.TrainingResult:
    """A policy in float32 with sdpa, and one that is given by name."""
    with tempfile.TemporaryDirectory() as folder:
        _, loss, gradients = _grpo(folder, "sdpa")
        if _dpo_loads():
            _policy(folder)
            gradients |= _dpo(f"{folder}/llama-0")[1]
    return tiny.TrainingResult(absent("the policy is as the reference is loaded anyway"), loss, gradients)


def _have_an_attention() -> None:
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
    """The kl of the first step, its loss and its gradients."""
    from trl import GRPOTrainer

    losses: list[float] = []

    class Measured(GRPOTrainer):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            losses.append(float(loss.detach()))
            return loss

    policy = _policy(folder, attn_implementation=attention)
    trainer = tiny.grpo_of_one_length(Measured, policy, loss_type="grpo")
    seen = tiny.FirstStep(trainer.model)
    trainer.train()
    return float(trainer.state.log_history[0]["kl"]), losses[0], seen.gradients


def _dpo_loads() -> bool:
    return "DPO" in _that_load()


def _that_load() -> list[str]:
    """The trainers that load a reference of their own in this release, if they were asked to."""
    import inspect

    import trl

    found = []
    for name in ("GRPO", "RLOO", "DPO", "KTO"):
        trainer = getattr(trl, f"{name}Trainer", None)
        source = inspect.getsource(inspect.unwrap(trainer.__init__)) if trainer is not None else ""
        if "self.ref_model = create_model_from_path(" in source or "self.ref_model = architecture" in source:
            found.append(name)
    return found or ["GRPO"]


def _made(folder: str, name: str, dtype: Any) -> Any:
    """A trainer that has loaded its reference, with a policy of this dtype."""
    import trl

    policy = _policy(folder, dtype=dtype)
    trainer_class, config_class = getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config")
    if name == "GRPO":
        return tiny.grpo_of_one_length(trainer_class, policy)
    if name == "RLOO":
        return tiny.grpo(trainer_class, policy, config_class, beta=1.0)
    data = tiny.preferences() if name == "DPO" else tiny.labelled()
    args = tiny.config(config_class, max_length=16, beta=0.5)
    return tiny.trainer(trainer_class, model=policy, args=args, train_dataset=data, tokenizer=tiny.tokenizer())


def _dpo(policy: Any) -> tuple[float, dict[str, Any]]:
    from trl import DPOConfig, DPOTrainer

    losses: list[float] = []

    class Measured(DPOTrainer):
        def compute_loss(self, *args, **kwargs):
            result = super().compute_loss(*args, **kwargs)
            losses.append(float((result[0] if isinstance(result, tuple) else result).detach()))
            return result

    trainer = tiny.trainer(
        Measured,
        model=policy,
        args=tiny.config(DPOConfig, max_length=16, beta=0.5),
        train_dataset=tiny.preferences(),
        tokenizer=tiny.tokenizer(),
    )
    seen = tiny.FirstStep(trainer.model)
    trainer.train()
    return losses[0], {f"dpo {name}": gradient for name, gradient in seen.gradients.items()}
