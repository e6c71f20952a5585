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

from collections.abc import Callable
from inspect import signature
from types import ModuleType, SimpleNamespace
from typing import Any

from ..authoring import absent, act, argument, copies_of_the_loss, judge, micro_batches, replaced_argument
from ..model import Outcome
from ..testing import default_arguments, stub_trainer, tiny_causal_lm

_generated: list[Any] = []
"""The labels that were generated last. They are compared by value, since ``Trainer`` may copy them on their way."""


def note_what_is_generated(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Keep the labels for ``compute_loss``. They are global because a static method has no trainer to store them on."""
    ids, mask, labels = wrapped(*args, **kwargs)
    _generated[:] = [labels]
    act()
    return ids, mask, labels


def divide_by_the_tokens_of_the_loss(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Give ``compute_loss`` the number of tokens by which its sum, averaged over the ranks, must be divided."""
    import torch

    items = argument(wrapped, args, kwargs, "num_items_in_batch")
    if items is None:
        return wrapped(*args, **kwargs)
    labels = argument(wrapped, args, kwargs, "inputs")["labels"]
    if any(torch.equal(generated.to(labels.device), labels) for generated in _generated):
        items = (labels[:, 1:] != -100).sum().clamp(min=1) * micro_batches(instance)
    else:
        # Several GPUs in one process share one batch, and the loss is computed from the outputs of all of them.
        ranks = copies_of_the_loss(instance) if instance.args.n_gpu <= 1 else 1
        if ranks == 1:
            return wrapped(*args, **kwargs)
        items = items / ranks
    args, kwargs = replaced_argument(wrapped, args, kwargs, "num_items_in_batch", items)
    return wrapped(*args, **kwargs)


def loss_is_divided_by_its_own_tokens(module: ModuleType) -> Outcome:
    """Compare the loss with the formula for two micro-batches.

    The first has two rows with five generated tokens, where the dataset has 34. The second is from the dataset, on 4
    ranks.
    """
    import torch

    student, teacher = tiny_causal_lm(), tiny_causal_lm()
    with torch.no_grad():
        teacher.weight.mul_(0.5)
    trainer = stub_trainer(
        module.GKDTrainer,
        default_arguments(module.GKDConfig, n_gpu=1, average_tokens_across_devices=True),
        teacher_model=teacher,
        beta=0.5,
        use_liger_gkd_loss=False,
        current_gradient_accumulation_steps=2,
        get_tp_size=lambda: 1,
    )
    if "num_items_in_batch" not in signature(trainer.generalized_jsd_loss).parameters:
        return absent("the loss is a mean over the micro-batch")
    prompts = torch.tensor([[1, 2], [3, 4]])
    answered = torch.cat([prompts, torch.tensor([[5, 6, 0], [7, 0, 9]])], dim=1)
    writer = SimpleNamespace(generate=lambda **kwargs: SimpleNamespace(sequences=answered))
    batch = {"prompts": prompts, "prompt_attention_mask": torch.ones_like(prompts)}
    pad = (9,) if "pad_token_id" in signature(trainer.generate_on_policy_outputs).parameters else ()
    stop = SimpleNamespace(eos_token_id=0)
    ids, mask, labels = trainer.generate_on_policy_outputs(writer, batch, stop, *pad)
    if (tokens := int((labels[:, 1:] != -100).sum())) != 5:
        raise AssertionError(f"{tokens} generated tokens are labels, and not 5")
    # Beta times KL(teacher, mixture) + (1 - beta) times KL(student, mixture), arXiv:2306.13649, of each token.
    probabilities = [model.weight.detach()[answered[:, :-1]].softmax(-1) for model in (student, teacher)]
    mixture = (probabilities[0] + probabilities[1]) / 2
    jsd = sum(0.5 * (p * (p / mixture).log()).sum(-1) for p in probabilities)
    loss_sum = float((jsd * (labels[:, 1:] != -100)).sum())

    def loss(labels: Any, ranks: int) -> float:
        trainer.accelerator.num_processes = ranks
        inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels, "prompts": prompts}
        return float(trainer.compute_loss(student, inputs, num_items_in_batch=torch.tensor(34)).detach())

    # A copy, since Trainer may make one on the way. The loss does not depend on which tokens the labels name.
    outcome = judge(loss(labels.clone(), 1), right=loss_sum / (tokens * 2), wrong=loss_sum / 34, tokens=tokens)
    dataset_labels = torch.where(labels == -100, labels, labels + 1)
    on_ranks = judge(loss(dataset_labels, 4), right=loss_sum / (34 / 4), wrong=loss_sum / 34)
    on_one_rank = loss(dataset_labels, 1)
    _generated.clear()
    if on_ranks.verdict is not outcome.verdict:
        raise AssertionError(f"what is generated and what is not do not agree: {outcome}, {on_ranks}")
    if abs(on_one_rank - loss_sum / 34) > 1e-6:
        raise AssertionError("what is not generated is divided by another number on one rank")
    return outcome
