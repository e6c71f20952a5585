"""The precomputed reference of the evaluation set is the policy as it is at the first evaluation.

Up to 0.28 ``get_eval_dataloader`` precomputes the reference log-probs of the evaluation set when it is first called,
which is after the first steps of training. With ``precompute_ref_log_probs=True``, no ``ref_model`` and no PEFT the
reference is ``self.model``, which has been trained by then: the first evaluation says log 2 = 0.6931 with margins of 0
and every later one compares with the wrong model. With a ``ref_model``, or with adapters that can be switched off, late
is as good as early.

TRL 0.29.0 precomputes both datasets in ``__init__`` (pull request 3906). Here the evaluation set's turn comes with the
training set's, in ``get_train_dataloader``, which ``train()`` calls before its first step. The random state of the CPU
is kept, or the order of the training rows would be another one.

Two cases it cannot help: a dataset that is given to ``evaluate()`` after training has begun (TRL 1.9.0 raises there,
pull request 6443), and a resumed run, since ``train()`` loads the checkpoint before it asks for a dataloader.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..authoring import absent, judge, shadowed
from ..model import Outcome
from ..stubs import default_arguments, stub_trainer


def precompute_the_evaluation_set_too(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Have the reference of the evaluation set computed while the policy is still untrained."""
    trained_later = instance.ref_model is None and not instance.is_peft_model
    due = instance.precompute_ref_log_probs and not instance._precomputed_eval_ref_log_probs
    # Several evaluation sets by name: get_eval_dataloader cannot precompute those, early or late.
    if due and trained_later and instance.eval_dataset is not None and not isinstance(instance.eval_dataset, dict):
        import torch

        with torch.random.fork_rng(devices=[]):
            instance.get_eval_dataloader()
    return wrapped(*args, **kwargs)


def evaluation_set_keeps_the_untrained_reference(module: ModuleType) -> Outcome:
    """The reference log-prob that the evaluation set gets when the policy's changes after the first dataloader.

    The policy's log-prob of a chosen completion is -1 when training begins and -2 when the first evaluation does. The
    two dataloader methods are the installed ones; what they call in transformers' ``Trainer`` is not.
    """
    import torch
    import transformers

    if "get_eval_dataloader" not in vars(module.DPOTrainer):
        return absent("both datasets are precomputed before training, in __init__ (TRL pull request 3906)")
    before, after = -1.0, -2.0

    class Rows:
        """Two rows of a dataset; ``columns`` are those that were added."""

        def __init__(self, columns: dict[str, Any] | None = None) -> None:
            self.columns = columns or {}

        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"row": index}

        def add_column(self, name: str, column: Any) -> Rows:
            return Rows({**self.columns, name: column})

    class Beneath(transformers.Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> None: ...

        def get_eval_dataloader(self, eval_dataset: Any = None) -> None: ...

    # Between DPOTrainer and transformers' Trainer in the order of methods: what super() finds.
    trainer_class = type("DPOTrainer", (module.DPOTrainer, Beneath), {})
    now = before

    def reference(batch: Any) -> tuple[Any, Any]:
        return torch.full((2,), now), torch.full((2,), 2 * now)

    trainer = stub_trainer(
        trainer_class,
        default_arguments(module.DPOConfig),
        model=None,
        ref_model=None,
        is_peft_model=False,
        train_dataset=Rows(),
        eval_dataset=Rows(),
        data_collator=lambda rows: {"rows": len(rows)},
        precompute_ref_log_probs=True,
        _precomputed_train_ref_log_probs=False,
        _precomputed_eval_ref_log_probs=False,
        # The second name is that of releases up to 0.11.
        compute_ref_log_probs=reference,
        compute_reference_log_probs=reference,
    )
    trainer.accelerator.prepare, trainer.accelerator.free_memory = (lambda made: made), (lambda: None)
    # A progress bar of two steps is nothing that a user should see at every start.
    with shadowed(module, "tqdm", lambda iterable, **kwargs: iterable):
        trainer.get_train_dataloader()
        now = after
        trainer.get_eval_dataloader()
    columns = trainer.eval_dataset.columns
    chosen = columns.get("ref_chosen_logps", columns.get("reference_chosen_logps"))
    return judge(float(chosen[0]), right=before, wrong=after)
