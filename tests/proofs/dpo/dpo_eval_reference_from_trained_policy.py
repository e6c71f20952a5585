"""Train two steps with the real DPOTrainer without ``ref_model``, then evaluate.

The proof compares the reference log-probs of the evaluation set. In 0.9.6 and 0.12 they do not reach the loss:
dpo-precomputed-ref-logps-ignored and dpo-precomputed-ref-logps-dropped repair that.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

from trl_hotfix.authoring import absent, judge

import tiny
from tiny.data import preferences_of_several_lengths

PATCH = "dpo-eval-reference-from-trained-policy"
TARGET = "trl.trainer.dpo_trainer:DPOTrainer.get_train_dataloader"
OVERLAYS = ()
PARITY = False
VARIANTS = {"lora": "the reference of a model with an adapter is that model without it, whenever it is computed"}

EVALUATION_ROWS = 3


def dpo_trainer(folder: str, trainer_class: type, **arguments: Any) -> Any:
    """Return a trainer of two steps of two micro-batches. ``settings`` among the arguments are of its config."""
    tokenizer = tiny.tokenizer()
    # 0.9.6 prepends this token to every prompt, also if the tokenizer has none.
    tokenizer.bos_token = "<unk>"
    settings = {"max_steps": 2, "gradient_accumulation_steps": 2, "do_eval": True, **arguments.pop("settings", {})}
    precompute = settings.pop("precompute_ref_log_probs", True)
    args = tiny.precomputed_dpo(**settings)
    args.precompute_ref_log_probs = precompute
    dataset = preferences_of_several_lengths()
    defaults = {"train_dataset": dataset, "eval_dataset": dataset.select(range(EVALUATION_ROWS))}
    model = tiny.llama(folder, seed=0)
    return tiny.trainer(trainer_class, model=model, args=args, tokenizer=tokenizer, **{**defaults, **arguments})


def train() -> tiny.TrainingResult:
    import torch
    from trl import DPOTrainer

    references: dict[str, list[Any]] = {"right": [], "wrong": []}

    class ReferenceRecorder(tiny.measured(DPOTrainer)):
        def prediction_step(self, model, inputs, *args, **kwargs):
            for name, reference in (("right", untouched), ("wrong", self.model)):
                references[name].append(torch.cat(tiny.preference_log_probs(reference, inputs)))
            return super().prediction_step(model, inputs, *args, **kwargs)

    with tempfile.TemporaryDirectory() as folder:
        untouched = tiny.llama(folder, seed=0)
        trainer = dpo_trainer(folder, ReferenceRecorder)
        trainer.train()
        without_evaluation = dpo_trainer(folder, tiny.measured(DPOTrainer), eval_dataset=None)
        without_evaluation.train()
        # The wrapper says that it has acted in the run that has an evaluation set, and not in the other.
        assert tiny.acts(PATCH, TARGET, trainer) in (None, 1)
        assert tiny.acts(PATCH, TARGET, without_evaluation) in (None, 0)
        assert _rows(trainer) == _rows(without_evaluation), "the order of the training rows has changed"
        for name, gradient in trainer.step.gradients.items():
            assert torch.equal(gradient, without_evaluation.step.gradients[name])
        torch.manual_seed(0)
        loss = trainer.evaluate()["eval_loss"]
    measured = [
        sum(trainer.eval_dataset[name])
        for side in ("chosen", "rejected")
        for name in trainer.eval_dataset.column_names
        if name.startswith("ref") and name.endswith(f"_{side}_logps")
    ]
    sides = {name: _sums(batches) for name, batches in references.items()}
    outcome, rejected = (
        judge(float(measured[side]), right=sides["right"][side], wrong=sides["wrong"][side]) for side in (0, 1)
    )
    assert outcome.verdict == rejected.verdict
    return tiny.TrainingResult(outcome, loss, trainer.step.gradients)


def _sums(batches: list[Any]) -> tuple[float, float]:
    """Return the sums over all rows, of the chosen and of the rejected completions."""
    import torch

    chosen, rejected = (torch.cat(halves) for halves in zip(*(batch.chunk(2) for batch in batches), strict=True))
    return float(chosen.sum()), float(rejected.sum())


def _rows(trainer: Any) -> list[Any]:
    """Return the token ids of all micro-batches, under the key that this release gives them."""
    return [batch[next(key for key in batch if key.endswith("input_ids"))].tolist() for batch in trainer.batches]


def unaffected() -> tiny.TrainingResult:
    """Train where nothing evaluates, where the reference does not change, and where there is nothing to precompute."""
    import torch
    from trl import DPOTrainer

    def several_sets(trainer: Any) -> None:
        # Not every release can construct a trainer with them.
        trainer.eval_dataset = {"one": trainer.eval_dataset, "other": trainer.eval_dataset}

    def evaluated_first(trainer: Any) -> None:
        trainer.evaluate()

    def nothing(trainer: Any) -> None: ...

    loss, gradients = 0.0, {}
    with tempfile.TemporaryDirectory() as folder:
        runs: dict[str, tuple[Callable[[Any], None], bool, dict[str, Any]]] = {
            "nothing evaluates": (nothing, False, {"settings": {"do_eval": False}}),
            "a reference": (nothing, True, {"ref_model": tiny.llama(folder, seed=0)}),
            "nothing is precomputed": (nothing, False, {"settings": {"precompute_ref_log_probs": False}}),
            "no evaluation set": (nothing, False, {"eval_dataset": None}),
            "evaluated before": (evaluated_first, True, {}),
            "several evaluation sets": (several_sets, False, {}),
        }
        for name, (prepare, evaluates, arguments) in runs.items():
            torch.manual_seed(0)
            trainer = dpo_trainer(folder, tiny.measured(DPOTrainer), **arguments)
            forwards: list[int] = []
            trainer.model.register_forward_hook(lambda *_, forwards=forwards: forwards.append(1))
            prepare(trainer)
            trainer.train()
            loss += trainer.state.log_history[-1]["train_loss"] + len(forwards)
            if evaluates:
                loss += trainer.evaluate()["eval_loss"]
            gradients |= {f"{name} {key}": gradient for key, gradient in trainer.step.gradients.items()}
    return tiny.TrainingResult(absent("nothing evaluates, or the reference stays"), loss, gradients)
