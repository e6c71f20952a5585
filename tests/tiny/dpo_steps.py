"""Optimizer steps of the real DPOTrainer, and beside them what a formula gives for each of their micro-batches."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .data import preferences_of_several_lengths, tokenizer
from .dpo_runs import preference_log_probs
from .grpo_steps import judged_steps, several_runs
from .measuring import TrainingResult, gradient_differences
from .models import llama, lora, same_adapter
from .steps import FormulaSteps
from .trainers import config, trainer
from .variants import state

BETA = 0.5


@dataclass
class MicroBatch:
    """What one call of the loss was given and returned, what each formula gives, and how many forwards there were."""

    inputs: dict[str, Any]
    is_training: bool
    loss: float
    expected: dict[str, float]
    forwards: int


Formula = Callable[[Any, Any, Mapping[str, Any]], Mapping[str, Any]]
"""``formula(policy, reference, batch)`` gives the losses of a micro-batch, by name. They can be differentiated."""


def sigmoid_loss(policy: tuple[Any, Any], reference: tuple[Any, Any]) -> Any:
    """Return equation 7 of the paper (arXiv:2305.18290), which can be differentiated."""
    import torch

    margins = [chosen - rejected for chosen, rejected in (policy, reference)]
    return -torch.nn.functional.logsigmoid(BETA * (margins[0] - margins[1])).mean()


def reference_or_policy(policy: Any, reference: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the loss with the untouched reference (``right``), and with the policy as its own one (``wrong``)."""
    of_policy = preference_log_probs(policy, batch, differentiable=True)
    of_reference = preference_log_probs(reference, batch)
    return {
        "right": sigmoid_loss(of_policy, of_reference),
        "wrong": sigmoid_loss(of_policy, (of_policy[0].detach(), of_policy[1].detach())),
    }


def with_aux_loss(policy: Any, reference: Any, batch: Mapping[str, Any], coefficient: float) -> dict[str, Any]:
    """Return the loss of a mixture of experts with the router auxiliary loss (``right``) and without it (``wrong``)."""
    import torch

    of_policy, aux_loss = _log_probs_and_aux_loss(policy, batch)
    with torch.no_grad():
        of_reference, _ = _log_probs_and_aux_loss(reference, batch)
    without = sigmoid_loss(of_policy, of_reference)
    return {"right": without + coefficient * aux_loss, "wrong": without}


def _log_probs_and_aux_loss(model: Any, batch: Mapping[str, Any]) -> tuple[tuple[Any, Any], Any]:
    """Return the log-probs of chosen and rejected completions, and the auxiliary loss of one forward of all of them."""
    import torch

    sides = [whole_sequences(batch, side) for side in ("chosen", "rejected")]
    length = max(ids.shape[1] for ids, _, _ in sides)
    padded = [[torch.nn.functional.pad(part, (0, length - part.shape[1])) for part in side] for side in sides]
    ids, attention, completion = (torch.cat(parts) for parts in zip(*padded, strict=True))
    outputs = model(input_ids=ids, attention_mask=attention, output_router_logits=True, use_cache=False)
    log_probs = outputs.logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    chosen, rejected = (log_probs * completion[:, 1:]).sum(1).chunk(2)
    return (chosen, rejected), outputs.aux_loss


def whole_sequences(batch: Mapping[str, Any], side: str) -> tuple[Any, Any, Any]:
    """Return ids, attention mask and mask of the completion of one side's sequences, padded on the right. To 0.28."""
    import torch

    ids, attention = batch[f"{side}_input_ids"], batch[f"{side}_attention_mask"]
    if f"{side}_labels" in batch:
        return ids, attention, (batch[f"{side}_labels"] != -100).long()
    prompt, prompt_attention = batch["prompt_input_ids"], batch["prompt_attention_mask"]
    parts = (
        torch.cat([prompt, ids], 1),
        torch.cat([prompt_attention, attention], 1),
        torch.cat([torch.zeros_like(prompt_attention), attention], 1),
    )
    order = parts[1].argsort(dim=1, descending=True, stable=True)
    return tuple(part.gather(1, order) for part in parts)


def dpo_steps(
    formula: Formula,
    make: Callable[..., Any] = llama,
    *,
    reference: int | None = None,
    adapter: bool = False,
    prepare: Callable[[Any], None] = lambda trainer: None,
    train_dataset: Any = None,
    words: Any = None,
    **settings: Any,
) -> FormulaSteps:
    """Train two optimizer steps of two micro-batches, then evaluate, and compute ``formula`` beside each micro-batch.

    ``make(folder, seed=...)`` makes a model. ``reference`` is the seed of a ``ref_model``; without it the reference is
    the policy as it was before the training. The policy moves when the training begins, so that it differs from its
    reference in the first step. ``prepare(trainer)`` is called before. ``words`` is a tokenizer that takes the data as
    they are.
    """
    import torch
    from transformers import TrainerCallback
    from trl import DPOConfig, DPOTrainer

    run = FormulaSteps()
    forwards: list[Any] = []
    # The method that the evaluation calls too.
    method = "get_batch_loss_metrics" if hasattr(DPOTrainer, "get_batch_loss_metrics") else "compute_loss"

    def recorded(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        batch = {name: value.clone() for name, value in inputs.items() if hasattr(value, "clone")}
        with torch.enable_grad():
            expected = formula(policy, untouched, batch)
        if self.model.training:
            run.add(expected, trainable)
        forwards.clear()
        result = getattr(super(Recorder, self), method)(model, inputs, *args, **kwargs)
        loss = result[0] if isinstance(result, tuple) else result
        values = {name: float(value.detach()) for name, value in expected.items()}
        run.micro_batches.append(MicroBatch(batch, self.model.training, float(loss.detach()), values, len(forwards)))
        return result

    Recorder = type("Recorder", (DPOTrainer,), {method: recorded})

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *args: Any, optimizer: Any, **kwargs: Any) -> None:
            # What was evaluated before.
            run.micro_batches.clear()
            with torch.no_grad():
                for number, parameter in enumerate(trainable.values()):
                    index = torch.arange(parameter.numel()).reshape(parameter.shape)
                    parameter.add_(0.1 * torch.cos(number + index))
            # transformers calls back before an optimizer step from 4.46 on only.
            getattr(optimizer, "optimizer", optimizer).register_step_pre_hook(lambda *_: run.end_step(trainable))

    defaults = {"max_steps": 2, "gradient_accumulation_steps": 2, "optim": "sgd", "learning_rate": 0.5, "beta": BETA}
    defaults |= {"max_length": 32, "max_prompt_length": 16}
    data = preferences_of_several_lengths() if train_dataset is None else train_dataset
    if words is None:
        words = tokenizer()
        # 0.9.6 needs this token and puts it before every prompt; later releases do so if it is not there yet.
        words.bos_token = "<unk>"
        data = data.map(lambda row: {"prompt": f"{words.bos_token} {row['prompt']}"})
    with tempfile.TemporaryDirectory() as folder:
        policy, untouched = make(folder, seed=0), make(folder, seed=reference or 0)
        arguments = {} if reference is None else {"ref_model": make(folder, seed=reference)}
        run.trainer = trainer(
            Recorder,
            model=policy,
            args=config(DPOConfig, **{**defaults, **settings}),
            train_dataset=data,
            eval_dataset=data.select(range(3)),
            tokenizer=words,
            callbacks=[Steps()],
            **arguments,
            **({"peft_config": lora()} if adapter else {}),
        )
        policy = run.trainer.model
        if adapter:
            same_adapter(policy)
        trainable = {name: value for name, value in policy.named_parameters() if value.requires_grad}
        for model in (policy, run.trainer.ref_model):
            if model is not None:
                model.register_forward_hook(lambda *_: forwards.append(1))
        run.measure_factor(run.trainer)
        prepare(run.trainer)
        run.trainer.train()
        run.trainer.evaluate()
    return run


def precomputed_steps() -> TrainingResult:
    """Train with ``precompute_ref_log_probs=True``, without a ``ref_model`` and with one.

    With one, and with an adapter, the loss is right, and computing the reference again costs a forward pass. The
    evaluation set is precomputed before the training: later it would have the trained policy as its reference.
    """
    from trl_hotfix.authoring import judge

    def precomputed(reference: int | None) -> FormulaSteps:
        settings = {"precompute_ref_log_probs": True, "prepare": lambda trainer: trainer.evaluate()}
        return dpo_steps(reference_or_policy, reference=reference, **settings)

    has_adapter = state.variant == "lora"
    runs = [precomputed(None)] if has_adapter else [precomputed(None), precomputed(1)]
    (reference_forwards,) = {micro_batch.forwards - 1 for run in runs for micro_batch in run.micro_batches}
    outcome = judge(float(reference_forwards), right=0.0, wrong=1.0)
    for run in runs if has_adapter else runs[1:]:
        assert_right(run)
    of_losses = outcome if has_adapter else judged_steps(runs[0])
    if of_losses.verdict != outcome.verdict:
        raise AssertionError(f"the loss is {of_losses}, the forwards of the reference are {outcome}")
    return several_runs(dict(zip(("alone", "ref_model"), runs, strict=False)), of_losses)


def assert_right(run: FormulaSteps) -> None:
    """Check that all losses and gradients of a run are those of the formula ``right``."""
    difference = difference_from_formula(run)
    if not difference < 1e-5:
        raise AssertionError(f"losses and gradients differ from the formula by up to {difference}")


def difference_from_formula(run: FormulaSteps) -> float:
    """Return by how much a loss or a gradient of a run differs from the formula ``right`` at most."""
    differences = [abs(micro_batch.loss - micro_batch.expected["right"]) for micro_batch in run.micro_batches]
    for gradients, expected in zip(run.gradients, run.expected, strict=True):
        differences += gradient_differences(gradients, expected["right"])
    return max(differences)


def difference_of_runs(one: FormulaSteps, other: FormulaSteps) -> float:
    """Return by how much a loss, a gradient or a logged metric differs between two runs at most."""
    losses = zip(one.micro_batches, other.micro_batches, strict=True)
    differences = [abs(micro_batch.loss - same.loss) for micro_batch, same in losses]
    for gradients, same_gradients in zip(one.gradients, other.gradients, strict=True):
        differences += gradient_differences(gradients, same_gradients)
    for logged, same_logged in zip(_metrics(one), _metrics(other), strict=True):
        differences += [abs(value - same_logged[name]) for name, value in logged.items()]
    return max(differences)


def _metrics(run: FormulaSteps) -> list[dict[str, float]]:
    kept = ("loss", "rewards/", "logps/", "logits/")
    return [
        {name: value for name, value in entry.items() if any(part in name for part in kept)}
        for entry in run.trainer.state.log_history
    ]
