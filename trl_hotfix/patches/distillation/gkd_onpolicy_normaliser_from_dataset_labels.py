"""GKD divides the loss on generated completions by the token count of the dataset's labels.

Since TRL 1.7.0 (pull request 6006) ``compute_loss`` divides the sum of the divergences over the tokens by
``num_items_in_batch``. ``Trainer`` counts these items before the optimizer step, over the labels of all micro-batches
of the dataloader; ``training_step`` replaces the batch after that. Where the tokens of all ranks are counted,
``Trainer.compute_loss`` multiplies the loss by the number of ranks, since gradients are averaged over them. GKD's
``compute_loss`` does not.

``DistillationTrainer`` had both bugs. It now counts the tokens that it has generated, divided by the ranks (pull
request 6478), which it can since it generates for a whole optimizer step at once. GKD generates for each micro-batch,
and the token counts of the later ones are not known when the loss of the first is computed. The wrapper therefore
divides each by its own tokens times the number of micro-batches.
"""

from __future__ import annotations

from inspect import signature
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import (
    Call,
    GeneratedLabels,
    absent,
    agreed,
    copies_of_a_loss_of_all_gpus,
    judge,
    micro_batches,
    wrapper,
)
from ...model import Outcome, Verdict
from ...testing import compare_gradients, distillation_stub, divergence

_generated = GeneratedLabels()


@wrapper
def note_what_is_generated(call: Call) -> Any:
    """Keep the labels for ``compute_loss``."""
    generated = call()
    _, _, labels = generated
    _generated.note(labels)
    return generated


@wrapper
def divide_by_the_tokens_of_the_loss(call: Call) -> Any:
    """Give ``compute_loss`` the number of tokens by which its sum, averaged over the ranks, must be divided."""
    items = call["num_items_in_batch"]
    if items is None:
        return call()
    labels = call["inputs"]["labels"]
    if _generated.are(labels):
        items = (labels != -100).sum().clamp(min=1) * micro_batches(call.trainer)
    else:
        ranks = copies_of_a_loss_of_all_gpus(call.trainer)
        if ranks == 1:
            return call()
        items = items / ranks
    return call.with_(num_items_in_batch=items)()


def loss_is_divided_by_its_own_tokens(module: ModuleType) -> Outcome:
    """Compare losses and gradients with the formula, for two steps of generated micro-batches, then for other batches.

    Those are an evaluation on one rank and on 4, several GPUs in one process, and losses that are not divided by a
    count.
    """
    import torch

    if "num_items_in_batch" not in signature(module.GKDTrainer.generalized_jsd_loss).parameters:
        return absent("the loss is a mean over the micro-batch")
    case = _Case(module)
    outcomes = []
    for number, (global_step, accumulated) in enumerate([(0, 2), (0, 2), (1, 3), (1, 3)]):
        case.trainer.state.global_step, case.trainer.current_gradient_accumulation_steps = global_step, accumulated
        # A copy, since Trainer may make one on the way.
        batch = {name: value.clone() for name, value in case.generated(number).items()}
        tokens = int((batch["labels"][:, 1:] != -100).sum())
        if tokens != 4 + number:
            raise AssertionError(f"{tokens} generated tokens are labels, and not {4 + number}")
        outcomes.append(case.judged(batch, 34, right=tokens * accumulated, wrong=34))
    # The loss does not depend on which tokens the labels name.
    from_dataset = {**batch, "labels": torch.where(batch["labels"] == -100, -100, batch["labels"] + 1)}
    case.judged(from_dataset, 34, right=34)
    case.judged(from_dataset, None, right=tokens)
    case.trainer.model.eval()
    case.judged(from_dataset, 34, right=34)
    case.trainer.accelerator.num_processes = 4
    outcomes += [case.judged(from_dataset, 34, right=34 / 4, wrong=34)]
    outcomes += [_Case(module, ranks=4).judged(from_dataset, 34, right=34 / 4, wrong=34)]
    _Case(module, ranks=4, average_tokens_across_devices=False).judged(from_dataset, 34, right=34)
    _Case(module, n_gpu=2).judged(from_dataset, 34, right=34)
    is_on = _generated.are(batch["labels"])
    # As an evaluation of earlier transformers: it counts nothing.
    case.judged(batch, None, right=tokens)
    if "pad_token_id" in signature(module.GKDTrainer.generate_on_policy_outputs).parameters:
        # These releases leave out a completion that ends at once, if the end of the sequence is the padding too.
        empty = {**batch, "labels": torch.full_like(batch["labels"], -100)}
        if is_on:
            _generated.note(empty["labels"])
        case.judged(empty, 34, right=1)
    one = {
        **batch,
        "labels": batch["labels"].where(torch.arange(batch["labels"].numel()).view_as(batch["labels"]) == 2, -100),
    }
    if is_on:
        _generated.note(one["labels"])
    outcomes.append(case.judged(one, 34, right=accumulated, wrong=34))
    _generated.forget()
    return agreed(outcomes)


class _Case:
    def __init__(self, module: ModuleType, *, ranks: int = 1, **settings: Any) -> None:
        settings = {"gradient_accumulation_steps": 5, **settings}
        self.trainer = distillation_stub(module.GKDTrainer, module.GKDConfig, settings)
        self.trainer.accelerator.num_processes = ranks

    def generated(self, number: int) -> dict[str, Any]:
        """Return a batch of two completions, of ``4 + number`` tokens together with their ends, as GKD makes it."""
        import torch

        prompts = torch.tensor([[1, 2], [3, 4]])
        rows = [[5, 6, 0, *[9] * number], [*[7] * number, 0, 9, 9]]
        answered = torch.cat([prompts, torch.tensor(rows)], dim=1)
        writer = SimpleNamespace(generate=lambda **kwargs: SimpleNamespace(sequences=answered))
        batch = {"prompts": prompts, "prompt_attention_mask": torch.ones_like(prompts)}
        generate = self.trainer.generate_on_policy_outputs
        pad = (9,) if "pad_token_id" in signature(generate).parameters else ()
        ids, mask, labels = generate(writer, batch, SimpleNamespace(eos_token_id=0), *pad)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels, "prompts": prompts}

    def judged(self, batch: dict[str, Any], items: int | None, *, right: float, wrong: float = -1.0) -> Outcome:
        """Judge the loss and its gradient by the divergence over a number of tokens, the right one or the wrong one."""
        import torch

        inputs = {name: value.clone() for name, value in batch.items()}
        count = None if items is None else torch.tensor(items)
        loss = self.trainer.compute_loss(self.trainer.model, inputs, num_items_in_batch=count)
        total = (divergence(self.trainer, batch["input_ids"]) * (batch["labels"][:, 1:] != -100)).sum()
        by = {"right": float(total.detach()) / right, "wrong": float(total.detach()) / wrong}
        outcome = judge(float(loss.detach()), **by, divided_by=right)
        compare_gradients(self.trainer, loss, total / (right if outcome.verdict is Verdict.FIXED else wrong))
        return outcome
