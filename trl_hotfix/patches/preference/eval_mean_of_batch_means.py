"""TRL logs the mean of the batch means of an evaluation, so that a short last batch weighs as a full one.

A trainer appends one mean for each batch to a list, and ``log`` divides the sum of the list by its length (1.16.0
dpo_trainer.py:1702, grpo_trainer.py:3306; ``torch.tensor(metrics).mean()`` in cpo_trainer.py:1069 and in DPO before
0.29.0). 9 rows in batches of 8: row 9 weighs as much as the other 8 together.

The wrappers around what evaluates a batch turn these means into ``Mean`` with its number of rows, or of labels for the
token accuracy of SFT. ``log`` then finds the mean of the rows in the list. Minima, maxima, standard deviations and
means over tokens stay: how many a batch has is not known here.
"""

from __future__ import annotations

import inspect
import re
from contextlib import ExitStack, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import (
    Call,
    Mean,
    absent,
    count_of_all_ranks,
    counted,
    judge,
    mean_of_all,
    shadowed,
    without_doubled_rows,
    wrapper,
)
from ...model import Outcome
from ...testing import absent_if_reexported, default_arguments, stub_that_logs, trainer_class_of

_OF_ROWS = re.compile(
    r"(eval_)?(rewards/.+(?<!/std)|logps/(chosen|rejected)|log_odds_(ratio|chosen)|mean_reward|accuracy|margin|reward"
    r"|frac_reward_zero_std|completion_length|completions/(mean_length|clipped_ratio))"
)
_OF_LABELS = re.compile("mean_token_accuracy")


def _lists(trainer: Any) -> list[Any]:
    """Return the lists by name of every mode. Before 0.20.0 an evaluation apart from training counts as training."""
    stored = getattr(trainer, "_stored_metrics", None)
    return list(trainer._metrics.values()) if stored is None else [stored["eval"]]


def _evaluated(call: Call, count: float, names: re.Pattern[str]) -> Any:
    with ExitStack() as stack:
        for metrics in _lists(call.trainer):
            stack.enter_context(counted(metrics, count, names))
        return call()


@wrapper
def note_the_pairs(call: Call) -> Any:
    """Note of how many pairs the metrics of an evaluated batch are means. Leave out those doubled to fill the ranks."""
    if call.is_training:
        return call()
    inputs, trainer = call["inputs"], call.trainer
    columns = [name for name in inputs if name.endswith("input_ids")]
    rows = len(inputs[columns[0]]) * trainer.accelerator.num_processes
    if columns == ["input_ids"]:
        # All sides are in one column; TPO has a third one.
        rows //= 3 if getattr(trainer, "tpo_alpha", 0) else 2
    count = len(without_doubled_rows(trainer, range(rows)))
    gather = trainer.accelerator.gather
    if count == rows or "_metrics" not in vars(trainer):
        return _evaluated(call, count, _OF_ROWS)
    with shadowed(trainer.accelerator, "gather", lambda tensor: without_doubled_rows(trainer, gather(tensor))):
        return _evaluated(call, count, _OF_ROWS)


@wrapper
def note_the_rows(call: Call) -> Any:
    """Note of how many rows the metrics of an evaluated batch are means."""
    if call.is_training:
        return call()
    inputs = call["inputs"]
    # A list of prompts, or rows of both sides.
    count = len(inputs if isinstance(inputs, list) else inputs["input_ids"])
    return _evaluated(call, count_of_all_ranks(call.trainer, count), _OF_ROWS)


@wrapper
def note_the_labels(call: Call) -> Any:
    """Note of how many labels the token accuracy of an evaluated batch is the mean."""
    labels = None if call.is_training else call["inputs"].get("labels")
    if labels is None:
        return call()
    count = int((labels[..., 1:] != -100).sum())
    return _evaluated(call, count_of_all_ranks(call.trainer, count), _OF_LABELS)


@wrapper
def weigh_by_rows(call: Call) -> Any:
    """Replace the means of batches of unequal size by the mean of all their rows."""
    for metrics in _lists(call.trainer):
        for values in metrics.values():
            mean = mean_of_all(values)
            if mean is not None and len({each.count for each in values}) > 1:
                values[:] = [Mean(mean, sum(each.count for each in values))]
                call.act()
    return call()


def evaluation_is_the_mean_of_its_rows(module: ModuleType) -> Outcome:
    """Evaluate a batch whose rows have 0 each, and one of half as many that have 1, and log."""
    import torch

    if reexported := absent_if_reexported(module, trainer_class_of(module).log):
        return reexported
    is_sft = hasattr(module, "SFTTrainer")
    args = default_arguments(module.SFTConfig, n_gpu=1, loss_type="nll") if is_sft else None
    attributes: dict[str, Any] = {"compute_loss_context_manager": nullcontext, "label_smoother": None}
    attributes |= {"compute_loss_func": None, "model_accepts_loss_kwargs": False, "aux_loss_enabled": False}
    attributes |= {"num_virtual_tokens": 0, "use_dpo_data_collator": True, "_peft_has_been_casted_to_bf16": False}
    trainer, logged = stub_that_logs(module, args, **attributes)
    if "_metrics" in vars(trainer) and "mode" not in inspect.unwrap(type(trainer).log).__code__.co_varnames:
        return absent("training and evaluation have the same lists")
    trainer.accelerator.parallelism_config = None

    def compute(model: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        value = batch[0] if isinstance(batch, list) else float(batch["input_ids"][0, -1])
        if "_metrics" in vars(trainer):
            trainer._metrics["eval"]["rewards/margins"].append(value)
            return torch.zeros(())
        return torch.zeros(()), {"eval_rewards/margins": value}

    # Twice as many rows are pairs of both sides.
    for rows, value in ((4, 0), (2, 1)):
        ids = torch.tensor([[0, value]] * rows)
        if is_sft:
            trainer.compute_loss(_outputs, {"input_ids": ids, "labels": ids, "attention_mask": torch.ones(rows, 2)})
        elif hasattr(module, "RewardTrainer"):
            trainer.compute_loss(_outputs, {"input_ids": torch.cat([ids, 0 * ids])})
        else:
            trainer.compute_loss = trainer.get_batch_loss_metrics = compute
            batch = [float(value)] * rows if hasattr(module, "RepeatSampler") else {"input_ids": ids}
            trainer.prediction_step(trainer.model, batch, True)
    trainer.log({"eval_loss": 0.0})
    name = "mean_token_accuracy" if is_sft else "margin" if hasattr(module, "RewardTrainer") else "rewards/margins"
    return judge(logged[f"eval_{name}"], right=1 / 3, wrong=1 / 2)


def _outputs(input_ids: Any, labels: Any = None, **others: Any) -> Any:
    """Return the last token of each row as its reward, or logits for token 1 at every place."""
    import torch

    if labels is None:
        return SimpleNamespace(logits=input_ids[:, -1:].float())
    learned = labels[:, 1:] != -100
    right, nothing = learned & (labels[:, 1:] == 1), torch.zeros(learned.shape)
    sums = {"num_correct_tokens": right.sum(), "num_valid_tokens": learned.sum(), "entropy_sum": nothing.sum()}
    of_head = {"log_probs": nothing, "label_mask": learned, "entropy": nothing, "is_top1": right}
    logits = torch.tensor([0.0, 1.0]).expand(*labels.shape, 2)
    return _Outputs(loss=nothing.sum(), logits=logits, **of_head, **sums)


class _Outputs(SimpleNamespace):
    def __getitem__(self, name: Any) -> Any:
        return self.loss
