"""A step of several ranks has the loss and the gradients of all its tokens, and all else is as TRL has it."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import Trainer
from trl.trainer import sft_trainer

from trl_hotfix.testing import constructed, default_arguments, single_process, tiny_attention_model, tiny_tokenizer

import tiny

ID, TARGET = "sft-tokens-weighted-per-rank", "trl.trainer.sft_trainer:SFTTrainer.__init__"

Rows = Sequence[Sequence[int]]
"""A micro-batch: of each row the labels after its first token."""
Rank = Sequence[Rows]
"""The micro-batches of a rank in a step."""

IGNORED = -100
THREE_RANKS: Sequence[Rank] = (
    (((3, 4, 5, IGNORED), (IGNORED, 6)), ((9, 1), (2, 3, 4))),
    (((5,), (IGNORED, 6)), ((7,), (8,))),
    (((2, 3, 4, 5, 6, 7, 8), (9, 1, 2)), ((3, IGNORED, 5), (6,))),
)
TWO_RANKS: Sequence[Rank] = (
    (((IGNORED, 3), (4, 5)), ((6,), (IGNORED, 7))),
    (((8, 9, 1, 2, 3, 4, IGNORED), (5, 6, 7)), ((8, 9), (1,))),
)
ONE_HAS_NOTHING_TO_LEARN: Sequence[Rank] = (
    TWO_RANKS[0],
    (((IGNORED, IGNORED), (IGNORED,)), ((IGNORED,), (IGNORED, IGNORED))),
)
OF_TRANSFORMERS: dict[str, Any] = {
    "model_accepts_loss_kwargs": True,
    "compute_loss_func": None,
    "label_smoother": None,
    "optimizer": None,
    "use_apex": False,
    "use_cpu_amp": False,
    "_prepare_inputs": dict,
    "compute_loss_context_manager": nullcontext,
}
"""What the constructor of transformers would set."""

OF_USERS, OF_GKD = ("__main__", "TrainerOfTheUser"), ("trl.trainer.gkd_trainer", "GKDTrainer")


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_attention_model()


def trainer_of(
    model: Any, counts: Sequence[int], rank: int = 0, *, child: tuple[str, str] | None = None, **settings: Any
) -> Any:
    """Return a trainer that SFT's constructor has made, on one of several ranks, which have these counts in a step.

    ``settings`` are arguments of the config or attributes of the trainer; None leaves out an argument. ``child`` is the
    module and the name of a class that inherits SFT's.
    """
    trainer_class = sft_trainer.SFTTrainer
    if child is not None:
        trainer_class = type(child[1], (trainer_class,), {"__module__": child[0]})
    args = default_arguments(
        sft_trainer.SFTConfig,
        **{
            "dataset_kwargs": {"skip_prepare_dataset": True},
            "dataset_text_field": "text",
            "n_gpu": 1,
            "world_size": len(counts),
            "average_tokens_across_devices": False,
            **settings,
        },
    )
    for name in [name for name in settings if settings[name] is None]:
        delattr(args, name)
    rows = Dataset.from_list([{"input_ids": [5, 6, 7]}])
    with single_process(sft_trainer):
        trainer = constructed(
            trainer_class, model=model, args=args, train_dataset=rows, processing_class=tiny_tokenizer()
        )
    states = {"state": SimpleNamespace(global_step=0), "control": SimpleNamespace(should_evaluate=False)}
    vars(trainer).update(OF_TRANSFORMERS | states | settings)

    def gather(own: Any) -> Any:
        gathered = torch.tensor(counts)
        gathered[rank] = own
        return gathered

    trainer.accelerator = SimpleNamespace(
        device=torch.device("cpu"),
        num_processes=len(counts),
        is_main_process=True,
        distributed_type="MULTI_CPU",
        gather=gather,
        gather_for_metrics=lambda own: own,
        unwrap_model=lambda model, **keywords: model,
        backward=lambda loss, **keywords: loss.backward(),
    )
    return trainer


def batch_of(rows: Rows) -> dict[str, Any]:
    """Return rows that are padded to the same length. The first token of each predicts the second."""
    longest = max(map(len, rows))
    labels = torch.tensor([[IGNORED, *row, *[IGNORED] * (longest - len(row))] for row in rows])
    ids = (torch.arange(labels.numel()) * 5 % 16).reshape(labels.shape)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def with_gradients(loss: Any, model: Any) -> Any:
    return torch.cat([loss.detach()[None], *(parameter.grad.flatten() for parameter in model.parameters())])


def trained(trainer: Any, rank: Rank) -> Any:
    """Return the loss of a step of this rank, and after it the gradients."""
    with_device = "device" in inspect.signature(Trainer.get_batch_samples).parameters
    batches, model = map(batch_of, rank), trainer.model
    fetched, count = trainer.get_batch_samples(batches, len(rank), *(["cpu"] if with_device else []))
    model.zero_grad()
    loss = torch.stack([trainer.training_step(model, batch, count) for batch in fetched]).sum()
    return with_gradients(loss, model)


def summed(model: Any, rank: Rank) -> Any:
    """Return the cross-entropy of all labels of this rank, summed, and after it the gradients."""
    model.zero_grad()
    sums = []
    for batch in map(batch_of, rank):
        labels = batch.pop("labels")
        logits = model(**batch).logits[:, :-1].flatten(0, 1)
        sums.append(torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum"))
    total = torch.stack(sums).sum()
    total.backward()
    return with_gradients(total, model)


def labels_of(rank: Rank) -> int:
    return sum(label != IGNORED for rows in rank for row in rows for label in row)


def means_of_ranks(model: Any, step: Sequence[Rank], child: tuple[str, str] | None = None) -> tuple[Any, Any, Any]:
    """Return the mean over the ranks of what is trained, that of all labels, and that of each rank's own labels."""
    counts = [labels_of(rank) for rank in step]
    found, of_all, of_each = [], [], []
    for number, rank in enumerate(step):
        found.append(trained(trainer_of(model, counts, number, child=child), rank))
        total = summed(model, rank)
        of_all.append(total / sum(counts))
        of_each.append(total / max(counts[number], 1) / len(counts))
    return torch.stack(found).mean(0), torch.stack(of_all).sum(0), torch.stack(of_each).sum(0)


@pytest.mark.parametrize(
    ("step", "child"),
    [(THREE_RANKS, None), (TWO_RANKS, None), (TWO_RANKS, OF_USERS), (ONE_HAS_NOTHING_TO_LEARN, None)],
    ids=["three ranks", "two ranks", "a class of the user's", "a rank without labels"],
)
def test_a_step_has_the_loss_and_the_gradients_of_all_tokens(
    model: Any, step: Sequence[Rank], child: tuple[str, str] | None
) -> None:
    found, right, _ = means_of_ranks(model, step, child)
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("child", [None, OF_USERS], ids=["SFTTrainer", "a class of the user's"])
def test_trl_divides_by_the_tokens_of_each_rank(model: Any, child: tuple[str, str] | None, switch: Any) -> None:
    with switch.off():
        found, right, wrong = means_of_ranks(model, TWO_RANKS, child)
    torch.testing.assert_close(found, wrong, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(found, right, rtol=1e-2)


def test_an_evaluation_has_trls_loss(model: Any, switch: Any) -> None:
    trainer, batch = trainer_of(model, [2, 6]), batch_of(TWO_RANKS[0][0])
    model.eval()
    try:
        with torch.no_grad():
            patched = trainer.compute_loss(model, dict(batch))
            with switch.off():
                unpatched = trainer_of(model, [2, 6]).compute_loss(model, dict(batch))
    finally:
        model.train()
    assert patched.equal(unpatched)
    assert tiny.acts(ID, TARGET, trainer) == 0


def handed_on(trainer: Any, counts: Sequence[int], count: Any) -> Any:
    """Return the count that TRL's ``training_step`` is given. Those of the ranks must come from the own device."""

    def gather(own: Any) -> Any:
        assert own.device.type == "meta"
        return torch.tensor(counts, device="cpu")

    trainer.accelerator.gather, trainer.accelerator.device = gather, torch.device("meta")
    type(trainer).training_step = lambda trainer, model, inputs, items: (model, inputs, items)
    *others, items = trainer.training_step("model", "inputs", count)
    assert others == ["model", "inputs"]
    return items


ON_A_TENSOR = torch.tensor(2, device="cpu")


@pytest.mark.parametrize(
    ("count", "mean", "settings"),
    [
        (2, 4.0, {}),
        (ON_A_TENSOR, ON_A_TENSOR * 2.0, {}),
        (2, 4.0, {"model_accepts_loss_kwargs": False, "compute_loss_func": len}),
        (2, 4.0, {"average_tokens_across_devices": None}),
    ],
    ids=["a number", "a tensor", "a loss of the user's", "transformers 4.46.0, without the setting"],
)
def test_each_micro_batch_is_given_the_mean_of_the_counts(
    model: Any, count: Any, mean: Any, settings: dict[str, Any]
) -> None:
    trainer = trainer_of(model, [2, 6], **settings)
    assert tiny.acts(ID, TARGET, trainer) == 0
    for _ in range(2):
        found = handed_on(trainer, [2, 6], count)
        assert (found, type(found)) == (mean, type(mean))
    assert tiny.acts(ID, TARGET, trainer) == 1


@pytest.mark.parametrize(
    ("count", "settings"),
    [
        (2, {"child": OF_GKD}),
        (2, {"average_tokens_across_devices": True}),
        (2, {"model_accepts_loss_kwargs": False}),
        (None, {}),
    ],
    ids=["GKD", "a setting that sums the counts", "a loss that takes no count", "no count"],
)
def test_trl_is_given_its_own_count(model: Any, count: Any, settings: dict[str, Any]) -> None:
    trainer = trainer_of(model, [2, 6], **settings)
    found = handed_on(trainer, [2, 6], count)
    assert (found, type(found)) == (count, type(count))
    assert tiny.acts(ID, TARGET, trainer) == 0


def test_the_count_may_be_left_out(model: Any) -> None:
    trainer = trainer_of(model, [2, 6])
    type(trainer).training_step = lambda trainer, model, inputs, items=None: items
    assert trainer.training_step("model", "inputs") is None


@pytest.mark.parametrize(
    ("counts", "settings"), [([2], {}), ([2, 6], {"world_size": None})], ids=["one rank", "no number of ranks"]
)
def test_a_trainer_alone_keeps_the_method_of_its_class(
    model: Any, counts: Sequence[int], settings: dict[str, Any]
) -> None:
    assert "training_step" not in vars(trainer_of(model, counts, **settings))


def test_each_of_two_trainers_has_its_own_ranks(model: Any) -> None:
    first, second = trainer_of(model, [2, 6]), trainer_of(model, [2, 3, 1])
    assert handed_on(first, [2, 6], 2) == 4.0
    assert handed_on(second, [2, 3, 1], 2) == 2.0


def test_what_the_trainer_has_in_the_place_of_the_method_can_be_pickled(model: Any) -> None:
    step = trainer_of(model, [2, 6]).training_step
    assert pickle.loads(pickle.dumps(step.func)) is step.func
