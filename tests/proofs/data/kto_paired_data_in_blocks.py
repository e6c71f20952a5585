"""Train two steps of two micro-batches of four rows with the real KTOTrainer on eight pairs, and evaluate.

Losses and gradients are compared with those of the paper's formula on the rows in turn (right) and in blocks (wrong).
Their tokens are made without TRL. BCO prepares its data in the same way.
"""

from __future__ import annotations

import inspect
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

from trl_hotfix.authoring import absent
from trl_hotfix.model import Verdict

import tiny
from tiny.data import preferences_of_several_lengths
from tiny.dpo_steps import MicroBatch, assert_right
from tiny.grpo_steps import judged_steps, several_runs

# BCO does not start without it.
OVERLAYS = ("scikit-learn",)
PARITY = False
DATA = True
VARIANTS = "the data are prepared before the model is compiled, and whatever part of it is trained"

BETA, BATCH, BOS, EOS = 0.5, 4, "<unk>", "<eos>"


@dataclass(frozen=True)
class Row:
    """A completion, by the number of its pair."""

    pair: int
    is_chosen: bool


def in_blocks(pairs: int) -> list[Row]:
    return [Row(pair, is_chosen) for is_chosen in (True, False) for pair in range(pairs)]


def in_turn(pairs: int) -> list[Row]:
    """Return chosen and rejected rows in turn, each rejected one two pairs early."""
    return [row for pair in range(pairs) for row in (Row(pair, True), Row((pair + 2) % pairs, False))]


def labelled(pairs: int) -> list[Row]:
    """Return the rows of ``tiny.labelled``."""
    return [Row(pair, is_chosen) for pair in range(pairs) for is_chosen in (True, False)]


def preferences() -> Any:
    """Return eight pairs whose prompts begin with the token that releases put there."""
    return preferences_of_several_lengths().map(lambda row: {"prompt": f"{BOS} {row['prompt']}"})


def log_prob(model: Any, prompt: str, completion: str) -> Any:
    import torch

    words = tiny.tokenizer()
    prompt_ids, completion_ids = (words(text)["input_ids"] for text in (prompt, f"{completion} {EOS}"))
    ids = torch.tensor([prompt_ids + completion_ids])
    log_probs = model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
    return log_probs.gather(1, ids[0, 1:, None])[len(prompt_ids) - 1 :].sum()


def kto_loss(policy: Any, reference: Any, rows: list[Row]) -> Any:
    """Equations 7 and 8 of the paper (arXiv:2402.01306): the KL is that of each prompt with the completion before."""
    import torch

    data = preferences()
    prompts = [data[row.pair]["prompt"] for row in rows]
    completions = [data[row.pair]["chosen" if row.is_chosen else "rejected"] for row in rows]

    def log_ratios(completions: list[str]) -> Any:
        texts = list(zip(prompts, completions, strict=True))
        with torch.no_grad():
            of_reference = torch.stack([log_prob(reference, *text) for text in texts])
        return torch.stack([log_prob(policy, *text) for text in texts]) - of_reference

    kl = log_ratios([completions[-1], *completions[:-1]]).mean().clamp(min=0).detach()
    signs = torch.tensor([1.0 if row.is_chosen else -1.0 for row in rows])
    return (1 - torch.sigmoid(BETA * signs * (log_ratios(completions) - kl))).mean()


def kto_steps(train_data: Any, eval_data: Any, orders: dict[str, Any], **settings: Any) -> tiny.FormulaSteps:
    """Train two steps and evaluate. ``orders`` gives the rows of so many pairs, as each formula has them."""
    import torch
    from transformers import TrainerCallback

    trainer_class, config_class = tiny.classes("KTO")
    run = tiny.FormulaSteps()
    # The method that the evaluation calls too.
    method = "get_batch_loss_metrics" if hasattr(trainer_class, "get_batch_loss_metrics") else "compute_loss"

    def recorded(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        training = self.model.training
        number = sum(micro_batch.is_training == training for micro_batch in run.micro_batches)
        expected = {}
        for name, order in orders.items():
            rows = order(training)
            begin = number * BATCH % len(rows)
            with torch.enable_grad():
                expected[name] = kto_loss(policy, reference, rows[begin : begin + BATCH])
        if training:
            run.add(expected, trainable)
        result = getattr(super(Recorder, self), method)(model, inputs, *args, **kwargs)
        loss = float((result[0] if isinstance(result, tuple) else result).detach())
        values = {name: float(value.detach()) for name, value in expected.items()}
        run.micro_batches.append(MicroBatch({}, training, loss, values, 0))
        return result

    Recorder = type("Recorder", (trainer_class,), {method: recorded})

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *args: Any, optimizer: Any, **kwargs: Any) -> None:
            with torch.no_grad():
                for number, parameter in enumerate(trainable.values()):
                    index = torch.arange(parameter.numel()).reshape(parameter.shape)
                    parameter.add_(0.1 * torch.cos(number + index))
            getattr(optimizer, "optimizer", optimizer).register_step_pre_hook(lambda *_: run.end_step(trainable))

    words = tiny.tokenizer()
    words.bos_token = BOS
    defaults = {"max_steps": 2, "gradient_accumulation_steps": 2, "optim": "sgd", "learning_rate": 0.5, "beta": BETA}
    defaults |= {"max_length": 32, "max_prompt_length": 16}
    defaults |= {"per_device_train_batch_size": BATCH, "per_device_eval_batch_size": BATCH}
    with tempfile.TemporaryDirectory() as folder:
        policy, reference = tiny.llama(folder, seed=0), tiny.llama(folder, seed=1)
        run.trainer = tiny.trainer(
            Recorder,
            model=policy,
            ref_model=tiny.llama(folder, seed=1),
            args=tiny.config(config_class, **{**defaults, **settings}),
            train_dataset=train_data,
            eval_dataset=eval_data,
            tokenizer=words,
            callbacks=[Steps()],
        )
        trainable = dict(policy.named_parameters())
        run.measure_factor(run.trainer)
        run.trainer.train()
        run.trainer.evaluate()
    return run


def train() -> tiny.TrainingResult:
    from trl import data_utils

    if "desc" not in inspect.signature(data_utils.maybe_unpair_preference_dataset).parameters:
        return tiny.TrainingResult(absent("KTO shuffles its data in this release"))
    data = preferences()
    orders = {
        name: lambda training, order=order: order(8 if training else 6)
        for name, order in {"right": in_turn, "wrong": in_blocks}.items()
    }
    run = kto_steps(data, data.select(range(6)), orders)
    result = run.result
    result.outcome = judged_steps(run)
    order = in_turn if result.outcome.verdict is Verdict.FIXED else in_blocks
    by_hand = data_utils.unpair_preference_dataset(data)
    for unpaired in (by_hand, *datasets_of_bco(data)):
        assert list(unpaired["label"]) == [row.is_chosen for row in order(8)]
    # Each process has a block of its own.
    by_two = data_utils.unpair_preference_dataset(data, num_proc=2)
    assert list(by_two["label"]) == 2 * [row.is_chosen for row in order(4)]
    # From 1.3 to 1.7 KTO has itself, with its weights, in the fingerprints of what it makes of these rows.
    tiny.state.fingerprints[:] = [by_hand._fingerprint, by_two._fingerprint]
    return result


def datasets_of_bco(data: Any) -> list[Any]:
    """Return what BCO trains on and evaluates, if there is BCO and it unpairs the data itself."""
    trainer_class, config_class = tiny.classes("BCO")
    module = sys.modules[trainer_class.__module__] if trainer_class else None
    if not hasattr(module, "maybe_unpair_preference_dataset"):
        return []
    words = tiny.tokenizer()
    words.bos_token = BOS
    with tempfile.TemporaryDirectory() as folder:
        trainer = tiny.trainer(
            trainer_class,
            model=tiny.llama(folder, seed=0),
            ref_model=tiny.llama(folder, seed=1),
            args=tiny.config(config_class, max_length=32, max_prompt_length=16),
            train_dataset=data,
            eval_dataset=data,
            tokenizer=words,
        )
    return [trainer.train_dataset, trainer.eval_dataset]


def unaffected() -> tiny.TrainingResult:
    """Train on two pairs, which are a batch of two of each kind, and on rows that are not paired."""
    data = preferences()
    pairs = data.select(range(2))
    runs = {
        "two pairs": kto_steps(pairs, pairs, {"right": lambda training: in_blocks(2)}),
        "rows": kto_steps(
            tiny.labelled(data), tiny.labelled(pairs), {"right": lambda training: labelled(8 if training else 2)}
        ),
    }
    for run in runs.values():
        assert_right(run)
    return several_runs(runs, absent("the rows are not sorted by kind"))
