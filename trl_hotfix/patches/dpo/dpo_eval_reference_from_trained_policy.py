"""DPO computes the reference of the evaluation set at the first evaluation, with the trained policy.

Up to 0.28 ``get_eval_dataloader`` precomputes the reference log-probs of the evaluation set when it is first called,
which is after the first steps of training; without a ``ref_model`` and PEFT it does so with ``self.model``. A
``ref_model``, or an adapter that can be switched off, gives the same log-probs at any time.

TRL 0.29.0 precomputes both datasets in ``__init__`` (pull request 3906). The target is ``get_train_dataloader``,
because ``train()`` calls it before its first step and it precomputes the training set. The random state of the CPU is
restored, since otherwise the order of the training rows would change.

The set is precomputed only where ``args.do_eval`` is set: that costs a forward pass of every evaluation row, which is
most of a run if the set is large and nothing evaluates. transformers sets ``do_eval`` for every ``eval_strategy`` but
"no", and a script that evaluates by itself may set it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Once, absent, act, judge, shadowed
from ...model import Outcome, Verdict
from ...testing import default_arguments, recorded_warnings, stub_trainer

_first_warning = Once()


def precompute_the_evaluation_set_too(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Compute the reference of the evaluation set while the policy is still untrained."""
    reference_is_policy = instance.ref_model is None and not instance.is_peft_model
    due = instance.precompute_ref_log_probs and not instance._precomputed_eval_ref_log_probs
    # get_eval_dataloader can never precompute several evaluation sets in a dict.
    if due and reference_is_policy and not isinstance(instance.eval_dataset, dict | None):
        if instance.args.do_eval:
            import torch

            random_state = torch.get_rng_state()
            act()
            instance.get_eval_dataloader()
            torch.set_rng_state(random_state)
        elif _first_warning(instance):
            logging.getLogger("trl_hotfix").warning(
                "the reference log-probs of the evaluation set are not computed before training, since nothing "
                "evaluates (eval_strategy='no'). An evaluate() after training would take the trained policy as its "
                "reference: if you call it, set do_eval=True in the DPOConfig"
            )
    return wrapped(*args, **kwargs)


def evaluation_set_keeps_the_untrained_reference(module: ModuleType) -> Outcome:
    """Read the reference log-prob of the evaluation set when the policy changes after the first dataloader.

    The policy's log-prob of a chosen completion is -1 when training begins and -2 at the first evaluation. The two
    dataloader methods are the installed ones; the methods of transformers' ``Trainer`` that they call are replaced.
    """
    import torch
    import transformers

    if "get_eval_dataloader" not in vars(module.DPOTrainer):
        return absent("both datasets are precomputed before training, in __init__ (TRL pull request 3906)")
    before, after = -1.0, -2.0

    class Rows:
        """Stand for a dataset of two rows; ``columns`` holds the columns that were added."""

        def __init__(self, columns: dict[str, Any] | None = None) -> None:
            self.columns = columns or {}

        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"row": index}

        def add_column(self, name: str, column: Any) -> Rows:
            return Rows({**self.columns, name: column})

    class StubTrainer(transformers.Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> None: ...

        def get_eval_dataloader(self, eval_dataset: Any = None) -> None:
            self.evaluated.append(eval_dataset)

    # StubTrainer stands after DPOTrainer in the method resolution order, so super() calls its methods.
    trainer_class = type("DPOTrainer", (module.DPOTrainer, StubTrainer), {})

    def trainer_before_training(*, do_eval: bool = True, **changed: Any) -> Any:
        """Return a trainer that has asked for the dataloader of the training set."""

        def reference(batch: Any) -> tuple[Any, Any]:
            # The logits of a model with dropout would draw random numbers as well.
            torch.rand(1)
            return torch.full((2,), trainer.log_prob), torch.full((2,), 2 * trainer.log_prob)

        attributes = {
            "log_prob": before,
            "evaluated": [],
            "model": SimpleNamespace(training=True),
            "ref_model": None,
            "is_peft_model": False,
            "train_dataset": Rows(),
            "eval_dataset": Rows(),
            "data_collator": lambda rows: {"rows": len(rows)},
            "precompute_ref_log_probs": True,
            # With True only the evaluation set draws random numbers.
            "_precomputed_train_ref_log_probs": True,
            "_precomputed_eval_ref_log_probs": False,
            # The second name is that of releases up to 0.11.
            "compute_ref_log_probs": reference,
            "compute_reference_log_probs": reference,
            **changed,
        }
        trainer = stub_trainer(trainer_class, default_arguments(module.DPOConfig, do_eval=do_eval), **attributes)
        trainer.accelerator.prepare, trainer.accelerator.free_memory = (lambda loader: loader), (lambda: None)
        random_state = torch.get_rng_state()
        trainer.get_train_dataloader()
        if not torch.equal(torch.get_rng_state(), random_state):
            raise AssertionError("the random state is another one: the training rows would come in another order")
        return trainer

    def log_probs_at_the_first_evaluation(training: bool) -> list[float]:
        trainer = trainer_before_training(model=SimpleNamespace(training=training))
        trainer.log_prob = after
        trainer.get_eval_dataloader()
        columns = trainer.eval_dataset.columns
        sides = ("chosen", "rejected")
        return [float(value) for side in sides for name in columns if f"_{side}_" in name for value in columns[name]]

    # Without this every start would print a progress bar of two steps.
    with shadowed(module, "tqdm", lambda iterable, **kwargs: iterable):
        log_probs = [log_probs_at_the_first_evaluation(training) for training in (False, True)]
        settings: tuple[dict[str, Any], ...] = (
            {"ref_model": object()},
            {"is_peft_model": True},
            {"precompute_ref_log_probs": False},
            {"_precomputed_eval_ref_log_probs": True},
            {"do_eval": False},
            {"eval_dataset": None},
            {"eval_dataset": {"one": Rows(), "other": Rows()}},
        )
        warned: list[dict[str, Any]] = []
        for changed in settings:
            untouched = changed.get("eval_dataset", Rows())
            with recorded_warnings() as messages:
                trainer = trainer_before_training(**{**changed, "eval_dataset": untouched})
                trainer.get_train_dataloader()
            if trainer.eval_dataset is not untouched or trainer.evaluated:
                raise AssertionError(f"the evaluation set was precomputed in spite of {changed}")
            warned += [changed] * len(messages)
    if any(values not in ([x, x, 2 * x, 2 * x] for x in (before, after)) for values in log_probs):
        raise AssertionError(f"the reference log-probs of the rows are {log_probs}")
    outcome = judge(sum(values[0] for values in log_probs) / 2, right=before, wrong=after)
    if warned != [{"do_eval": False}] * (outcome.verdict is Verdict.FIXED):
        raise AssertionError(f"it is warned of {warned}")
    return outcome
