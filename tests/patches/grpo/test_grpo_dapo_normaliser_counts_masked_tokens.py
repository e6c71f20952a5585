"""The count of tokens is that of the tokens in the loss, over both of two ranks, where a completion is truncated."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import pytest
import torch
from trl.trainer import grpo_trainer

from trl_hotfix.testing import scored_completions, stub_grpo_trainer, stub_that_scores

import tiny

ID = "grpo-dapo-normaliser-counts-masked-tokens"
TARGET = "trl.trainer.grpo_trainer:GRPOTrainer._generate_and_score_completions"

GENERATIONS = (
    ((5, 1), (2, 3, 4, 6, 7), (8, 9, 1), (3, 2, 4, 5, 5)),
    ((9, 8, 2, 1), (1,), (3, 4, 5, 6, 7, 8), (2, 2, 1)),
    ((2, 3, 4, 9), (7, 7, 2, 1), (8, 1), (3, 5, 1)),
)
"""A completion that does not end with 1 is truncated: in the second generation the third one, in the last the first."""

TRUNCATED = ((2, 3), (4, 5), (6, 7), (8, 9))
FROM_THE_MODEL = ((1, 0), (1, 0, 0, 1, 1), (1, 1, 1), (1, 1, 0, 0, 1))
"""Which tokens of the first generation are the model's. The others are a tool's answers."""
MORE = 3
"""How much larger a number of the whole rank is on the other one. What belongs to a completion is the same there."""

IS_LIGER = next(
    field.name for field in fields(grpo_trainer.GRPOConfig) if field.name in ("use_liger_kernel", "use_liger_loss")
)

generations = pytest.mark.parametrize("completions", GENERATIONS)


def ended(completion: Sequence[int]) -> bool:
    return completion[-1] == 1


class Case:
    """A generation on the first of two ranks, and the log-probs that the policy gives to its tokens."""

    def __init__(
        self,
        kind: str = "dapo",
        completions: Sequence[Sequence[int]] = GENERATIONS[0],
        *,
        from_the_model: Sequence[Sequence[int]] = (),
        more: int = MORE,
        training: bool = True,
        **settings: Any,
    ) -> None:
        self.completions, self.from_the_model, self.more, self.training = completions, from_the_model, more, training
        defaults = {"beta": 0.0, "steps_per_generation": 1, "mask_truncated_completions": True}
        self.settings: Any = {"loss_type": kind, **defaults, **settings}
        self.log_probs = torch.full((4, max(map(len, completions))), -0.5, requires_grad=True)
        rewards, self.gathered = [1.0, 4.0, 2.0, 7.0], 0
        self.trainer = stub_that_scores(grpo_trainer, completions, rewards, training=training, **self.settings)
        self.trainer.accelerator.gather = self._of_both_ranks
        self.trainer.model.generation_config.eos_token_id = 1
        if from_the_model:
            self._let_call_tools()

    def lengths(self, counted: Callable[[Sequence[int]], bool] = bool) -> list[int]:
        """Return how many tokens of the model each completion has, or 0 if it is not ``counted``."""
        masks = self.from_the_model or [[1] * len(completion) for completion in self.completions]
        rows = zip(self.completions, masks, strict=True)
        return [sum(mask) if counted(completion) else 0 for completion, mask in rows]

    def count(self, counted: Callable[[Sequence[int]], bool] = bool) -> int:
        """Return how many tokens of the model the ``counted`` completions of both ranks have."""
        return 2 * sum(self.lengths(counted)) + self.more

    def output(self) -> dict[str, Any]:
        """Return the batch that the trainer makes of the generation."""
        return scored_completions(self.trainer)

    def loss_and_gradient(self, output: dict[str, Any]) -> tuple[Any, Any]:
        trainer = stub_grpo_trainer(grpo_trainer, self.log_probs, training=self.training, **self.settings)
        trainer.tools = [len] if self.from_the_model else None
        loss = trainer._compute_loss(None, output)
        return loss.detach(), torch.autograd.grad(loss, self.log_probs)[0]

    def acts(self) -> int | None:
        return tiny.acts(ID, TARGET, self.trainer)

    def _of_both_ranks(self, values: Any) -> Any:
        self.gathered += 1
        return torch.cat([values, values]) if values.ndim else torch.stack([values, values + self.more])

    def _let_call_tools(self) -> None:
        """Let the completions be what the model wrote and what tools have answered."""
        masks = [list(mask) for mask in self.from_the_model]
        code = inspect.unwrap(grpo_trainer.GRPOTrainer._tool_call_loop).__code__
        # From 1.1 on tools may answer with images.
        images: Any = ([[] for _ in masks],) if "tool_images" in (*code.co_varnames, *code.co_cellvars) else ()

        def called(prompts: Any, prompt_ids: Any, ids: Any, completions: Any, log_probs: Any, *rest: Any) -> Any:
            return masks, completions, ids, log_probs, 1, 0, *images

        vars(self.trainer).update(tools=[len], _standalone_tools=[], _tool_call_loop=called)


@pytest.fixture(params=["dapo", "cispo", "vespo"])
def kind(request: pytest.FixtureRequest) -> str:
    case = Case(request.param)
    try:
        case.loss_and_gradient(case.output())
    except ValueError as error:
        if "Unknown loss type" not in str(error):
            raise
        pytest.skip("this release has no such loss")
    return str(request.param)


@generations
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_the_tokens_of_truncated_completions_do_not_count(kind: str, completions: Any, training: bool) -> None:
    case = Case(kind, completions, training=training)
    assert case.output()["num_items_in_batch"] == case.count(ended)
    assert case.acts() == 1


@generations
def test_trl_counts_them(completions: Any, switch: Any) -> None:
    with switch.off():
        case = Case(completions=completions)
        assert case.output()["num_items_in_batch"] == case.count() - case.more


@generations
def test_loss_and_gradient_grow_by_the_share_of_the_tokens(kind: str, completions: Any) -> None:
    case = Case(kind, completions)
    output = case.output()
    found = case.loss_and_gradient(output)
    whole = case.loss_and_gradient({**output, "num_items_in_batch": torch.tensor(2 * sum(case.lengths()))})
    for value, other in zip(found, whole, strict=True):
        torch.testing.assert_close(value, other * 2 * sum(case.lengths()) / case.count(ended))


@generations
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_dapo_is_the_sum_of_the_token_losses_over_their_count(completions: Any, training: bool) -> None:
    case = Case(completions=completions, training=training)
    output = case.output()
    # The ratio of the probabilities is 1, so the loss of a token is -advantage. The mean over the ranks is the loss.
    advantages, lengths = output["advantages"].tolist(), map(float, case.lengths(ended))
    loss, _ = case.loss_and_gradient(output)
    assert float(loss) == pytest.approx(-sum(map(float.__mul__, advantages, lengths)) / case.count(ended), abs=1e-6)


@pytest.mark.skipif(not hasattr(grpo_trainer.GRPOTrainer, "_tool_call_loop"), reason="this release calls no tools")
def test_the_answers_of_a_tool_do_not_count_either() -> None:
    case = Case(from_the_model=FROM_THE_MODEL)
    output = case.output()
    assert output["num_items_in_batch"] == case.count(ended) == 2 * 4 + MORE
    case.loss_and_gradient(output)


def test_one_token_of_both_ranks_is_counted() -> None:
    case = Case(completions=((1,), *TRUNCATED[1:]), more=-1)
    assert case.output()["num_items_in_batch"] == 1


def test_the_loss_of_no_token_is_0() -> None:
    case = Case(completions=TRUNCATED, more=0)
    output = case.output()
    loss, gradient = case.loss_and_gradient(output)
    assert output["num_items_in_batch"] == 1
    assert loss == 0
    assert not gradient.any()


def test_nothing_else_of_the_batch_is_changed(switch: Any) -> None:
    patched = Case().output()
    with switch.off():
        unpatched = Case().output()
    assert list(patched) == list(unpatched)
    for name in patched.keys() - {"num_items_in_batch"}:
        torch.testing.assert_close(patched[name], unpatched[name])


@pytest.mark.parametrize(
    ("loss", "settings"),
    [
        ("bnpo", {}),
        ("dr_grpo", {}),
        ("dapo", {"mask_truncated_completions": False}),
        ("bnpo", {"mask_truncated_completions": False}),
        ("dapo", {IS_LIGER: True}),
    ],
    ids=["bnpo", "dr_grpo", "not masked", "neither", "Liger"],
)
def test_another_run_stays_as_it_is(loss: str, settings: dict[str, Any], switch: Any) -> None:
    case = Case(loss, **settings)
    patched = case.output()
    assert case.acts() == 0
    with switch.off():
        unpatched = Case(loss, **settings)
        torch.testing.assert_close(patched, unpatched.output())
    assert case.gathered == unpatched.gathered


def test_a_batch_without_a_truncated_completion_is_returned_as_it_is(switch: Any) -> None:
    completions = tuple((*completion[:-1], 1) for completion in GENERATIONS[0])
    case = Case(completions=completions, more=0)
    patched = case.output()
    assert case.acts() == 0
    with switch.off():
        torch.testing.assert_close(patched, Case(completions=completions, more=0).output())


def test_a_truncated_completion_of_the_other_rank_counts_there() -> None:
    class Lopsided(Case):
        """All completions of this rank have an end, and the other rank has five tokens less in the loss."""

        def _of_both_ranks(self, values: Any) -> Any:
            return torch.cat([values, values]) if values.ndim else torch.stack([values, values - 5])

    case = Lopsided(completions=tuple((*completion[:-1], 1) for completion in GENERATIONS[0]))
    assert case.output()["num_items_in_batch"] == 2 * sum(case.lengths()) - 5


def test_every_trainer_counts_each_generation() -> None:
    for _ in range(2):
        for step, completions in enumerate(GENERATIONS):
            case = Case(completions=completions)
            case.trainer.state.global_step = step
            for _ in range(2):
                assert case.output()["num_items_in_batch"] == case.count(ended)
            assert case.acts() == 2
