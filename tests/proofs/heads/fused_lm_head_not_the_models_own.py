"""Train two steps of two micro-batches with SFTTrainer and, from 1.15 on, with DPOTrainer, and evaluate.

Up to 1.14 the model is a Granite, whose logits are divided by a setting that TRL's head does not know; from 1.7 on also
the decoder of ModernBERT, which has a dense layer and a norm before its output embeddings. Losses, accumulated
gradients and evaluation are compared with the model's own logits, without TRL's head.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Outcome, Verdict

import tiny
from tiny import dpo_steps

OVERLAYS = ()
PARITY = False

MUTANTS_ON = ("1.14.2",)
"""The newest release with a chunked loss: from 1.7.0 on, its last chunk is padded."""

EQUIVALENT = {
    "_is_own: `is_own = all(abs(trls - own) < _TOLERANCE * own for trls, own in losses)` -> "
    "`is_own = all(abs(trls - own) <= _TOLERANCE * own for trls, own in losses)`": "no loss differs by just 0.02",
    "_losses: `torch.arange(_STATES * weight.shape[1], device=weight.device)` without `device`": "there is one device",
}

ID = "fused-lm-head-not-the-models-own"

STEPS, MICRO_BATCHES = 2, 2

Make = Callable[..., Any]


def train() -> tiny.TrainingResult:
    import trl
    from packaging.version import Version
    from trl.trainer import sft_trainer

    is_fused = hasattr(sft_trainer, "add_fused_lm_head")
    if not is_fused and not hasattr(sft_trainer, "_patch_chunked_ce_lm_head"):
        return tiny.TrainingResult(absent("this release has no head of its own"))
    makes: dict[str, Make] = {} if is_fused else {"granite": tiny.granite}
    # Up to 1.6 TRL's head asks the dense layer for its weights, and fails.
    if Version(trl.__version__) >= Version("1.7.0"):
        makes["modernbert"] = tiny.modernbert_decoder
    with tiny.counted(ID) as counts:
        results = {name: _judged_sft(make) for name, make in makes.items()}
        if is_fused:
            # Where the policy has an adapter, the reference is the policy without it.
            reference = None if tiny.state.variant == "lora" else 1
            run = dpo_steps.dpo_steps(_dpo_losses, _with_frozen_head, reference=reference)
            results["dpo"] = run.result
            results["dpo"].outcome = dpo_steps.judged_steps(run)
        count = counts()
    first = next(iter(results.values()))
    if any(result.outcome.verdict is not first.outcome.verdict for result in results.values()):
        raise AssertionError({name: result.outcome for name, result in results.items()})
    if count.acted != count.called:
        raise AssertionError(f"the wrapper acts in {count.acted} of {count.called} calls")
    return _together(results)


def unaffected() -> tiny.TrainingResult:
    """Train a Llama, whose head is a matrix product, and a Granite that divides its logits by 1."""
    runs = {
        "llama": _sft(tiny.llama),
        "granite": _sft(lambda folder, seed: tiny.granite(folder, seed=seed, scaling=1.0)),
    }
    result = tiny.result_of_runs(runs, absent("TRL's head is that of the model"))
    run = dpo_steps.dpo_steps(dpo_steps.reference_or_policy, tiny.llama, reference=1)
    result.gradients |= {f"dpo.{name}": gradient for name, gradient in run.result.gradients.items()}
    return result


def _with_frozen_head(folder: str, *, seed: int) -> Any:
    """Return ModernBERT's decoder without gradients for what TRL's head leaves out: it would have none at all."""
    model = tiny.modernbert_decoder(folder, seed=seed)
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    inner.lm_head.requires_grad_(False)
    return model


def _judged_sft(make: Make) -> tiny.TrainingResult:
    with tempfile.TemporaryDirectory() as folder:
        model = make(folder, seed=0)
    trainer = _sft(make)
    return tiny.result_of_runs({"sft": trainer}, _judged(trainer, model))


def _sft(make: Make) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = [{"text": " ".join(f"w{index + step}" for step in range(4 + index % 3))} for index in range(8)]
    data = Dataset.from_list(rows)
    with tempfile.TemporaryDirectory() as folder:
        trainer = tiny.trainer(
            tiny.stepwise(SFTTrainer),
            model=make(folder, seed=0),
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
    """Judge all losses and gradients of SFT by the loss of the model's logits, and of those that TRL makes."""
    outcomes = []
    for step in trainer.steps:
        model.load_state_dict(step.weights)
        outcomes += [_judged_loss(model, micro_batch) for micro_batch in step.micro_batches]
        logits = _own_logits if outcomes[0].verdict is Verdict.FIXED else _trls_logits
        expected = tiny.expected_gradients(
            model,
            step.weights,
            lambda model, step=step, logits=logits: sum(
                _loss(model, micro_batch, logits) for micro_batch in step.micro_batches
            ),
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
    right, wrong = (float(_loss(model, micro_batch, logits).detach()) for logits in (_own_logits, _trls_logits))
    return judge(micro_batch.loss, right=right, wrong=wrong)


def _own_logits(model: Any, batch: Mapping[str, Any]) -> Any:
    return model(**batch, use_cache=False).logits


def _trls_logits(model: Any, batch: Mapping[str, Any]) -> Any:
    """Return the product of the decoder's states and the weights of the output embeddings."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return inner.get_output_embeddings()(inner.base_model(**batch, use_cache=False).last_hidden_state)


def _loss(model: Any, micro_batch: tiny.MicroBatch, logits_of: Callable[..., Any]) -> Any:
    import torch

    logits = logits_of(model, {name: micro_batch.inputs[name] for name in ("input_ids", "attention_mask")})
    labels = micro_batch.inputs["labels"][:, 1:]
    # Where transformers passes this number, the sum of the losses is divided by it.
    items = micro_batch.keywords.get("num_items_in_batch")
    total = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten(), reduction="sum")
    return total / ((labels != -100).sum() if items is None else items)


def _dpo_losses(policy: Any, reference: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the loss of DPO with the logits of both models, and with those that TRL makes."""
    import torch

    losses = {}
    for name, logits_of in (("right", _own_logits), ("wrong", _trls_logits)):
        sides = []
        for model in (policy, reference):
            with torch.set_grad_enabled(model is policy):
                logits = logits_of(model, {key: batch[key] for key in ("input_ids", "attention_mask")})
                log_probs = logits[:, :-1].log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
                sides.append((log_probs * batch["completion_mask"][:, 1:]).sum(1).chunk(2))
        losses[name] = dpo_steps.sigmoid_loss(*sides)
    return losses


def _together(results: Mapping[str, tiny.TrainingResult]) -> tiny.TrainingResult:
    gradients = {f"{name}.{key}": value for name, result in results.items() for key, value in result.gradients.items()}
    first = next(iter(results.values()))
    return tiny.TrainingResult(first.outcome, sum(result.loss for result in results.values()), gradients)
