"""A completion is trained on up to its first end, and a prompt is masked as it was when it was generated from."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trl_hotfix.call import Call
from trl_hotfix.patches.distillation.gkd_eos_masked_when_pad_is_eos import keep_the_first_end
from trl_hotfix.testing import distillation_stub

import tiny

try:
    from trl.experimental.gkd.gkd_trainer import GKDConfig, GKDTrainer
except ImportError:
    from trl.trainer.gkd_trainer import GKDConfig, GKDTrainer

ID = "gkd-eos-masked-when-pad-is-eos"
TAKES_PADDING = "pad_token_id" in signature(GKDTrainer.generate_on_policy_outputs).parameters
END = PADDING = 0
OTHER_PADDING, OTHER_END = 10, 9

PROMPTS = ((0, 1, 2, 0, 3), (4, 0, 5, 6, 7))
PROMPT_MASK = ((0, 1, 1, 1, 1), (1, 1, 1, 1, 1))
"""Prompts in which a turn ends. The first is padded."""
OTHERWISE_PADDED = ((10, 1, 2, 0, 3), (4, 0, 5, 6, 7))

COMPLETIONS = (
    ((5, 6, 0, 0, 0), (7, 0, 0, 0, 0)),
    ((1, 2, 3, 4, 0), (9, 8, 3, 0, 0)),
    ((5, 1, 2, 3, 4), (0, 0, 0, 0, 0)),
)
"""Of each micro-batch. One completion has no end, and one nothing else."""
LENGTHS = ((3, 2), (5, 4), (5, 1))
"""The tokens of each completion, up to its first end."""

each_generation = pytest.mark.parametrize(("rows", "lengths"), list(zip(COMPLETIONS, LENGTHS, strict=True)))


def stub(*, training: bool = True) -> Any:
    trainer = distillation_stub(GKDTrainer, GKDConfig, generalized_jsd_loss=sum_of_logits)
    trainer.model.train(training)
    return trainer


def sum_of_logits(student_logits: Any, labels: Any, **others: Any) -> Any:
    return student_logits[labels != -100].sin().sum()


class Generated:
    """What GKD makes of these completions."""

    def __init__(
        self,
        trainer: Any,
        rows: Sequence[Sequence[int]],
        *,
        prompts: Any = PROMPTS,
        with_prompt_mask: bool = True,
        ends: Any = END,
        ends_of_model: Any = None,
        padding: int = PADDING,
    ) -> None:
        self.trainer = trainer
        inputs = {"prompts": torch.tensor(prompts), "prompt_attention_mask": torch.tensor(PROMPT_MASK)}
        if not with_prompt_mask:
            del inputs["prompt_attention_mask"]
        self.prompts, self.tokens = inputs["prompts"], torch.cat([inputs["prompts"], torch.tensor(rows)], dim=1)
        writer = SimpleNamespace(generate=lambda **kwargs: SimpleNamespace(sequences=self.tokens.clone()))
        if ends_of_model is not None:
            writer.generation_config = SimpleNamespace(eos_token_id=ends_of_model)
        given = (padding,) if TAKES_PADDING else ()
        generated = trainer.generate_on_policy_outputs(writer, inputs, SimpleNamespace(eos_token_id=ends), *given)
        self.ids, self.mask, self.labels = generated

    def has(self, lengths: Sequence[int], of_prompts: Any = PROMPT_MASK) -> None:
        """Assert that so many tokens of the completions are kept, in the mask, the labels and the loss."""
        of_completions = torch.arange(5) < torch.tensor(lengths)[:, None]
        mask = torch.cat([torch.tensor(of_prompts).bool(), of_completions], dim=1)
        assert self.ids.equal(self.tokens)
        assert self.mask.equal(mask.long())
        assert self.labels[:, 5:].equal(self.tokens.where(mask, -100)[:, 5:])
        batch = {"input_ids": self.ids, "attention_mask": self.mask, "labels": self.labels, "prompts": self.prompts}
        loss = self.trainer.compute_loss(self.trainer.model, batch)
        of_formula = self.trainer.model.weight[self.tokens[:, 4:-1]][of_completions].sin().sum()
        torch.testing.assert_close(loss, of_formula)
        gradients = [torch.autograd.grad(value, self.trainer.model.weight)[0] for value in (loss, of_formula)]
        torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@each_generation
def test_completions_are_trained_on_up_to_their_first_end(rows: Any, lengths: Any, training: bool) -> None:
    Generated(stub(training=training), rows).has(lengths)


@each_generation
def test_trl_masks_the_ends_and_turns_of_the_prompts(rows: Any, lengths: Any, switch: Any) -> None:
    with switch.off():
        generated = Generated(stub(), rows)
    assert generated.mask.equal((generated.tokens != PADDING).long())
    assert not (generated.labels[:, 5:] == END).any()


def test_each_micro_batch_of_each_trainer_has_its_ends() -> None:
    trainers = stub(), stub()
    for rows, lengths in zip(COMPLETIONS, LENGTHS, strict=True):
        for trainer in trainers:
            Generated(trainer, rows).has(lengths)


def test_any_of_several_ends_is_the_first() -> None:
    rows = ((5, OTHER_END, 0, 0, 0), (8, 0, 0, 0, 0))
    Generated(stub(), rows, ends=[END, OTHER_END]).has((2, 2))


@pytest.mark.skipif(not TAKES_PADDING, reason="this release always has the mask, and the ends")
@each_generation
def test_the_model_knows_its_ends(rows: Any, lengths: Any) -> None:
    Generated(stub(), rows, ends=None, ends_of_model=END).has(lengths)


@pytest.mark.skipif(not TAKES_PADDING, reason="this release always has the mask, and the ends")
def test_without_a_mask_of_the_prompts_they_are_masked_as_trl_does() -> None:
    without = Generated(stub(), COMPLETIONS[0], with_prompt_mask=False)
    without.has(LENGTHS[0], (torch.tensor(PROMPTS) != PADDING).tolist())


def test_another_padding_is_masked_as_trl_does(switch: Any) -> None:
    rows = ((5, 6, 0, 10, 10), (7, 0, 10, 10, 10))
    settings: dict[str, Any] = {"prompts": OTHERWISE_PADDED, "padding": OTHER_PADDING}
    Generated(stub(), rows, **settings).has((3, 2))
    with switch.off():
        Generated(stub(), rows, **settings).has((3, 2))


def test_completions_that_nothing_ends_are_trained_on_whole() -> None:
    rows = ((5, 6, 0, 1, 2), (7, 0, 1, 2, 3))
    Generated(stub(), rows, prompts=OTHERWISE_PADDED, padding=OTHER_PADDING, ends=None).has((5, 5))


def test_the_wrapper_acts_where_something_is_unmasked() -> None:
    trainer = stub()
    with tiny.counted(ID, f"{GKDTrainer.__module__}:GKDTrainer.generate_on_policy_outputs") as counts:
        padded: dict[str, Any] = {"prompts": OTHERWISE_PADDED, "padding": OTHER_PADDING}
        Generated(trainer, ((5, 6, 0, 10, 10), (7, 0, 10, 10, 10)), **padded)
        assert counts().acted == 0
        Generated(trainer, COMPLETIONS[1])
        assert counts().acted == 1


def test_the_tensors_of_trl_are_changed_in_place() -> None:
    """What another patch has noted of them is theirs."""
    prompts = torch.tensor([[1, 2]])
    tokens = torch.tensor([[1, 2, 5, 0, 0]])
    of_trl = tokens, (tokens != 0).long(), tokens.where(tokens != 0, -100)

    def generate(model: Any, inputs: Any, generation_config: Any) -> Any:
        return of_trl

    inputs = {"prompts": prompts, "prompt_attention_mask": torch.ones_like(prompts)}
    found = keep_the_first_end(Call(generate, None, (None, inputs, SimpleNamespace(eos_token_id=0))))
    assert all(one is other for one, other in zip(found, of_trl, strict=True))
    assert [tensor.tolist() for tensor in of_trl[1:]] == [[[1, 1, 1, 1, 0]], [[1, 2, 5, 0, -100]]]
