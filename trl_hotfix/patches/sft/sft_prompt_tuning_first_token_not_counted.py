"""SFT with prompt tuning learns the first token of each row, and transformers does not count it.

PEFT puts the embeddings of virtual tokens before a row, and the last of them predicts its first token. transformers
from 5.10.1 on counts ``labels[..., 1:]`` for ``num_items_in_batch``, since nothing predicts the first token of a row
without them (pull request 46204). The wrapper has it count the labels behind one more column.
"""

from __future__ import annotations

import inspect
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, judge, virtual_tokens_come_first, wrapper
from ...model import Outcome
from ...testing import stub_trainer


@wrapper
def count_what_virtual_tokens_predict(call: Call) -> Any:
    """Count all labels of a step, those of first tokens too, where a virtual token stands before each row."""
    trainer = call.trainer
    loss_func = getattr(trainer, "compute_loss_func", None)
    is_of_trl = loss_func is None or getattr(loss_func, "__module__", "").startswith("trl.")
    shifts = getattr(trainer, "_loss_shifts_labels", False)
    if not (shifts and is_of_trl and virtual_tokens_come_first(trainer.model)):
        return call()
    return call.with_(batch_samples=[_behind_a_column(batch) for batch in call["batch_samples"]])()


def _behind_a_column(batch: Any) -> Any:
    """Return the batch with ``labels`` ``(rows, 1 + length)``. transformers does not count the first column."""
    import torch

    if "labels" not in batch:
        return batch
    return {**batch, "labels": torch.cat([batch["labels"][:, :1], batch["labels"]], dim=1)}


def first_tokens_are_counted(module: ModuleType) -> Outcome:
    """Count the labels of a step of two rows with virtual tokens: seven are no padding, and two of these are first."""
    import torch
    from transformers import Trainer

    if "_loss_shifts_labels" not in inspect.unwrap(Trainer.__init__).__code__.co_names:
        return absent("this transformers counts first tokens")
    soft_prompt = SimpleNamespace(is_prompt_learning=True, peft_type="PROMPT_TUNING")
    trainer = stub_trainer(
        module.SFTTrainer,
        SimpleNamespace(average_tokens_across_devices=False, world_size=1, n_gpu=1),
        model=SimpleNamespace(active_peft_config=soft_prompt),
        model_accepts_loss_kwargs=True,
        compute_loss_func=None,
        _loss_shifts_labels=True,
        get_tp_size=lambda: 1,
        get_cp_size=lambda: 1,
        get_sp_size=lambda: 1,
    )
    step = [{"labels": torch.tensor([[5, 6, 7, 8], [9, 5, 6, -100]])}]
    return judge(float(trainer._get_num_items_in_batch(step, "cpu")), right=7.0, wrong=5.0)
