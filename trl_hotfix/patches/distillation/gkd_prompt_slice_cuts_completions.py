"""GKD begins its loss at the column where the longest prompt of the batch would end, and cuts other completions there.

The data collator pads on the left: all rows end at the same column, and a completion begins where its own length has
it. ``compute_loss`` slices logits and labels by the width of ``inputs["prompts"]``. That is right for completions that
were generated behind these prompts, and for rows of the dataset only if the longest prompt belongs to the longest
sequence and no completion is longer than its own. The labels of these rows are masked up to the completion, so the
wrapper has the slice begin at the first column, as TRL 1.7.0 does (pull request 6006).
"""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

from ...authoring import Call, absent, judge, wrapper
from ...model import Outcome
from ...testing import absent_if_reexported, distillation_stub


@wrapper
def begin_at_the_first_column(call: Call) -> Any:
    """Give ``compute_loss`` prompts of one column, if a row begins before its prompt does in ``inputs["prompts"]``.

    What is generated begins with these prompts.
    """
    inputs = call["inputs"]
    prompts, prompt_mask = inputs["prompts"], inputs.get("prompt_attention_mask")
    # Liger's loss goes by the labels alone.
    if getattr(call.trainer, "use_liger_gkd_loss", False) or prompt_mask is None:
        return call()
    if not (inputs["attention_mask"][:, : prompts.shape[1]] > prompt_mask).any():
        return call()
    return call.with_(inputs={**inputs, "prompts": prompts[:, :1]})()


def loss_is_over_whole_completions(module: ModuleType) -> Outcome:
    """Differentiate the sum of a logit of each label. The longest prompt ends behind a completion's start."""
    import torch

    if reexported := absent_if_reexported(module, module.GKDTrainer.compute_loss):
        return reexported
    if "prompts" not in inspect.unwrap(module.GKDTrainer.compute_loss).__code__.co_consts:
        return absent("the loss goes by the labels")
    token_ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    batch = {
        "input_ids": token_ids,
        "attention_mask": torch.ones_like(token_ids),
        "labels": torch.tensor([[-100, -100, 3], [-100, 5, 6]]),
        "prompts": torch.tensor([[1, 2], [0, 4]]),
        "prompt_attention_mask": torch.tensor([[1, 1], [0, 1]]),
    }

    def sum_of_logits(student_logits: Any, labels: Any, **others: Any) -> Any:
        return student_logits[labels != -100][:, 0].sum()

    trainer = distillation_stub(module.GKDTrainer, module.GKDConfig, generalized_jsd_loss=sum_of_logits)
    (gradient,) = torch.autograd.grad(trainer.compute_loss(trainer.model, batch), trainer.model.weight)
    return judge(float(gradient.sum()), right=3.0, wrong=2.0)
