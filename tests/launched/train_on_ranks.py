"""Train with a real trainer, on one rank or on several, and save the sum of the gradients of all optimizer steps.

    python train_on_ranks.py OUT.pt CASE on|off

One process has the rows of both ranks: those of GRPO in the same micro-batch, others in twice as many micro-batches.
The learning rate is 0, so that a release may take the rows of a generation in any order.
"""

from __future__ import annotations

import inspect
import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

LENGTHS: tuple[tuple[int, ...], ...] = ((2, 4, 8, 6, 3, 5, 7, 2), (2, 3, 2, 3, 4, 4, 2, 8))
"""Tokens of the completions of the groups on each rank, with the end of sequence."""

RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))

NORMALISATION, DAPO, KL = "grpo-loss-normalisation", "grpo-dapo-normaliser", "grpo-kl-metric-token-level"
NORMALISER, GKD = "sft-loss-normaliser-counts-first-token", "gkd-onpolicy-normaliser-from-dataset-labels"
GOLD, SMOOTHING = "gold-loss-normaliser-counts-dataset-labels", "sft-label-smoothing-times-gas"
COUNTED, MICRO_BATCHES = "sft-tokens-weighted-per-rank", "gkd-grad-accum-scaling"
TRUNCATED, LIGER = "grpo-dapo-normaliser-counts-masked-tokens", "grpo-liger-dapo-normalizer"
AUX = ("sft-aux-loss-counted-twice", "sft-moe-aux-loss-times-gas")


def grpo(trainer_class: type, folder: str, steps: int = 1, micro_batches: int = 1, **settings: Any) -> Any:
    """Return a trainer that takes the rows of a generation in so many optimizer steps of so many micro-batches."""
    import tiny

    lengths = LENGTHS[RANK] if RANKS > 1 else LENGTHS[0] + LENGTHS[1]
    parts = steps * micro_batches
    trainer = tiny.grpo(
        trainer_class,
        tiny.llama(folder, seed=0),
        lengths=lengths,
        per_device_train_batch_size=len(lengths) // parts,
        gradient_accumulation_steps=micro_batches,
        steps_per_generation=parts,
        max_steps=steps,
        learning_rate=0.0,
        **settings,
    )
    if trainer.ref_model is not None:
        # The reference must differ from the policy, or the divergence is 0.
        for parameter in trainer.ref_model.parameters():
            parameter.data.mul_(1.5)
    return trainer


def grpo_that_truncates(trainer_class: type, folder: str, **settings: Any) -> Any:
    """Return a trainer whose longest completions have no end, and are out of the loss."""
    trainer = grpo(trainer_class, folder, mask_truncated_completions=True, **settings)
    complete = trainer.model.generate

    def generate(*args: Any, **kwargs: Any) -> Any:
        ids = complete(*args, **kwargs)
        ids[:, -1] = ids[:, -1].masked_fill(ids[:, -1] == 1, 7)
        return ids

    trainer.model.generate = generate
    return trainer


def grpo_with_liger(trainer_class: type, folder: str, **settings: Any) -> Any:
    """Return a trainer with the loss of Liger, which is torch's own operations, and none of its kernels."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
    from trl.models.utils import _ForwardRedirection

    trainer = grpo(trainer_class, folder, **settings)
    trainer.use_liger_loss = trainer.use_liger_kernel = True
    trainer._forward_redirection = _ForwardRedirection()
    of_trainer = {"beta": trainer.beta, "loss_type": trainer.loss_type, "temperature": trainer.temperature}
    loss = LigerFusedLinearGRPOLoss(**of_trainer, compiled=False, use_ref_model=False)
    # Releases differ in the name.
    names = inspect.unwrap(trainer.compute_liger_loss).__code__.co_names
    setattr(trainer, "liger_loss" if "liger_loss" in names else "liger_grpo_loss", loss)
    return trainer


def sft(trainer_class: type, folder: str, *, experts: bool = False, **settings: Any) -> Any:
    """Return a trainer on rows of unequal lengths, all of whose tokens are labels."""
    from datasets import Dataset
    from trl import SFTConfig

    import tiny

    texts = [f"w{index} w{index + 1}" + " w9 w8" * (index % 5) for index in range(8)]
    coefficient = {"router_aux_loss_coef": 0.5} if experts else {}
    return tiny.trainer(
        trainer_class,
        model=tiny.mixtral(folder, seed=0, coefficient=0.5) if experts else tiny.llama(folder, seed=0),
        args=tiny.config(
            SFTConfig, **accumulated(2), **coefficient, **settings, dataset_text_field="text", max_length=16
        ),
        train_dataset=Dataset.from_list([{"text": text} for text in texts]),
        tokenizer=tiny.tokenizer(),
        data_collator=collated,
    )


def collated(examples: list[Any]) -> dict[str, Any]:
    import torch

    rows = [torch.tensor(example["input_ids"]) for example in examples]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


def gkd(trainer_class: type, folder: str, **settings: Any) -> Any:
    """Return a trainer on conversations of unequal lengths, whose student writes longer ones in every micro-batch."""
    import torch
    from datasets import Dataset

    import tiny

    calls = itertools.count(RANK)

    def generate(input_ids: Any, **kwargs: Any) -> Any:
        call = next(calls)
        rows = [[*(10 + (11 * row + 3 * place + call) % 50 for place in range(2 + 2 * call)), 1] for row in range(2)]
        return SimpleNamespace(sequences=torch.cat([input_ids, torch.tensor(rows)], dim=1))

    words = tiny.tokenizer()
    words.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    answers = [" ".join(["w5"] * (1 + index)) for index in range(4)]
    conversations = [
        [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": answer}] for answer in answers
    ]
    student, teacher = tiny.llama(folder, seed=0), tiny.llama(folder, seed=1)
    student.generate = generate
    _, config_class = tiny.classes("GKD")
    return tiny.trainer(
        trainer_class,
        model=student,
        teacher_model=teacher,
        args=tiny.config(config_class, **accumulated(1), **settings, max_new_tokens=8, max_length=16, temperature=1.0),
        train_dataset=Dataset.from_list([{"messages": messages} for messages in conversations]),
        tokenizer=words,
    )


def gold(trainer_class: type, folder: str, **settings: Any) -> Any:
    """Return a trainer on completions of unequal lengths, whose student writes longer ones in every micro-batch."""
    import torch
    from datasets import Dataset

    import tiny

    calls = itertools.count(RANK)

    def generate(input_ids: Any, **kwargs: Any) -> Any:
        call = next(calls)
        rows = [[*(10 + (11 * row + 3 * place + call) % 50 for place in range(2 + 2 * call)), 1] for row in range(2)]
        return SimpleNamespace(sequences=torch.cat([input_ids, torch.tensor(rows)], dim=1))

    rows = [
        {"input_ids": [4, 5, *[8] * (1 + index)], "completion_mask": [0, 0, *[1] * (1 + index)]} for index in range(4)
    ]
    student, teacher = tiny.llama(folder, seed=0), tiny.llama(folder, seed=1)
    student.generate = generate
    _, config_class = tiny.classes("GOLD")
    of_generation = {"max_completion_length": 8, "max_length": 16, "temperature": 1.0}
    return tiny.trainer(
        trainer_class,
        model=student,
        teacher_model=teacher,
        args=tiny.config(config_class, **accumulated(1), **settings, **of_generation),
        train_dataset=Dataset.from_list([{**row, "original_prompt_text": "w1 w2"} for row in rows]),
        tokenizer=tiny.tokenizer(),
    )


def accumulated(micro_batches: int) -> dict[str, Any]:
    return {"gradient_accumulation_steps": micro_batches * 2 // RANKS, "learning_rate": 0.0}


Make = Callable[..., Any]
CASES: Mapping[str, tuple[str, Make, Mapping[str, Any], Mapping[str, Mapping[str, Any]]]] = {
    "global": ("GRPO", grpo, {"beta": 0.1}, {NORMALISATION: {"normalisation": "global"}}),
    "sequence": ("GRPO", grpo, {"beta": 0.1}, {NORMALISATION: {"normalisation": "sequence"}}),
    "dapo": ("GRPO", grpo, {"steps": 2, "loss_type": "dapo", "beta": 0.0}, {DAPO: {}}),
    "truncated": ("GRPO", grpo_that_truncates, {"loss_type": "dapo", "beta": 0.0}, {TRUNCATED: {}}),
    "liger": ("GRPO", grpo_with_liger, {"micro_batches": 2, "loss_type": "dapo", "beta": 0.0}, {LIGER: {}}),
    "kl": ("GRPO", grpo, {"loss_type": "grpo", "beta": 0.1}, {KL: {}}),
    "tokens": ("SFT", sft, {}, {NORMALISER: {}}),
    "counted": ("SFT", sft, {}, {COUNTED: {}}),
    "experts": ("SFT", sft, {"experts": True}, {patch: {} for patch in AUX}),
    "generated": ("GKD", gkd, {"lmbda": 1.0}, {GKD: {}}),
    "dataset": ("GKD", gkd, {"lmbda": 0.0}, {GKD: {}}),
    "buffered, generated": ("GOLD", gold, {"lmbda": 1.0}, {GOLD: {}}),
    "buffered, dataset": ("GOLD", gold, {"lmbda": 0.0}, {GOLD: {}}),
    "smoothed": ("SFT", sft, {"label_smoothing_factor": 0.2}, {SMOOTHING: {}}),
}
"""The trainer, how it is made, its settings, and the patches with their options."""


def main(out: str, case: str, switch: str) -> None:
    import torch
    from transformers import TrainerCallback

    import trl_hotfix

    import tiny

    method, make, settings, patches = CASES[case]
    if switch == "on":
        options = {patch: dict(chosen) for patch, chosen in patches.items() if chosen}
        trl_hotfix.apply(only=list(patches), options=options)
    sums: dict[str, Any] = {}
    wrapped_as: list[str] = []

    class SumGradients(TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            wrapped_as.append(type(trainer.model_wrapped).__name__)
            for name, gradient in tiny.gradients_of(trainer.model).items():
                sums[name] = sums.get(name, 0) + gradient

    class KeepDivergences(tiny.classes(method)[0]):  # type: ignore[misc]
        divergences: tuple[float, ...] = ()

        def log(self, *args: Any, **kwargs: Any) -> Any:
            metrics = getattr(self, "_metrics", {})
            self.divergences += tuple(metrics.get("train", metrics).get("kl", ()))
            return super().log(*args, **kwargs)

    with tempfile.TemporaryDirectory() as folder:
        trainer = make(KeepDivergences, folder, **settings)
        trainer.add_callback(SumGradients())
        trainer.train()
    if RANK == 0:
        torch.save({"wrapped_as": wrapped_as[0], "kl": list(trainer.divergences[:1]), "gradients": sums}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
