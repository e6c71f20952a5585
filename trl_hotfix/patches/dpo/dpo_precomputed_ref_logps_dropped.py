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
import inspect
import logging
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Once, act, argument
from ...model import Outcome, Verdict
from ...testing import (
    dpo_stub,
    judge_with_gradients,
    pair_log_probs,
    pair_loss,
    pair_micro_batches,
    recorded_warnings,
    tiny_causal_lm,
)

_COLUMNS = ("ref_chosen_logps", "ref_rejected_logps")
_first_warning = Once()


def keep_the_columns(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """List the two columns among those that the collator reads."""
    columns_unset = instance._signature_columns is None
    result = wrapped(*args, **kwargs)
    if columns_unset:
        instance._signature_columns = [*instance._signature_columns, *_COLUMNS]
        if instance.precompute_ref_log_probs:
            act()
    collator = instance.data_collator
    if type(collator).__name__ == "PreferenceCollator" and instance.args.dataloader_num_workers:
        # A worker that is not forked unpickles the collator and imports an unpatched class. A patched function is
        # pickled under a name of trl_hotfix, which applies the patch in the worker as well. A bound method is pickled
        # under its own name.
        collator.torch_call = functools.partial(type(collator).torch_call, collator)
    return result


def keep_the_values(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Put the values of the two columns into the batch."""
    batch = wrapped(*args, **kwargs)
    examples = argument(wrapped, args, kwargs, "examples")
    if all(name in examples[0] for name in _COLUMNS):
        import torch

        act()
        batch.update({name: torch.tensor([example[name] for example in examples]) for name in _COLUMNS})
    return batch


def warn_of_a_collator_that_drops_them(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Warn once per trainer if a training batch lacks the two values although they were precomputed."""
    if instance._precomputed_train_ref_log_probs:
        batch = argument(wrapped, args, kwargs, "batch")
        training = argument(wrapped, args, kwargs, "train_eval") == "train"
        if training and any(name not in batch for name in _COLUMNS) and _first_warning(instance):
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
    """Take rows from the dataset to the loss, in two steps and an evaluation. They have references of their own.

    Right is the loss with the reference of the row. Wrong is that with the policy as its own reference, log 2.
    """
    trainer = _stub(module)
    outcome = judge_with_gradients([trainer.model.weight], _losses(trainer))
    if outcome.verdict is Verdict.FIXED:
        columns = trainer._signature_columns
        if len(set(columns)) != len(columns) or not set(_COLUMNS) < set(columns):
            raise AssertionError(f"the columns that are kept are {columns}")
        # A release with the fix has its own columns among its names, and needs neither the warning nor what it is for.
        own_code = inspect.unwrap(module.PreferenceCollator.torch_call).__code__
        mistakes = [] if _COLUMNS[0] in own_code.co_consts else list(_mistakes_elsewhere(module))
        if mistakes:
            raise AssertionError("; ".join(mistakes))
    return outcome


def _stub(module: ModuleType, *, workers: int = 0, **attributes: Any) -> Any:
    """Return a trainer without ``ref_model`` that has precomputed the reference of its training set."""
    defaults: dict[str, Any] = {
        "model": tiny_causal_lm(),
        "ref_model": None,
        "precompute_ref_log_probs": True,
        "state": SimpleNamespace(global_step=0),
        "data_collator": module.PreferenceCollator(pad_token_id=0),
        "_precomputed_train_ref_log_probs": True,
        "_signature_columns": None,
    }
    trainer = dpo_stub(module, **{**defaults, **attributes})
    trainer.args.dataloader_num_workers = workers
    # transformers asks for the columns of the training set, and then for those of the evaluation set.
    trainer._set_signature_columns_if_needed()
    columns = trainer._signature_columns
    trainer._set_signature_columns_if_needed()
    if trainer._signature_columns != columns:
        raise AssertionError(f"the columns are {columns}, and at the second call {trainer._signature_columns}")
    return trainer


def _losses(trainer: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Give the loss of each micro-batch as it is measured, right and wrong."""
    import torch

    for micro_batch in pair_micro_batches():
        trainer.state.global_step = micro_batch.step
        trainer.model.train(micro_batch.is_training)
        rows = [
            {
                **{f"{name}_input_ids": getattr(pair, name) for name in ("prompt", "chosen", "rejected")},
                **dict(zip(_COLUMNS, pair.reference, strict=True)),
            }
            for pair in micro_batch.pairs
        ]
        kept = [{name: value for name, value in row.items() if name in trainer._signature_columns} for row in rows]
        batch = trainer.data_collator(kept)
        measured, _ = trainer.get_batch_loss_metrics(
            trainer.model, batch, train_eval="train" if micro_batch.is_training else "eval"
        )
        policy = pair_log_probs(trainer.model, micro_batch.pairs)
        chosen, rejected = torch.tensor([pair.reference for pair in micro_batch.pairs]).T
        references = {"right": (chosen, rejected), "wrong": tuple(side.detach() for side in policy)}
        right, wrong = (pair_loss(trainer.args.beta, policy, reference) for reference in references.values())
        yield measured, right, wrong


def _mistakes_elsewhere(module: ModuleType) -> Iterator[str]:
    """Say what is wrong with rows without a reference, with workers, and with a collator that drops the values."""
    row = {f"{name}_input_ids": [1, 2] for name in ("prompt", "chosen", "rejected")}
    for reference in ({}, {"ref_chosen_logps": -1.0}):
        batch = module.PreferenceCollator(pad_token_id=0)([{**row, **reference}])
        if any(name in batch for name in _COLUMNS):
            yield f"of a row with {reference} the batch has {list(batch)}"
    for workers in (0, 1):
        carries = "torch_call" in vars(_stub(module, workers=workers).data_collator)
        if carries != bool(workers):
            yield f"with {workers} workers the collator carries its method: {carries}"
    custom = type("Custom", (), {})
    if "torch_call" in vars(_stub(module, workers=1, data_collator=custom()).data_collator):
        yield "a collator of the user's is changed"
    warnings = {
        "training": _warnings(_stub(module), row),
        "evaluation": _warnings(_stub(module), row, train_eval="eval"),
        "not precomputed": _warnings(_stub(module, _precomputed_train_ref_log_probs=False), row),
        "complete": _warnings(_stub(module), {**row, **dict.fromkeys(_COLUMNS, -1.0)}),
    }
    if {name: len(messages) for name, messages in warnings.items()} != {**dict.fromkeys(warnings, 0), "training": 1}:
        yield f"it is warned: {warnings}"


def _warnings(trainer: Any, row: dict[str, Any], train_eval: str = "train") -> list[str]:
    """Return what is said while two batches of this row go into the loss."""
    import torch

    trainer.compute_ref_log_probs = lambda batch: (torch.zeros(1), torch.zeros(1))
    with recorded_warnings() as messages:
        for _ in range(2):
            batch = trainer.data_collator([row])
            trainer.get_batch_loss_metrics(trainer.model, batch, train_eval=train_eval)
    return messages
