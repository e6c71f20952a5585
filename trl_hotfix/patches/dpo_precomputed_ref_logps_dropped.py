"""Two places drop DPO's precomputed reference log-probs before the loss.

``precompute_ref_log_probs=True`` adds the columns ``ref_chosen_logps`` and ``ref_rejected_logps`` to the datasets. In
0.12.0-0.12.2 ``_set_signature_columns_if_needed`` does not list them, so ``remove_unused_columns`` (on by default)
drops them. ``PreferenceCollator.torch_call`` does not put them into the batch either, so both places have to be
repaired (TRL issue 2423).

As TRL 0.13.0 does (pull request 2431), the two columns are added to the signature, and the collator adds
``torch.tensor([example[name] for example in examples])``, shape ``(batch,)``.
"""

from __future__ import annotations

import functools
import logging
import math
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..authoring import act, argument, judge
from ..model import Outcome
from ..testing import dpo_stub, tiny_causal_lm

_COLUMNS = ("ref_chosen_logps", "ref_rejected_logps")
_warned: weakref.WeakSet[Any] = weakref.WeakSet()


def keep_the_columns(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """List the two columns among those that the collator reads."""
    columns_unset = instance._signature_columns is None
    result = wrapped(*args, **kwargs)
    if columns_unset:
        columns = instance._signature_columns
        instance._signature_columns = [*columns, *(name for name in _COLUMNS if name not in columns)]
        if getattr(instance, "precompute_ref_log_probs", True):
            act()
    collator: Any = getattr(instance, "data_collator", None)
    if type(collator).__name__ == "PreferenceCollator" and instance.args.dataloader_num_workers > 0:
        # A worker that is not forked unpickles the collator and imports an unpatched class. A patched function is
        # pickled under a name of trl_hotfix, which applies the patch in the worker as well. A bound method is pickled
        # under its own name.
        collator.torch_call = functools.partial(type(collator).torch_call, collator)
    return result


def keep_the_values(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Put the values of the two columns into the batch."""
    batch = wrapped(*args, **kwargs)
    examples = argument(wrapped, args, kwargs, "examples")
    if all(name in examples[0] and name not in batch for name in _COLUMNS):
        import torch

        act()
        batch.update({name: torch.tensor([example[name] for example in examples]) for name in _COLUMNS})
    return batch


def warn_of_a_collator_that_drops_them(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Warn once per trainer if a training batch lacks the two values although they were precomputed."""
    if getattr(instance, "_precomputed_train_ref_log_probs", False) and instance not in _warned:
        batch = argument(wrapped, args, kwargs, "batch")
        training = argument(wrapped, args, kwargs, "train_eval") == "train"
        if training and any(name not in batch for name in _COLUMNS):
            _warned.add(instance)
            act()
            logging.getLogger("trl_hotfix").warning(
                "precompute_ref_log_probs=True, but the batches have no %s: the data collator (%s) drops them, and the "
                "reference is computed again in every step, from the policy itself if there is neither a ref_model nor "
                "PEFT. Let the collator pass both on as float tensors of shape (batch,)",
                " and ".join(_COLUMNS),
                type(instance.data_collator).__qualname__,
            )
    return wrapped(*args, **kwargs)


def precomputed_reference_is_in_the_loss(module: ModuleType) -> Outcome:
    """Take a row from the dataset to the loss. Its reference log-probs are not the policy's.

    Right is ``-log sigmoid(beta * ((pi_chosen - pi_rejected) - (ref_chosen - ref_rejected)))`` (Rafailov et al. 2023,
    arXiv:2305.18290, equation 7) with the row's own ``ref``; with the policy as its own reference it is log 2.
    """
    ref_chosen, ref_rejected = -1.0, -3.0
    row = {
        "prompt_input_ids": [1, 2],
        "chosen_input_ids": [3, 4],
        "rejected_input_ids": [5, 6],
        "ref_chosen_logps": ref_chosen,
        "ref_rejected_logps": ref_rejected,
    }
    model = tiny_causal_lm()
    trainer = dpo_stub(module, model=model, ref_model=None, precompute_ref_log_probs=True, _signature_columns=None)
    trainer._set_signature_columns_if_needed()
    kept = {name: value for name, value in row.items() if name in trainer._signature_columns}
    batch = module.PreferenceCollator(pad_token_id=0)([kept])
    loss, metrics = trainer.get_batch_loss_metrics(model, batch, train_eval="train")
    chosen, rejected = float(metrics["logps/chosen"]), float(metrics["logps/rejected"])
    margin = trainer.args.beta * ((chosen - rejected) - (ref_chosen - ref_rejected))
    return judge(
        float(loss.detach()),
        right=math.log1p(math.exp(-margin)),
        wrong=math.log(2),
        columns_kept=sum(name in kept for name in _COLUMNS),
        in_batch=sum(name in batch for name in _COLUMNS),
    )
