"""GRPO counts the tokens of its dapo, cispo and vespo losses before it masks the truncated completions.

``_generate_and_score_completions`` returns ``num_items_in_batch`` of all completions of a generation, and a
``completion_mask`` that is 0 for those without an end. TRL 1.9.0 counts the tokens of that mask (pull request 6439).
The wrapper does the same with what the method returns. A tool's answers were never counted, and their mask is in the
product here, since a truncated completion may have called tools.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

from ...authoring import absent
from ...model import Outcome
from ...testing import judge_with_gradients, scored_completions, stub_grpo_trainer, stub_that_scores

_BY_TOKEN_COUNT = ("dapo", "cispo", "vespo")


def count_the_tokens_of_the_loss(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return the batch with the number of tokens, of all ranks, that the loss is summed over."""
    output = wrapped(*args, **kwargs)
    if not instance.mask_truncated_completions or instance.loss_type not in _BY_TOKEN_COUNT:
        return output
    # The Liger loss does not read the count.
    if any(getattr(instance, name, False) for name in ("use_liger_loss", "use_liger_kernel")):
        return output
    mask = output["completion_mask"] * output.get("tool_mask", 1)
    tokens = instance.accelerator.gather(mask.sum()).sum()
    if tokens == output["num_items_in_batch"]:
        return output
    # Without a token the loss is 0, and not 0 / 0.
    return {**output, "num_items_in_batch": tokens.clamp(min=1)}


def loss_is_divided_by_the_tokens_that_it_has(module: ModuleType) -> Outcome:
    """Score two generations and an evaluation on the first of two ranks, and judge their losses with the gradients.

    A generation that is truncated altogether has the loss 0. Other losses, and the Liger loss, need no count.
    """
    if "mask_truncated_completions" not in module.GRPOConfig.__dataclass_fields__:
        return absent("this release takes no truncated completions out of the loss")
    outcomes: list[Outcome] = []
    for kind in _BY_TOKEN_COUNT:
        try:
            outcomes += _outcomes(module, kind)
        except ValueError as error:
            if "Unknown loss type" not in str(error):
                raise
    if not outcomes:
        return absent("this release has none of the losses that are divided by a token count")
    if any(outcome.verdict is not outcomes[0].verdict for outcome in outcomes):
        raise AssertionError(f"some losses are divided by the tokens that they have, and others are not: {outcomes}")
    _check_without_a_token(module)
    _check_that_nothing_else_is_counted(module)
    return outcomes[0]


_GENERATIONS = (
    ((5, 1), (2, 3, 4, 6, 7), (8, 9, 1), (3, 2, 4, 5, 5)),
    ((9, 8, 2, 1), (1,), (3, 4, 5, 6, 7, 8), (2, 2, 1)),
    ((4, 1), (7, 7, 2, 3), (8, 3, 5, 1), (6, 2, 9, 9)),
)
"""Two generations and one of the evaluation. A completion that does not end with 1 is truncated."""

_TRUNCATED = ((2, 3), (4, 5), (6, 7), (8, 9))

_FROM_THE_MODEL = ((1, 0), (1, 0, 0, 1, 1), (1, 1, 1), (1, 1, 0, 0, 1))
"""Which tokens of the first generation are the model's. The others are a tool's answers."""

_MORE_ON_THE_OTHER_RANK = 3
"""How much larger a number of the whole rank is on the other one. What belongs to a completion is the same there."""


def _outcomes(module: ModuleType, kind: str) -> Iterator[Outcome]:
    """Judge the losses of one kind. Only of ``dapo`` are there a second generation, an evaluation and a tool."""
    cases = [_Case(module, kind)]
    if kind == "dapo":
        cases += [_Case(module, kind, 1), _Case(module, kind, 2, training=False)]
        # There is one token in all, that of this rank.
        cases.append(_Case(module, kind, completions=((1,), *_TRUNCATED[1:]), more=-1))
        if hasattr(module.GRPOTrainer, "_tool_call_loop"):
            cases.append(_Case(module, kind, from_the_model=_FROM_THE_MODEL))
    for case in cases:
        output = case.output()
        counts = 2 * case.tokens(_ended) + case.more, 2 * case.tokens()
        measured, right, wrong = case.loss(output), *(case.loss(output, count) for count in counts)
        if kind == "dapo":
            # The ratio of the probabilities is 1, so the loss of a token is -advantage.
            advantages = output["advantages"].tolist()
            total = -sum(advantages[row] * length for row, length in enumerate(case.lengths(_ended)))
            if abs(float(right.detach()) - total / counts[0]) > 1e-6:
                raise AssertionError(f"dapo is not the sum of the token losses over their count: {right}")
        yield judge_with_gradients([case.log_probs], [(measured, right, wrong)])


def _check_without_a_token(module: ModuleType) -> None:
    """Check that the loss is 0 if all completions of this rank and of the other one are truncated."""
    case = _Case(module, "dapo", completions=_TRUNCATED, more=0)
    loss = case.loss(case.output())
    if float(loss.detach()) != 0:
        raise AssertionError(f"the loss of no token is {loss}")


def _check_that_nothing_else_is_counted(module: ModuleType) -> None:
    """Check that the ranks exchange nothing more for a loss that is divided by no count, or where nothing is masked."""
    fields = module.GRPOConfig.__dataclass_fields__
    liger: dict[str, Any] = {"use_liger_kernel" if "use_liger_kernel" in fields else "use_liger_loss": True}
    cases = {
        "masked": _Case(module, "bnpo"),
        "not masked": _Case(module, "dapo", mask_truncated_completions=False),
        "Liger": _Case(module, "dapo", **liger),
        "neither": _Case(module, "bnpo", mask_truncated_completions=False),
    }
    counts = {}
    for name, case in cases.items():
        case.output()
        counts[name] = case.gathered
    if len(set(counts.values())) != 1:
        raise AssertionError(f"the ranks exchange more for some losses than for others: {counts}")


def _ended(completion: Sequence[int]) -> bool:
    return completion[-1] == 1


class _Case:
    """A generation on the first of two ranks, and the log-probs that the policy gives to its tokens."""

    def __init__(
        self,
        module: ModuleType,
        kind: str,
        number: int = 0,
        *,
        completions: Sequence[Sequence[int]] = (),
        from_the_model: Sequence[Sequence[int]] = (),
        more: int = _MORE_ON_THE_OTHER_RANK,
        training: bool = True,
        **settings: Any,
    ) -> None:
        import torch

        self.module, self.number, self.training, self.more = module, number, training, more
        self.completions = completions or _GENERATIONS[number]
        self.from_the_model = from_the_model
        defaults = {"beta": 0.0, "steps_per_generation": 1, "mask_truncated_completions": True}
        self.settings = {"loss_type": kind, **defaults, **settings}
        self.log_probs = torch.full((4, max(map(len, self.completions))), -0.5, requires_grad=True)
        self.gathered = 0

    def lengths(self, counted: Callable[[Sequence[int]], bool] = bool) -> list[int]:
        """Return how many tokens of the model each completion has, or 0 if it is not ``counted``."""
        masks = self.from_the_model or [[1] * len(completion) for completion in self.completions]
        rows = zip(self.completions, masks, strict=True)
        return [sum(mask) if counted(completion) else 0 for completion, mask in rows]

    def tokens(self, counted: Callable[[Sequence[int]], bool] = bool) -> int:
        """Return how many tokens of the model the ``counted`` completions of one rank have."""
        return sum(self.lengths(counted))

    def output(self) -> dict[str, Any]:
        """Return the batch that the trainer makes of the generation."""
        rewards = [1.0, 4.0, 2.0, 7.0]
        trainer = stub_that_scores(self.module, self.completions, rewards, training=self.training, **self.settings)
        trainer.state.global_step = self.number
        trainer.accelerator.gather = self._of_both_ranks
        trainer.model.generation_config.eos_token_id = 1
        if self.from_the_model:
            self._let_call_tools(trainer)
        return scored_completions(trainer)

    def loss(self, output: dict[str, Any], count: int | None = None) -> Any:
        """Return the loss of the batch, or that with another count of tokens."""
        import torch

        trainer = stub_grpo_trainer(self.module, self.log_probs, training=self.training, **self.settings)
        trainer.tools = [len] if self.from_the_model else None
        inputs = output if count is None else {**output, "num_items_in_batch": torch.tensor(count)}
        return trainer._compute_loss(None, inputs)

    def _of_both_ranks(self, values: Any) -> Any:
        import torch

        self.gathered += 1
        return torch.cat([values, values]) if values.ndim else torch.stack([values, values + self.more])

    def _let_call_tools(self, trainer: Any) -> None:
        """Let the completions be what the model wrote and what tools have answered."""
        masks = [list(mask) for mask in self.from_the_model]
        code = inspect.unwrap(self.module.GRPOTrainer._tool_call_loop).__code__
        # From 1.1 on tools may answer with images.
        images: tuple[Any, ...] = (
            ([[] for _ in masks],) if "tool_images" in (*code.co_varnames, *code.co_cellvars) else ()
        )

        def called(prompts: Any, prompt_ids: Any, ids: Any, completions: Any, log_probs: Any, *rest: Any) -> Any:
            return masks, completions, ids, log_probs, 1, 0, *images

        vars(trainer).update(tools=[len], _standalone_tools=[], _tool_call_loop=called)
