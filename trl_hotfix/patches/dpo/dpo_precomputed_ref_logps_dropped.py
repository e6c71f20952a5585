"""Two places drop DPO's precomputed reference log-probs before the loss.

``precompute_ref_log_probs=True`` adds the columns ``ref_chosen_logps`` and ``ref_rejected_logps`` to the datasets. In
0.12.0-0.12.2 ``_set_signature_columns_if_needed`` does not list them, so ``remove_unused_columns`` (on by default)
drops them. ``PreferenceCollator.torch_call`` does not put them into the batch either, so both places have to be
repaired (TRL issue 2423).

As TRL 0.13.0 does (pull request 2431), the wrappers add the two columns to the signature, and to the batch
``torch.tensor([example[name] for example in examples])``, shape ``(batch,)``.
"""

from __future__ import annotations

import functools
import logging
import math
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, Once, judge, wrapper
from ...model import Outcome
from ...testing import dpo_stub, tiny_causal_lm

_COLUMNS = ("ref_chosen_logps", "ref_rejected_logps")
_first_warning = Once()


@wrapper
def keep_the_columns(call: Call) -> Any:
    """List the two columns among those that the collator reads."""
    trainer = call.trainer
    columns_unset = trainer._signature_columns is None
    result = call()
    if columns_unset:
        trainer._signature_columns = [*trainer._signature_columns, *_COLUMNS]
        if trainer.precompute_ref_log_probs:
            call.act()
    collator = trainer.data_collator
    if type(collator).__name__ == "PreferenceCollator" and trainer.args.dataloader_num_workers:
        # A worker that is not forked unpickles the collator and imports an unpatched class. A patched function is
        # pickled under a name of trl_hotfix, which applies the patch in the worker as well. A bound method is pickled
        # under its own name.
        collator.torch_call = functools.partial(type(collator).torch_call, collator)
    return result


@wrapper
def keep_the_values(call: Call) -> Any:
    """Put the values of the two columns into the batch."""
    batch, examples = call(), call["examples"]
    if all(name in examples[0] for name in _COLUMNS):
        import torch

        call.act()
        batch.update({name: torch.tensor([example[name] for example in examples]) for name in _COLUMNS})
    return batch


@wrapper
def warn_of_a_collator_that_drops_them(call: Call) -> Any:
    """Warn once per trainer if a training batch lacks the two values although they were precomputed."""
    trainer = call.trainer
    if trainer._precomputed_train_ref_log_probs:
        batch, training = call["batch"], call["train_eval"] == "train"
        if training and any(name not in batch for name in _COLUMNS) and _first_warning(trainer):
            call.act()
            logging.getLogger("trl_hotfix").warning(
                "precompute_ref_log_probs=True, but the batches have no %s: the data collator (%s) drops them, and the "
                "reference is computed again in every step, from the policy itself if there is neither a ref_model nor "
                "PEFT. Let the collator pass both on as float tensors of shape (batch,)",
                " and ".join(_COLUMNS),
                type(trainer.data_collator).__qualname__,
            )
    return call()


def precomputed_reference_is_in_the_loss(module: ModuleType) -> Outcome:
    """Take a row from the dataset to the loss, and differentiate this by the logit of the chosen 3 after 2.

    The reference of the row has a margin of 2. With the bug the policy is its own reference, with its own margin.
    """
    import torch

    model = tiny_causal_lm()
    trainer = dpo_stub(
        module,
        model=model,
        ref_model=None,
        precompute_ref_log_probs=True,
        state=SimpleNamespace(global_step=0),
        data_collator=module.PreferenceCollator(pad_token_id=0),
        _precomputed_train_ref_log_probs=True,
        _signature_columns=None,
    )
    trainer._set_signature_columns_if_needed()
    row: dict[str, Any] = {"prompt_input_ids": [1, 2], "chosen_input_ids": [3], "rejected_input_ids": [4]}
    row |= dict(zip(_COLUMNS, (-1.0, -3.0), strict=True))
    batch = trainer.data_collator([{name: row[name] for name in row if name in trainer._signature_columns}])
    loss, _ = trainer.get_batch_loss_metrics(model, batch, train_eval="train")
    (gradient,) = torch.autograd.grad(loss, model.weight)
    margin = float((model.weight[2, 3] - model.weight[2, 4]).detach())
    beta = trainer.args.beta
    return judge(float(gradient[2, 3]), right=-beta / (1 + math.exp(beta * (margin - 2))), wrong=-beta / 2)
