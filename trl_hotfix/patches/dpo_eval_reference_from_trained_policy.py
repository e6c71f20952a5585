"""DPO computes the reference of the evaluation set at the first evaluation, with the trained policy.

Up to 0.28 ``get_eval_dataloader`` precomputes the reference log-probs of the evaluation set when it is first called,
which is after the first steps of training; without a ``ref_model`` and PEFT it does so with ``self.model``. A
``ref_model``, or an adapter that can be switched off, gives the same log-probs at any time.

TRL 0.29.0 precomputes both datasets in ``__init__`` (pull request 3906). The target is ``get_train_dataloader``,
because ``train()`` calls it before its first step and it precomputes the training set. The random state of the CPU is
restored, since otherwise the order of the training rows would change.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..authoring import absent, act, judge, shadowed
from ..model import Outcome
from ..testing import default_arguments, stub_trainer


def precompute_the_evaluation_set_too(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Compute the reference of the evaluation set while the policy is still untrained."""
    reference_is_policy = instance.ref_model is None and not instance.is_peft_model
    due = instance.precompute_ref_log_probs and not instance._precomputed_eval_ref_log_probs
    # get_eval_dataloader can never precompute several evaluation sets in a dict.
    if due and reference_is_policy and not isinstance(instance.eval_dataset, dict | None):
        import torch

        with torch.random.fork_rng(devices=[]):
            act()
            instance.get_eval_dataloader()
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

        def get_eval_dataloader(self, eval_dataset: Any = None) -> None: ...

    # StubTrainer stands after DPOTrainer in the method resolution order, so super() calls its methods.
    trainer_class = type("DPOTrainer", (module.DPOTrainer, StubTrainer), {})
    policy_log_prob = before

    def reference(batch: Any) -> tuple[Any, Any]:
        return torch.full((2,), policy_log_prob), torch.full((2,), 2 * policy_log_prob)

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
    trainer.accelerator.prepare, trainer.accelerator.free_memory = (lambda dataloader: dataloader), (lambda: None)
    # Without this every start would print a progress bar of two steps.
    with shadowed(module, "tqdm", lambda iterable, **kwargs: iterable):
        trainer.get_train_dataloader()
        policy_log_prob = after
        trainer.get_eval_dataloader()
    columns = trainer.eval_dataset.columns
    chosen = columns.get("ref_chosen_logps", columns.get("reference_chosen_logps"))
    return judge(float(chosen[0]), right=before, wrong=after)
