"""GKD returns the mean of a micro-batch, and nobody divides it by the micro-batches of the step.

``Trainer`` counts the labels of all micro-batches of a step, hands the count over as ``num_items_in_batch``, and takes
it that a loss which is given this count is divided by it (``model_accepts_loss_kwargs``). ``GKDTrainer.compute_loss``
takes the count and leaves it alone. The wrapper multiplies the mean by its tokens over the tokens of the step, as TRL
1.7.0 does (pull request 6006). The count is of the dataset's labels. What is generated replaces them after it, so there
each micro-batch has the same weight.

With transformers 4.46 and 4.47 the same is missing, but they report the loss of any trainer divided once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature, unwrap
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import (
    GeneratedLabels,
    absent,
    argument,
    copies_of_a_loss_of_all_gpus,
    deepspeed_divides,
    judge,
    micro_batches,
    nobody_divides,
)
from ...model import Outcome, Verdict
from ...testing import absent_if_reexported, compare_gradients, distillation_stub, divergence

_generated = GeneratedLabels()


def note_what_is_generated(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Keep the labels for ``compute_loss``."""
    generated = wrapped(*args, **kwargs)
    _, _, labels = generated
    _generated.note(labels)
    return generated


def weigh_by_tokens(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the loss of a micro-batch times its share of the step."""
    result = wrapped(*args, **kwargs)
    items = argument(wrapped, args, kwargs, "num_items_in_batch")
    is_training = argument(wrapped, args, kwargs, "model").training
    if items is None or not is_training or not nobody_divides(instance):
        return result
    share = _share(instance, argument(wrapped, args, kwargs, "inputs")["labels"], items)
    return (result[0] * share, *result[1:]) if isinstance(result, tuple) else result * share


def _share(trainer: Any, labels: Any, items: Any) -> Any:
    if _generated.are(labels):
        return 1 / micro_batches(trainer)
    return (labels != -100).sum() * copies_of_a_loss_of_all_gpus(trainer) / items


def loss_is_divided_by_the_tokens_of_the_step(module: ModuleType) -> Outcome:
    """Compare losses and gradients of two steps of two micro-batches with the formula, then those of other calls.

    Those are completions that are generated, several ranks, an evaluation, and losses that somebody else divides.
    """
    from transformers import Trainer

    if reexported := absent_if_reexported(module, module.GKDTrainer.compute_loss):
        return reexported
    if "num_items_in_batch" in signature(module.GKDTrainer.generalized_jsd_loss).parameters:
        return absent("the loss is divided by the tokens of the step")
    if "model_accepts_loss_kwargs" not in unwrap(Trainer.training_step).__code__.co_names:
        return absent("this transformers does not ask model_accepts_loss_kwargs")
    case = _Case(module)
    rows = ([1, 2], [3, 4, 5]), ([6], [7, 8, 9, 1, 2]), ([3, 7, 8], [9]), ([2], [4, 6])
    outcomes = []
    for number, row in enumerate(rows):
        case.trainer.state.global_step = number // 2
        outcomes.append(case.judged(case.batch(*row), items=7, right=len(row[1]) / 7))
    outcomes.append(case.judged(case.batch(*rows[0]), items=7, right=3 / 7, return_outputs=True))
    outcomes += [case.judged(case.generated(number), items=5, right=1 / 3) for number in range(2)]
    # The dataset's rows again, which are not what was generated last.
    outcomes += [case.judged(case.batch(*row), items=7, right=len(row[1]) / 7) for row in rows[:2]]
    for settings, ranks in (({}, 4), ({"average_tokens_across_devices": False}, 1), ({"n_gpu": 2}, 1)):
        other = _Case(module, processes=4, **settings)
        outcomes.append(other.judged(other.batch(*rows[1]), items=14, right=5 * ranks / 14))
    if len({outcome.verdict for outcome in outcomes}) != 1:
        raise AssertionError(f"the micro-batches do not agree: {outcomes}")
    case.as_it_was(case.batch(*rows[0]), items=None)
    case.trainer.model.eval()
    case.as_it_was(case.batch(*rows[0]), items=7)
    case.trainer.model.train()
    _generated.forget()
    for attributes in ({"model_accepts_loss_kwargs": False}, {"is_deepspeed_enabled": True}):
        other = _Case(module)
        vars(other.trainer).update(attributes)
        if attributes.get("is_deepspeed_enabled") and not deepspeed_divides():
            outcomes.append(other.judged(other.batch(*rows[0]), items=7, right=3 / 7))
        else:
            other.as_it_was(other.batch(*rows[0]), items=7)
    other = _Case(module, gradient_accumulation_steps=1)
    other.as_it_was(other.batch(*rows[0]), items=7)
    if outcomes[-1].verdict is not outcomes[0].verdict:
        raise AssertionError(f"a step under DeepSpeed does not agree: {outcomes}")
    return outcomes[0]


class _Case:
    def __init__(self, module: ModuleType, *, processes: int = 1, **settings: Any) -> None:
        self.trainer = distillation_stub(
            module.GKDTrainer,
            module.GKDConfig,
            {"gradient_accumulation_steps": 5, **settings},
            model_accepts_loss_kwargs=True,
            is_deepspeed_enabled=False,
            # The last step of an epoch has fewer.
            current_gradient_accumulation_steps=3,
        )
        self.trainer.accelerator.num_processes = processes

    def batch(self, prompt: Sequence[int], completion: Sequence[int]) -> dict[str, Any]:
        """Return a batch of one row of the dataset."""
        import torch

        token_ids = torch.tensor([[*prompt, *completion]])
        labels = torch.tensor([[*[-100] * len(prompt), *completion]])
        mask = torch.ones_like(token_ids)
        return {
            "input_ids": token_ids,
            "attention_mask": mask,
            "labels": labels,
            "prompts": token_ids[:, : len(prompt)],
        }

    def generated(self, number: int) -> dict[str, Any]:
        """Return a batch of two completions as GKD makes it. The labels name the prompts too."""
        import torch

        prompts = torch.tensor([[1, 2], [3, 4]])
        rows = [[5, 6, 10, *[9] * number], [*[7] * number, 8, 0, 0]]
        sequences = torch.cat([prompts, torch.tensor(rows)], dim=1)
        writer = SimpleNamespace(generate=lambda **kwargs: SimpleNamespace(sequences=sequences))
        batch = {"prompts": prompts, "prompt_attention_mask": torch.ones_like(prompts)}
        ids, mask, labels = self.trainer.generate_on_policy_outputs(writer, batch, SimpleNamespace(eos_token_id=0), 0)
        # A copy, since Trainer may make one on the way.
        return {"input_ids": ids, "attention_mask": mask, "labels": labels.clone(), "prompts": prompts}

    def judged(self, batch: dict[str, Any], *, items: int, right: float, **options: Any) -> Outcome:
        """Judge loss and gradient by the mean divergence times a share of the step, or by the mean alone."""
        loss, mean = self._losses(batch, items, **options)
        outcome = judge(float(loss.detach()), right=float(mean.detach()) * right, wrong=float(mean.detach()))
        compare_gradients(self.trainer, loss, mean * (right if outcome.verdict is Verdict.FIXED else 1))
        return outcome

    def as_it_was(self, batch: dict[str, Any], *, items: int | None) -> None:
        """Raise if the loss is not the mean divergence."""
        import torch

        loss, mean = self._losses(batch, items)
        if not torch.allclose(loss, mean, rtol=1e-5, atol=1e-7):
            raise AssertionError(f"the loss is {loss}, expected {mean}")
        compare_gradients(self.trainer, loss, mean)

    def _losses(self, batch: dict[str, Any], items: int | None, **options: Any) -> tuple[Any, Any]:
        """Return TRL's loss, and the mean divergence over the labels."""
        import torch

        count = None if items is None else torch.tensor(items)
        result = self.trainer.compute_loss(self.trainer.model, batch, num_items_in_batch=count, **options)
        loss = result[0] if options else result
        if options and result[1].logits.shape[:2] != batch["input_ids"].shape:
            raise AssertionError(f"the outputs are not those of the batch: {result[1].logits.shape}")
        # TRL begins behind the prompts.
        behind = torch.arange(1, batch["labels"].shape[1]) >= batch["prompts"].shape[1]
        counted = (batch["labels"][:, 1:] != -100) & behind
        of_tokens = divergence(self.trainer, batch["input_ids"])
        return loss, (of_tokens * counted).sum() / counted.sum()
