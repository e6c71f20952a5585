"""Train two steps of two micro-batches with the real GRPO, RLOO, DPO and KTO trainers and adapters of several kinds.

DPO is evaluated and trained, and its losses and gradients are compared with those of the paper's formula (Equation 7),
for which a second model with the same adapter is the reference. All runs are compared with one whose adapter "ref" is
set by hand.
"""

from __future__ import annotations

import tempfile
from typing import Any

from trl_hotfix.authoring import absent, judge

import tiny
from tiny.data import preferences_of_several_lengths
from tiny.trainers import classes_with_a_reference_adapter, methods_with_a_reference_adapter

OVERLAYS = ()
PARITY = False
VARIANTS = {"full": "what is wrong is the copy of an adapter"}

STEPS, MICRO_BATCHES, BETA = 2, 2, 0.5
EQUIVALENT = {"applied twice": "the same weights are copied again"}


def train() -> tiny.TrainingResult:
    loss, gradients, kinds = 0.0, {}, []
    for method in methods_with_a_reference_adapter():
        for kind in ("embeddings", *(("scales", "vectors") if method in ("GRPO", "DPO") else ())):
            trainer, by_hand = (_trained(method, kind, by_hand=by_hand) for by_hand in (False, True))
            kinds.append(_losses(trainer) == _losses(by_hand))
            if kinds[-1] and any(
                not gradient.equal(right.gradients[name])
                for step, right in zip(trainer.steps, by_hand.steps, strict=True)
                for name, gradient in step.gradients.items()
            ):
                raise AssertionError(f"{method}, {kind}: the losses are right, and the gradients are not")
            if _acts(method, trainer) not in (None, 1):
                raise AssertionError(f"{method}, {kind}: the patch acts {_acts(method, trainer)} times")
            if method == "DPO":
                _compare_with_formula(kind, trainer, by_hand, is_right=kinds[-1])
            loss += sum(_losses(trainer))
            gradients |= _gradients(f"{method} {kind}", trainer)
    if not kinds:
        return tiny.TrainingResult(absent("no trainer makes an adapter of its own"))
    return tiny.TrainingResult(judge(sum(kinds), right=len(kinds), wrong=0), loss, gradients)


def unaffected() -> tiny.TrainingResult:
    """Train adapters that TRL copies, one that the trainer makes, one beside a reference model, and a whole model."""
    loss, gradients = 0.0, {}
    for method in methods_with_a_reference_adapter():
        for kind in _UNAFFECTED.get(method, ()):
            trainer = _trained(method, kind)
            if _acts(method, trainer) not in (None, 0):
                raise AssertionError(f"{method}, {kind}: the patch acts")
            loss += sum(_losses(trainer))
            gradients |= _gradients(f"{method} {kind}", trainer)
    return tiny.TrainingResult(absent("TRL copies all of these adapters, or makes no copy"), loss, gradients)


def _acts(method: str, trainer: Any) -> int | None:
    module = classes_with_a_reference_adapter(method)[0].__module__
    return tiny.acts("ref-adapter-incomplete-copy", f"{module}:{method}Trainer.__init__", trainer)


def _losses(trainer: Any) -> list[float]:
    calls = [*trainer.evaluations, *(micro_batch for step in trainer.steps for micro_batch in step.micro_batches)]
    return [call.loss for call in calls]


def _gradients(run: str, trainer: Any) -> dict[str, Any]:
    """Return all gradients. ``run`` is the name of the run."""
    return {
        f"{run} {number} {name}": gradient
        for number, step in enumerate(trainer.steps)
        for name, gradient in step.gradients.items()
    }


def _compare_with_formula(kind: str, trainer: Any, by_hand: Any, *, is_right: bool) -> None:
    """Compare the run whose reference is set by hand with the formula, and the other one unless it is the same.

    With the bug the reference is a new adapter where the names end in that of the adapter.
    """
    with tempfile.TemporaryDirectory() as folder:
        reference, new = _model(kind, folder), _model(kind, folder)
    for name, weight in new.named_parameters():
        for part, value in _NEW.items():
            if f".{part}.default" in name:
                weight.data.fill_(value)
    for run, of_run in ((by_hand, reference), *([] if is_right else [(trainer, new)])):
        for number, step in enumerate(run.steps):
            expected = tiny.expected_gradients(
                run.model,
                step.weights,
                lambda model, step=step, of_run=of_run: (
                    sum(_dpo(model, of_run, call) for call in step.micro_batches) / 2
                ),
            )
            if len(step.micro_batches) != MICRO_BATCHES or step.difference(expected) > 1e-5:
                raise AssertionError(f"DPO, {kind}: gradients differ by {step.difference(expected)}")
            # The evaluation is at the beginning.
            for call in [*step.micro_batches, *(run.evaluations if number == 0 else [])]:
                if abs(call.loss - float(_dpo(run.model, of_run, call))) > 1e-5:
                    raise AssertionError(f"DPO, {kind}: the loss of step {number} is {call.loss}")


def _of_step(model: Any, reference: Any, calls: list[tiny.MicroBatch]) -> Any:
    return sum(_dpo(model, reference, call) for call in calls) / len(calls)


def _dpo(model: Any, reference: Any, call: tiny.MicroBatch) -> Any:
    """Return the loss of a micro-batch."""
    import torch

    policy = tiny.preference_log_probs(model, call.inputs, differentiable=True)
    margins = [chosen - rejected for chosen, rejected in (policy, tiny.preference_log_probs(reference, call.inputs))]
    return -torch.nn.functional.logsigmoid(BETA * (margins[0] - margins[1])).mean()


def _trained(method: str, kind: str, *, by_hand: bool = False) -> Any:
    """Return a trainer after its training. ``by_hand``: its adapter "ref" is set to the adapter "default" before."""
    import torch

    trainer_class, config_class = classes_with_a_reference_adapter(method)
    recorder = tiny.stepwise(trainer_class)
    settings: dict[str, Any] = {
        "max_steps": STEPS,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optim": "sgd",
        "learning_rate": 0.1,
    }
    settings |= {"beta": 0.0 if (method, kind) == ("GRPO", "no reference") else BETA}
    # A new adapter is drawn at random.
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        model = tiny.llama(folder, seed=0) if kind in ("new", "none") else _model(kind, folder)
        new = {"peft_config": _adapter("embeddings")} if kind == "new" else {}
        if method in ("GRPO", "RLOO"):
            trainer = tiny.grpo(recorder, model, config_class, **settings, **new)
        else:
            if kind == "no reference":
                new["ref_model"] = tiny.llama(folder, seed=1)
            pairs = preferences_of_several_lengths()
            trainer = tiny.trainer(
                recorder,
                model=model,
                args=tiny.config(config_class, max_length=16, eval_on_start=method == "DPO", **settings),
                train_dataset=pairs if method == "DPO" else tiny.labelled(pairs),
                tokenizer=tiny.tokenizer(),
                **({"eval_dataset": pairs.select(range(3))} if method == "DPO" else {}),
                **new,
            )
        if by_hand:
            weights = dict(model.named_parameters())
            for name, weight in weights.items():
                parts = name.split(".")
                if "default" in parts:
                    weights[".".join("ref" if part == "default" else part for part in parts)].data.copy_(weight.data)
        trainer.train()
    return trainer


_UNAFFECTED = {"GRPO": ("linear", "new", "none", "no reference"), "DPO": ("magnitudes", "saved", "no reference")}

_NEW = {"lora_embedding_A": 0.0, "ia3_l": 1.0, "vera_lambda_b": 0.0, "vera_lambda_d": 0.1}
"""What these parameters of a new adapter are."""


def _adapter(kind: str) -> Any:
    from peft import IA3Config, LoraConfig, VeraConfig

    if kind == "scales":
        scaled = ["k_proj", "v_proj", "down_proj"]
        return IA3Config(target_modules=scaled, feedforward_modules=scaled[-1:], task_type="CAUSAL_LM")
    if kind == "vectors":
        return VeraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    special: dict[str, dict[str, Any]] = {"magnitudes": {"use_dora": True}, "saved": {"modules_to_save": ["norm"]}}
    modules = ["q_proj", "v_proj", *([] if kind in ("linear", "magnitudes", "saved") else ["embed_tokens"])]
    return LoraConfig(r=2, lora_alpha=4, target_modules=modules, task_type="CAUSAL_LM", **special.get(kind, {}))


def _model(kind: str, folder: str) -> Any:
    """Return a model with a trained adapter."""
    import torch
    from peft import get_peft_model

    model = get_peft_model(tiny.llama(folder, seed=0), _adapter(kind))
    for number, weight in enumerate(weight for weight in model.parameters() if weight.requires_grad):
        weight.data.copy_(0.5 * torch.cos(number + torch.arange(weight.numel())).reshape(weight.shape))
    return model
