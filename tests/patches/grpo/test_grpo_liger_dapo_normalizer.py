"""The sum over the tokens of dapo, cispo and vespo is divided by those of the step, on the first of two ranks."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl.trainer import grpo_trainer

from trl_hotfix.testing import stub_grpo_trainer

import tiny

ID, TARGET = "grpo-liger-dapo-normalizer", "trl.trainer.grpo_trainer:GRPOTrainer.compute_liger_loss"
CODE = inspect.unwrap(grpo_trainer.GRPOTrainer.compute_liger_loss).__code__
KERNEL = "liger_loss" if "liger_loss" in CODE.co_names else "liger_grpo_loss"
"""Up to 1.7 the kernel has another name."""

GENERATION = (((5, 3, 9), (8, 3, 4, 6)), ((7,), (2, 5)))
"""The completions of two micro-batches."""
ADVANTAGES = ((1.5, -0.5), (-2.0, 0.25))
MORE = 3.0
"""How many more tokens each count has on the other rank."""

both = pytest.mark.parametrize("number", [0, 1])
by_tokens = pytest.mark.parametrize("kind", ["dapo", "cispo", "vespo"])


def micro_batch(number: int) -> dict[str, Any]:
    """Return a micro-batch of the generation, with padding on the right."""
    rows = [torch.tensor(completion) for completion in GENERATION[number]]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {
        "prompt_ids": torch.full((2, 2), 3),
        "prompt_mask": torch.ones(2, 2, dtype=torch.long),
        "completion_ids": ids,
        "completion_mask": (ids > 0).long(),
        "advantages": torch.tensor(ADVANTAGES[number]),
        "num_items_in_batch": torch.tensor(99),
    }


def mask_of(batch: Mapping[str, Any]) -> Any:
    return batch["completion_mask"] * batch.get("tool_mask", 1)


class Case:
    """A generation on the first of two ranks, whose counts are ``more`` on the other one, and a model of one matrix."""

    def __init__(self, kind: str = "dapo", *, accumulated: int = 2, training: bool = True, more: float = MORE) -> None:
        self.kind, self.accumulated, self.training, self.more = kind, accumulated, training, more
        self.generation = [micro_batch(number) for number in range(2)]
        self.weight = torch.nn.Parameter(torch.sin(torch.arange(40.0)).reshape(10, 4))
        settings = {"loss_type": kind, "beta": 0.0, "steps_per_generation": 2, "temperature": 1.0}
        self.trainer = stub_grpo_trainer(grpo_trainer, training=training, **settings)
        self.own = {KERNEL: self.kernel, "current_gradient_accumulation_steps": accumulated}
        vars(self.trainer).update(self.own, _buffered_inputs=self.generation)
        self.trainer.accelerator.num_processes = 2
        self.trainer.accelerator.state = SimpleNamespace(deepspeed_plugin=None)
        self.trainer.accelerator.gather = lambda values: torch.stack([values, values + more]).flatten()
        self.trainer._get_last_hidden_state = lambda model, ids, mask, kept, *args: torch.cos(
            ids[:, -kept - 1 : -1, None] * torch.arange(1.0, 5.0)
        )

    def kernel(
        self,
        *,
        _input: Any,
        lin_weight: Any,
        selected_token_ids: Any,
        attention_mask: Any,
        advantages: Any,
        num_items_in_batch: Any = None,
        **others: Any,
    ) -> Any:
        """Return what Liger's kernel does on the first of two ranks. From 0.8.2 on it takes a number of tokens."""
        own = attention_mask.sum()
        tokens = 2 * own + self.more if num_items_in_batch is None else num_items_in_batch
        divisor = {"bnpo": own, "dr_grpo": 100.0}.get(self.kind, (tokens / 2).clamp(min=1))
        losses = self.token_losses(_input @ lin_weight.T, selected_token_ids, advantages)
        return (losses * attention_mask).sum() / divisor, (own * 0.0,)

    def token_losses(self, logits: Any, ids: Any, advantages: Any) -> Any:
        """Return the losses of the tokens, for the policy that has drawn them and without a reference."""
        log_probs = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
        gains = log_probs if self.kind in ("cispo", "vespo") else (log_probs - log_probs.detach()).exp()
        return -gains * advantages[:, None]

    def found(self, number: int) -> tuple[Any, Any]:
        """Return the loss of a micro-batch, and its gradient."""
        model = SimpleNamespace(lm_head=SimpleNamespace(weight=self.weight, bias=None))
        return self._with_gradient(self.trainer.compute_liger_loss(model, self.generation[number]))

    def expected(self, number: int) -> tuple[Any, Any]:
        """Return the sum over the tokens of the micro-batch, divided by those of a step on the mean rank."""
        batch = self.generation[number]
        counted = self.generation if self.training else [batch]
        tokens = sum(float(mask_of(part).sum()) for part in counted) + self.more / 2
        share = self.accumulated / 2 if self.training else 1
        hidden = self.trainer._get_last_hidden_state(
            None, torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1), None, batch["completion_ids"].size(1)
        )
        losses = self.token_losses(hidden @ self.weight.T, batch["completion_ids"], batch["advantages"])
        return self._with_gradient((losses * mask_of(batch)).sum() / (max(tokens, 1) * share))

    def assert_right(self, number: int) -> None:
        torch.testing.assert_close(self.found(number), self.expected(number), atol=1e-6, rtol=1e-5)

    def acts(self) -> int | None:
        return tiny.acts(ID, TARGET, self.trainer)

    def _with_gradient(self, loss: Any) -> tuple[Any, Any]:
        return loss.detach(), torch.autograd.grad(loss, self.weight)[0]


@by_tokens
@both
def test_each_micro_batch_is_divided_by_the_tokens_of_the_step(kind: str, number: int) -> None:
    case = Case(kind)
    case.assert_right(number)
    assert case.acts() == 1


@by_tokens
def test_trl_divides_by_the_tokens_of_the_micro_batch(kind: str, switch: Any) -> None:
    with switch.off():
        case = Case(kind)
        found, expected = (values[0] for values in (case.found(0), case.expected(0)))
    own, step = (tokens + MORE / 2 for tokens in (7, 10))
    torch.testing.assert_close(found, expected * step / own / 2)


@both
@pytest.mark.parametrize("accumulated", [1, 4])
def test_a_generation_for_several_steps_or_for_a_part_of_one_counts_by_its_share(number: int, accumulated: int) -> None:
    Case(accumulated=accumulated).assert_right(number)


@both
@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("micro_batch_of_it", [0, 1])
def test_a_truncated_completion_does_not_count(number: int, row: int, micro_batch_of_it: int) -> None:
    case = Case()
    case.generation[micro_batch_of_it]["completion_mask"][row] = 0
    case.assert_right(number)


@pytest.mark.skipif("tool_mask" not in CODE.co_consts, reason="in this release the answers of tools are in the loss")
@both
def test_the_answers_of_a_tool_do_not_count(number: int) -> None:
    case = Case()
    for batch in case.generation:
        batch["tool_mask"] = torch.ones_like(batch["completion_ids"])
        batch["tool_mask"][0, 0] = 0
    case.generation[0]["tool_mask"][1, 1:3] = 0
    case.assert_right(number)


@by_tokens
@both
def test_an_evaluation_is_divided_by_its_own_tokens(kind: str, number: int) -> None:
    case = Case(kind, training=False, accumulated=4)
    case.assert_right(number)


@pytest.mark.skipif("normalizer" not in CODE.co_varnames, reason="TRL divides an evaluation by accumulation steps")
@both
def test_an_evaluation_has_trls_loss(number: int, switch: Any) -> None:
    patched = Case(training=False).found(number)
    with switch.off():
        torch.testing.assert_close(patched, Case(training=False).found(number))


def test_one_token_of_both_ranks_is_divided_by_one() -> None:
    case = Case(more=-1.0)
    for batch, kept in zip(case.generation, (1, 0), strict=True):
        batch["completion_mask"].view(-1)[kept:] = 0
    case.assert_right(0)


@both
def test_a_micro_batch_with_less_than_a_token_for_each_rank_is_divided_by_the_step(number: int) -> None:
    case = Case(more=-1.0)
    case.generation[0]["completion_mask"].view(-1)[1:] = 0
    case.assert_right(number)


@both
def test_the_loss_of_no_token_is_0(number: int) -> None:
    case = Case(more=0.0)
    for batch in case.generation:
        batch["completion_mask"].zero_()
    loss, gradient = case.found(number)
    assert loss == 0
    assert not gradient.any()


@pytest.mark.parametrize("kind", ["bnpo", "dr_grpo", "grpo"])
@pytest.mark.parametrize("training", [True, False])
def test_another_loss_is_left_alone(kind: str, training: bool, switch: Any) -> None:
    case = Case(kind, training=training)
    patched = case.found(0)
    assert case.acts() == 0
    with switch.off():
        unpatched = Case(kind, training=training).found(0)
    assert all(map(torch.equal, patched, unpatched))


def test_the_trainer_keeps_its_kernel_and_its_steps() -> None:
    case = Case()
    case.found(0)
    assert {name: vars(case.trainer)[name] for name in case.own} == case.own


def test_the_trainer_keeps_them_after_an_error_too(switch: Any) -> None:
    def failing(**kwargs: Any) -> None:
        raise RuntimeError("out of memory")

    with switch.on():
        case = Case()
        case.own[KERNEL] = failing
        setattr(case.trainer, KERNEL, failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            case.found(0)
    assert {name: vars(case.trainer)[name] for name in case.own} == case.own


def test_every_trainer_is_divided_in_each_step() -> None:
    for more in (MORE, 1.0):
        case = Case(more=more)
        for step in range(2):
            case.trainer.state.global_step = step
            for number in range(2):
                case.assert_right(number)
        assert case.acts() == 4
