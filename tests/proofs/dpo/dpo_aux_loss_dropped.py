"""Train a tiny Mixtral two steps of two micro-batches with the real DPOTrainer, with all weights and with LoRA, and
evaluate. Loss, gradients and log are compared with the formula, which is computed without TRL's code.

With Liger the loss stays without the term, and a warning says so. Liger is an optional package that the stacks lack: a
constant that depends on the weights takes the place of its loss.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import trl_hotfix
from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Outcome, Verdict

import tiny
from tiny.data import preferences_of_several_lengths

OVERLAYS = ()
PARITY = True


ID = "dpo-aux-loss-dropped"
COEFFICIENT, BETA, STEPS, MICRO_BATCHES = 0.5, 0.5, 2, 2


@dataclass
class Run:
    """Losses and gradients of a run, as they were and by the formula, with the auxiliary term and without it."""

    trainer: Any = None
    losses: list[float] = field(default_factory=list)
    right: list[float] = field(default_factory=list)
    wrong: list[float] = field(default_factory=list)
    aux_losses: list[float] = field(default_factory=list)
    gradients: dict[str, Any] = field(default_factory=dict)
    right_gradients: dict[str, Any] = field(default_factory=dict)


def train() -> tiny.TrainingResult:
    from trl import DPOConfig

    runs = {"full": _run()}
    if not tiny.variant:
        # With an adapter and compiled, these releases find neither the adapter nor a reference (up to 1.15.0).
        runs["lora"] = _run(adapter=True)
    outcomes = {name: judge(sum(run.losses), right=sum(run.right), wrong=sum(run.wrong)) for name, run in runs.items()}
    (verdict,) = {outcome.verdict for outcome in outcomes.values()}
    if verdict is Verdict.FIXED:
        for name, run in runs.items():
            _compare(name, run)
    # TRL's Liger loss refuses an adapter.
    if tiny.variant != "lora" and "router_aux_loss_coef" not in {field.name for field in fields(DPOConfig)}:
        _, messages = tiny.warnings_of(_with_liger)
        warned = sum("router auxiliary loss" in message for message in messages)
        if warned != (trl_hotfix.status()[ID].state.value == "applied"):
            raise AssertionError(f"with Liger it is said: {messages}")
    numbers = {name: outcome.to_dict() for name, outcome in outcomes.items()}
    gradients = {f"{name}.{key}": value for name, run in runs.items() for key, value in run.gradients.items()}
    return tiny.TrainingResult(Outcome(verdict, numbers), sum(sum(run.losses) for run in runs.values()), gradients)


def unaffected() -> tiny.TrainingResult:
    """Train where the model has no router, is not asked for its loss, or has a coefficient of 0; and with Liger."""
    losses, gradients = [], {}

    def unasked(folder: str) -> Any:
        model = tiny.mixtral(folder, seed=0, coefficient=COEFFICIENT)
        model.config.output_router_logits = False
        return model

    models: dict[str, Callable[[str], Any]] = {
        "dense": lambda folder: tiny.llama(folder, seed=0),
        "unasked": unasked,
        "zero": lambda folder: tiny.mixtral(folder, seed=0, coefficient=0.0),
    }
    for name, make in models.items():
        run = _run(make=make, router_aux_loss_coef=0.0)
        losses += run.losses
        gradients |= {f"{name}.{key}": value for key, value in run.gradients.items()}
    losses += _with_liger(models["dense"]).losses
    return tiny.TrainingResult(absent("there is no auxiliary loss"), sum(losses), gradients)


def _compare(name: str, run: Run) -> None:
    """Compare each loss, each gradient and the log with the formula."""
    differences = {
        key: float((run.gradients[key] - value).abs().max()) for key, value in run.right_gradients.items()
    } | {f"loss {i}": abs(loss - right) for i, (loss, right) in enumerate(zip(run.losses, run.right, strict=True))}
    history = run.trainer.state.log_history
    logged = [entry["aux_loss"] for entry in history if "loss" in entry]
    logged += [entry["eval_aux_loss"] for entry in history if "eval_loss" in entry]
    for place, value in enumerate(logged):
        # Each entry is the mean of two micro-batches.
        expected = sum(run.aux_losses[MICRO_BATCHES * place :][:MICRO_BATCHES]) / MICRO_BATCHES
        differences[f"logged {place}"] = abs(value - expected)
    (eval_loss,) = (entry["eval_loss"] for entry in history if "eval_loss" in entry)
    differences["eval_loss"] = abs(eval_loss - sum(run.right[-MICRO_BATCHES:]) / MICRO_BATCHES)
    wrong = {key: value for key, value in differences.items() if value > 2e-6}
    if wrong or len(logged) != STEPS + 1:
        raise AssertionError(f"{name}: not as in the formula: {wrong}, logged {logged}")


def _run(make: Callable[[str], Any] | None = None, *, adapter: bool = False, **settings: Any) -> Run:
    import torch
    from transformers import TrainerCallback
    from trl import DPOConfig, DPOTrainer

    run = Run()
    sums: dict[str, Any] = {}

    class Recorder(DPOTrainer):  # type: ignore[misc, valid-type]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if make is None:
                self.record_formula(inputs)
            result = super().compute_loss(model, inputs, *args, **kwargs)
            run.losses.append(float((result[0] if isinstance(result, tuple) else result).detach()))
            return result

        def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            calls = len(run.losses)
            result = super().prediction_step(model, inputs, *args, **kwargs)
            # Up to 0.28 an evaluation does not call compute_loss.
            if len(run.losses) == calls:
                if make is None:
                    self.record_formula(inputs)
                run.losses.append(float(result[0]))
            return result

        def record_formula(self, inputs: Any) -> None:
            weights = {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}
            with torch.enable_grad():
                policy, aux_loss = _log_probs(self.model, inputs)
                with torch.no_grad():
                    reference, _ = _log_probs(untouched, inputs)
                margins = (policy - reference).chunk(2)
                without = -torch.nn.functional.logsigmoid(BETA * (margins[0] - margins[1])).mean()
                right = without + COEFFICIENT * aux_loss
                found = torch.autograd.grad(right, list(weights.values()), allow_unused=True)
            run.aux_losses.append(float(aux_loss.detach()))
            run.wrong.append(float(without.detach()))
            run.right.append(float(right.detach()))
            for (name, weight), gradient in zip(weights.items(), found, strict=True):
                share = torch.zeros_like(weight) if gradient is None else gradient / MICRO_BATCHES
                sums[name] = sums.get(name, 0) + share

    class KeepGradients(TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            for name, weight in kwargs["model"].named_parameters():
                if weight.requires_grad:
                    name = name.removeprefix("_orig_mod.")
                    gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()
                    run.gradients[f"{state.global_step}.{name}"] = gradient
            run.right_gradients.update({f"{state.global_step}.{name}": value for name, value in sums.items()})
            sums.clear()

    make_model = make or (lambda folder: tiny.mixtral(folder, seed=0, coefficient=COEFFICIENT))
    words = tiny.tokenizer()
    data = preferences_of_several_lengths()
    defaults = {"beta": BETA, "max_length": 32, "max_steps": STEPS, "gradient_accumulation_steps": MICRO_BATCHES}
    defaults |= {"optim": "sgd", "learning_rate": 0.5, "router_aux_loss_coef": COEFFICIENT}
    with tempfile.TemporaryDirectory() as folder:
        policy, untouched, reference = (make_model(folder) for _ in range(3))
        run.trainer = tiny.trainer(
            Recorder,
            model=policy,
            args=tiny.config(DPOConfig, **{**defaults, **settings}),
            train_dataset=data,
            eval_dataset=data.select(range(4)),
            tokenizer=words,
            callbacks=[KeepGradients()],
            **({"peft_config": tiny.lora()} if adapter else {"ref_model": reference}),
        )
        if adapter:
            tiny.same_adapter(run.trainer.model)
        run.trainer.train()
        run.trainer.evaluate()
    return run


def _log_probs(model: Any, batch: Any) -> tuple[Any, Any]:
    """Return the summed log-probs of the completions, the chosen ones before the rejected, and the auxiliary loss."""
    ids, attention_mask, completion_mask = _sequences(batch)
    outputs = model(input_ids=ids, attention_mask=attention_mask, output_router_logits=True, use_cache=False)
    log_probs = outputs.logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    return (log_probs * completion_mask[:, 1:]).sum(1), outputs.aux_loss


def _sequences(batch: Any) -> tuple[Any, Any, Any]:
    """Return ids, attention mask and completion mask, padded on the right. Up to 0.28 a batch has the parts of each."""
    from torch.nn.utils.rnn import pad_sequence

    if "input_ids" in batch:
        return batch["input_ids"], batch["attention_mask"], batch["completion_mask"]
    rows: list[list[int]] = []
    lengths: list[int] = []
    for kind in ("chosen", "rejected"):
        for row in range(len(batch["prompt_input_ids"])):
            prompt, completion = (
                batch[f"{part}_input_ids"][row][batch[f"{part}_attention_mask"][row] == 1].tolist()
                for part in ("prompt", kind)
            )
            rows.append(prompt + completion)
            lengths.append(len(prompt))
    ids, attention_mask = (
        pad_sequence([batch["prompt_input_ids"].new_tensor(row) for row in values], batch_first=True)
        for values in (rows, [[1] * len(row) for row in rows])
    )
    completion_mask = attention_mask.clone()
    for row, length in enumerate(lengths):
        completion_mask[row, :length] = 0
    return ids, attention_mask, completion_mask


def _with_liger(make: Callable[[str], Any] | None = None) -> Run:
    """Compute the loss of two micro-batches with Liger."""
    import torch
    from trl import DPOConfig, DPOTrainer

    run = Run()

    def fused(weight: Any, hidden: Any, *args: Any) -> Any:
        return hidden.square().mean(), (torch.zeros(()),) * 7

    make = make or (lambda folder: tiny.mixtral(folder, seed=0, coefficient=COEFFICIENT))
    with tempfile.TemporaryDirectory() as folder:
        trainer = tiny.trainer(
            DPOTrainer,
            model=make(folder),
            ref_model=make(folder),
            args=tiny.config(DPOConfig, max_length=32),
            train_dataset=preferences_of_several_lengths(),
            tokenizer=tiny.tokenizer(),
        )
        trainer.use_liger_kernel, trainer.liger_loss_fn = True, fused
        batches = iter(trainer.get_train_dataloader())
        run.losses = [float(trainer.compute_loss(trainer.model, next(batches)).detach()) for _ in range(2)]
    return run
