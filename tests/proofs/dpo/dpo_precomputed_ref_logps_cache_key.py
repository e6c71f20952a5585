"""Train two steps of two micro-batches, and evaluate, after a run on the same data that cut its sequences shorter.

The trainers are the real DPOTrainer, and the KTOTrainer where it keeps its reference in a file too. Right are losses
and gradients by the formula with the log-probs that the untrained model gives to the whole sequences, wrong are those
with the log-probs that it gives to the sequences of the earlier run. At first policy and reference are equal: right is
log 2 for DPO, and 0.5 for KTO.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from trl_hotfix.authoring import absent, shadowed

import tiny
from tiny.data import preferences_of_several_lengths
from tiny.dpo_steps import BETA, MicroBatch, sigmoid_loss
from tiny.grpo_steps import judged_steps, several_runs

OVERLAYS = ()
PARITY = False
VARIANTS = {"compiled": "compiled, the run fails: LlamaForCausalLM does not support len()"}
DATA = True
EQUIVALENT = {
    "applied twice": "the name is a hash of a hash, and says as much about the settings",
}

LONG = 32
SHORT = 5
"""Many sequences are longer. A prompt has four tokens at most, so something of each completion is left."""


def train() -> tiny.TrainingResult:
    methods = methods_with_a_file()
    if not methods:
        return tiny.TrainingResult(absent("what is precomputed is not kept in a file in this release"))
    runs = {method: run_after_another(method, SHORT)[0] for method in methods}
    outcomes = {method: judged_steps(run) for method, run in runs.items()}
    if len({outcome.verdict for outcome in outcomes.values()}) != 1:
        raise AssertionError(f"DPO and KTO differ: {outcomes}")
    return several_runs(runs, outcomes["DPO"])


def unaffected() -> tiny.TrainingResult:
    """Train twice with the same settings: the second trainer reads the log-probs that the first has computed."""
    methods = methods_with_a_file()
    runs_and_forwards = {method: run_after_another(method, LONG) for method in methods}
    if any(forwards for _, forwards in runs_and_forwards.values()):
        raise AssertionError(f"the reference was computed again: {runs_and_forwards}")
    runs = {method: run for method, (run, _) in runs_and_forwards.items()}
    return several_runs(runs, absent("the settings are those of the run before"))


def methods_with_a_file() -> list[str]:
    """Return the trainers that keep in a file what is precomputed, and do not name it by all arguments."""
    from packaging.version import Version
    from trl import __version__

    release = Version(__version__)
    ranges = {"DPO": release >= Version("0.29.0"), "KTO": Version("1.4.0") <= release < Version("1.9.0")}
    return [method for method, is_inside in ranges.items() if is_inside]


@cache
def rows_of(method: str) -> str:
    """Return the path of the rows' file, the same in every run.

    A dataset in memory is not cached where another run would look.
    """
    pairs = preferences_of_several_lengths()
    path = Path(tempfile.mkdtemp(), "rows.json")
    (pairs if method == "DPO" else tiny.labelled(pairs)).to_json(path)
    return str(path)


def run_after_another(method: str, max_length: int) -> tuple[tiny.FormulaSteps, int]:
    """Return a run that cuts nothing, after a trainer with ``max_length``, and how many forwards its reference took."""
    with tempfile.TemporaryDirectory() as folder:
        words = tiny.tokenizer()
        trainer_of(method, folder, words, max_length)
        trainer, forwards = trainer_of(method, folder, words, LONG)
        return run_of(method, trainer, model_of(folder)), forwards


def model_of(folder: str) -> Any:
    """Return the policy as it is before the training. It is its own reference, with its adapter if it has one."""
    model = tiny.llama(folder, seed=0)
    if tiny.variant == "lora":
        tiny.set_adapters(model)  # As PEFT makes it, an adapter has no gradient for half of its matrices.
    return model


def trainer_of(method: str, folder: str, words: Any, max_length: int) -> tuple[Any, int]:
    """Return a trainer and the number of forwards in which it has computed its reference: 0 if it has read a file."""
    from datasets import Dataset

    trainer_class, config_class = tiny.classes(method)
    policy = model_of(folder)
    forward_passes: list[int] = []
    policy.register_forward_hook(lambda *_: forward_passes.append(1))
    fingerprints: list[str] = []
    path_of = Dataset._get_cache_file_path

    def record_fingerprint(dataset: Any, fingerprint: str) -> str:
        fingerprints.append(fingerprint)
        return path_of(dataset, fingerprint)

    settings = {"precompute_ref_log_probs": True, "truncation_mode": "keep_end", "beta": BETA, "max_steps": 2}
    settings |= {"gradient_accumulation_steps": 2, "optim": "sgd", "learning_rate": 0.5}
    data = Dataset.from_json(rows_of(method), cache_dir=folder)
    with shadowed(Dataset, "_get_cache_file_path", record_fingerprint):
        # No subclass: up to 1.7.0 the function that tokenizes holds the trainer, and `datasets` hashes its class too.
        trainer = tiny.trainer(
            trainer_class,
            model=policy,
            args=tiny.config(config_class, max_length=max_length, **settings),
            train_dataset=data,
            eval_dataset=data.select(range(4)),
            tokenizer=words,
        )
    # The fingerprint of the trainer's dataset contains the time at which the file was made; the last one recorded is
    # the name of a file.
    tiny.fingerprints[-1:] = fingerprints[-1:]
    return trainer, len(forward_passes)


def run_of(method: str, trainer: Any, untouched: Any) -> tiny.FormulaSteps:
    """Train and evaluate, and compute the formula beside each micro-batch."""
    import torch
    from transformers import TrainerCallback

    formula = {"DPO": dpo_losses, "KTO": kto_losses}[method]
    run = tiny.FormulaSteps(trainer)
    trainable = {name: value for name, value in trainer.model.named_parameters() if value.requires_grad}
    compute_loss = trainer.compute_loss

    def recorded(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        batch = dict(inputs)
        with torch.enable_grad():
            expected = formula(trainer.model, untouched, batch)
        if trainer.model.training:
            run.add(expected, trainable)
        result = compute_loss(model, inputs, *args, **kwargs)
        loss = float((result[0] if isinstance(result, tuple) else result).detach())
        values = {name: float(value.detach()) for name, value in expected.items()}
        run.micro_batches.append(MicroBatch(batch, trainer.model.training, loss, values, 1))
        return result

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            run.end_step(trainable)

    trainer.compute_loss = recorded
    trainer.add_callback(Steps())
    run.measure_factor(trainer)
    trainer.train()
    trainer.evaluate()
    return run


def dpo_losses(policy: Any, untouched: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    of_policy = tiny.preference_log_probs(policy, batch, differentiable=True)
    references = {"right": batch, "wrong": cut(batch, slice(-SHORT, None))}
    return {
        name: sigmoid_loss(of_policy, tiny.preference_log_probs(untouched, sequences))
        for name, sequences in references.items()
    }


def kto_losses(policy: Any, untouched: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the loss of KTO (arXiv:2402.01306, equation 8), with the divergence as its section 4.1 estimates it."""
    import torch

    sides = [sequences_of_kto(batch, prefix) for prefix in ("", "KL_")]
    policy_log_probs, policy_mismatched = (
        torch.cat(tiny.preference_log_probs(policy, sequences, differentiable=True)) for sequences in sides
    )
    is_desirable = torch.tensor(batch["label"])
    losses = {}
    for name, part in {"right": slice(None), "wrong": slice(SHORT)}.items():
        log_probs, mismatched = (
            torch.cat(tiny.preference_log_probs(untouched, cut(sequences, part))) for sequences in sides
        )
        divergence = (policy_mismatched - mismatched).mean().detach().clamp(min=0)
        gain = BETA * (policy_log_probs - log_probs - divergence)
        losses[name] = (1 - torch.where(is_desirable, gain, -gain).sigmoid()).mean()
    return losses


def sequences_of_kto(batch: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return ids and masks by the names of 1.8.0. Up to 1.7.1 a batch has others, and at first labels for a mask."""
    names = f"{prefix}{{}}" if f"{prefix}input_ids" in batch else f"{prefix}completion_{{}}"
    labels = batch.get(f"{prefix}completion_labels")
    return {
        "input_ids": batch[names.format("input_ids")],
        "attention_mask": batch[names.format("attention_mask")],
        "completion_mask": batch[f"{prefix}completion_mask"] if labels is None else (labels != -100).long(),
    }


def cut(sequences: Mapping[str, Any], part: slice) -> dict[str, Any]:
    """Return ids and masks of which each sequence, without its padding, is cut to ``part``."""
    from torch.nn.utils.rnn import pad_sequence

    is_token = sequences["attention_mask"].bool()
    return {
        name: pad_sequence(
            [row[own][part] for row, own in zip(sequences[name], is_token, strict=True)], batch_first=True
        )
        for name in ("input_ids", "attention_mask", "completion_mask")
    }
