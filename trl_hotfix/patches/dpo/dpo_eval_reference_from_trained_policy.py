"""DPO computes the reference of the evaluation set at the first evaluation, with the trained policy.

Up to 0.28 ``get_eval_dataloader`` precomputes the reference log-probs of the evaluation set when it is first called,
which is after the first steps of training; without a ``ref_model`` and PEFT it does so with ``self.model``. A
``ref_model``, or an adapter that can be switched off, gives the same log-probs at any time.

TRL 0.29.0 precomputes both datasets in ``__init__`` (pull request 3906). The target is ``get_train_dataloader``,
because ``train()`` calls it before its first step and it precomputes the training set. The wrapper restores the
random state of the CPU, since otherwise the order of the training rows would change.

The wrapper precomputes the set only where ``args.do_eval`` is set. It costs a forward pass of every evaluation row,
which is most of a run if the set is large and nothing evaluates. transformers sets ``do_eval`` for every
``eval_strategy`` but "no", and a script that evaluates by itself may set it.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...authoring import Call, WarnOnce, absent, judge, shadowed, wrapper
from ...model import Outcome
from ...testing import default_arguments, stub_trainer

_warn = WarnOnce()


@wrapper
def precompute_the_evaluation_set_too(call: Call) -> Any:
    """Compute the reference of the evaluation set while the policy is still untrained."""
    trainer = call.trainer
    reference_is_policy = trainer.ref_model is None and not trainer.is_peft_model
    due = trainer.precompute_ref_log_probs and not trainer._precomputed_eval_ref_log_probs
    # get_eval_dataloader can never precompute several evaluation sets in a dict.
    if due and reference_is_policy and not isinstance(trainer.eval_dataset, dict | None):
        if trainer.args.do_eval:
            import torch

            random_state = torch.get_rng_state()
            call.act()
            trainer.get_eval_dataloader()
            torch.set_rng_state(random_state)
        else:
            _warn(
                trainer,
                "the reference log-probs of the evaluation set are not computed before training, since nothing "
                "evaluates (eval_strategy='no'). An evaluate() after training would take the trained policy as its "
                "reference: if you call it, set do_eval=True in the DPOConfig",
            )
    return call()


def evaluation_set_keeps_the_untrained_reference(module: ModuleType) -> Outcome:
    """Read the reference log-prob of an evaluation row: the policy's is -1 when training begins, and -2 afterwards."""
    import torch
    from transformers import Trainer

    if "get_eval_dataloader" not in vars(module.DPOTrainer):
        return absent("both datasets are precomputed before training, in __init__ (TRL pull request 3906)")

    class Rows(list[Any]):
        def add_column(self, name: str, column: Any) -> Any:
            return Rows({**row, name: float(value)} for row, value in zip(self, column, strict=True))

    class Parent(Trainer):  # type: ignore[misc]
        """Comes before transformers' own class in the method resolution order."""

        def get_train_dataloader(self) -> None: ...
        def get_eval_dataloader(self, eval_dataset: Any = None) -> None: ...

    def reference(batch: Any) -> tuple[Any, Any]:
        return torch.tensor([trainer.log_prob]), torch.tensor([trainer.log_prob])

    trainer = stub_trainer(
        type("DPOTrainer", (module.DPOTrainer, Parent), {}),
        default_arguments(module.DPOConfig, do_eval=True, dataloader_pin_memory=False),
        log_prob=-1.0,
        ref_model=None,
        is_peft_model=False,
        eval_dataset=Rows([{}]),
        data_collator=list,
        precompute_ref_log_probs=True,
        _precomputed_train_ref_log_probs=True,
        _precomputed_eval_ref_log_probs=False,
        # Releases up to 0.11 have the second name.
        compute_ref_log_probs=reference,
        compute_reference_log_probs=reference,
    )
    trainer.accelerator.prepare, trainer.accelerator.free_memory = (lambda loader: loader), (lambda: None)
    # Without this every start would print a progress bar.
    with shadowed(module, "tqdm", lambda iterable, **kwargs: iterable):
        trainer.get_train_dataloader()
        trainer.log_prob = -2.0
        trainer.get_eval_dataloader()
    chosen, _ = trainer.eval_dataset[0].values()
    return judge(chosen, right=-1.0, wrong=-2.0)
