"""Train two steps of two micro-batches with SFTTrainer and DPOTrainer, and evaluate.

The model is a RecurrentGemma whose soft cap is small enough to change the loss. Losses, accumulated gradients and
evaluation are compared with the model's own logits, without TRL's head.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trl_hotfix.authoring import absent, judge, shadowed
from trl_hotfix.model import Outcome, Verdict

import tiny
from tiny import dpo_steps

OVERLAYS = ()
PARITY = False
VARIANTS = {
    "lora": "the model has no adapter, and where it has one the head is the same",
    "compiled": "compiled, RecurrentGemma has other logits than eager, without TRL too",
}


CAP, NO_CAP = 0.05, 1e6
STEPS, MICRO_BATCHES = 2, 2


def train() -> tiny.TrainingResult:
    from trl.trainer import sft_trainer

    head = getattr(sft_trainer, "_patch_chunked_ce_lm_head", None)
    if head is None and not hasattr(sft_trainer, "add_fused_lm_head"):
        return tiny.TrainingResult(absent("this release has no head of its own"))
    if head is not None and "past_key_values=outputs" in inspect.getsource(inspect.unwrap(head)):
        return tiny.TrainingResult(absent("the first step of this model fails for another reason"))
    with tempfile.TemporaryDirectory() as folder:
        trainer = _sft(_recurrent_gemma(folder, seed=0))
        outcome = _judged(trainer, _recurrent_gemma(folder, seed=0))
    result = tiny.result_of_runs({"sft": trainer}, outcome)
    if head is None:  # Up to 1.14 DPO has the logits of the model.
        run = dpo_steps.dpo_steps(_dpo_losses, _recurrent_gemma, reference=1)
        of_dpo = dpo_steps.judged_steps(run)
        if of_dpo.verdict is not outcome.verdict:
            raise AssertionError(f"SFT: {outcome}, DPO: {of_dpo}")
        result.gradients |= {f"dpo.{name}": gradient for name, gradient in run.result.gradients.items()}
    return result


def unaffected() -> tiny.TrainingResult:
    """Train a model without a soft cap."""
    with tempfile.TemporaryDirectory() as folder:
        return tiny.result_of_runs({"sft": _sft(tiny.llama(folder, seed=0))}, absent("the model has no soft cap"))


def _recurrent_gemma(folder: str, *, seed: int) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, RecurrentGemmaConfig, RecurrentGemmaForCausalLM

    torch.manual_seed(seed)
    config = RecurrentGemmaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        lru_width=16,
        attention_window_size=32,
        logits_soft_cap=CAP,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    path = Path(folder, f"recurrent-gemma-{seed}")
    if not path.exists():
        RecurrentGemmaForCausalLM(config).save_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path)
    for module in model.modules():
        # transformers 4 goes on with the state of the batch before, and fails in the second one.
        if hasattr(module, "recurrent_states"):
            module.register_forward_pre_hook(lambda module, _: setattr(module, "recurrent_states", None))
    return model


def _sft(model: Any) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = [{"text": " ".join(f"w{index + step}" for step in range(4 + index % 3))} for index in range(8)]
    data = Dataset.from_list(rows)
    trainer = tiny.trainer(
        tiny.stepwise(SFTTrainer),
        model=model,
        args=tiny.config(
            SFTConfig,
            max_length=16,
            loss_type="chunked_nll",
            max_steps=STEPS,
            gradient_accumulation_steps=MICRO_BATCHES,
            optim="sgd",
            learning_rate=0.5,
        ),
        train_dataset=data,
        eval_dataset=data.select(range(3)),
        tokenizer=tiny.tokenizer(),
    )
    trainer.train()
    trainer.evaluate()
    return trainer


def _judged(trainer: Any, model: Any) -> Outcome:
    """Judge all losses and gradients of SFT by the model's own loss, with its cap or without one."""
    outcomes = []
    for step in trainer.steps:
        model.load_state_dict(step.weights)
        outcomes += [_judged_loss(model, micro_batch) for micro_batch in step.micro_batches]
        with shadowed(model.config, "logits_soft_cap", CAP if outcomes[0].verdict is Verdict.FIXED else NO_CAP):
            expected = tiny.expected_gradients(
                model,
                step.weights,
                lambda model, step=step: sum(_loss(model, micro_batch) for micro_batch in step.micro_batches),
            )
        if step.difference(expected) > 1e-5 or len(step.micro_batches) != MICRO_BATCHES:
            raise AssertionError(f"the gradients differ by {step.difference(expected)}")
    model.load_state_dict(trainer.model.state_dict())
    outcomes += [_judged_loss(model, micro_batch) for micro_batch in trainer.evaluations]
    if len(trainer.steps) != STEPS or len(trainer.evaluations) != 2:
        raise AssertionError(f"expected {STEPS} steps and an evaluation: {trainer.steps}, {trainer.evaluations}")
    if any(outcome.verdict is not outcomes[0].verdict for outcome in outcomes):
        raise AssertionError(f"the losses are not all of one kind: {outcomes}")
    return outcomes[0]


def _judged_loss(model: Any, micro_batch: tiny.MicroBatch) -> Outcome:
    right = float(_loss(model, micro_batch).detach())
    with shadowed(model.config, "logits_soft_cap", NO_CAP):
        wrong = float(_loss(model, micro_batch).detach())
    return judge(micro_batch.loss, right=right, wrong=wrong)


def _loss(model: Any, micro_batch: tiny.MicroBatch) -> Any:
    """Return the cross-entropy of a micro-batch by the model's own logits."""
    import torch

    batch = {name: micro_batch.inputs[name] for name in ("input_ids", "attention_mask")}
    labels = micro_batch.inputs["labels"][:, 1:]
    # Where transformers passes this number, the sum of the losses is divided by it.
    items = micro_batch.keywords.get("num_items_in_batch")
    logits = model(**batch, use_cache=False).logits[:, :-1].float().flatten(0, 1)
    total = torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
    return total / ((labels != -100).sum() if items is None else items)


def _dpo_losses(policy: Any, reference: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the loss of DPO with the soft cap on the logits of both models, and without it."""
    losses = {}
    for name, cap in (("right", CAP), ("wrong", NO_CAP)):
        with shadowed(policy.config, "logits_soft_cap", cap), shadowed(reference.config, "logits_soft_cap", cap):
            log_probs = dpo_steps.preference_log_probs(policy, batch, differentiable=True)
            losses[name] = dpo_steps.sigmoid_loss(log_probs, dpo_steps.preference_log_probs(reference, batch))
    return losses
