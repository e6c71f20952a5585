"""GRPO divides the dapo, cispo and vespo losses by the token count of a whole generation.

DAPO (arXiv:2503.14476, equation 8) divides the sum of the token losses by the number of tokens of the batch that one
optimizer step sees. ``GRPOTrainer`` counts the tokens when it generates (TRL issue 5619).

TRL 1.9.1 corrects the count in training only (pull request 6024), since an evaluation batch is generated and scored in
one piece. The wrapper corrects the count and not the returned loss: from 1.7.0 on that contains the auxiliary loss of
mixture-of-experts models, which is divided correctly already.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

from ..authoring import Call, absent, agreed, judge, wrapper
from ..model import Outcome, Verdict
from ..testing import stub_grpo_trainer

_BY_TOKEN_COUNT = ("dapo", "cispo", "vespo")


@wrapper
def count_the_tokens_of_one_optimizer_step(call: Call) -> Any:
    """Give ``_compute_loss`` the token count of one optimizer step instead of one generation."""
    trainer = call.trainer
    if trainer.loss_type not in _BY_TOKEN_COUNT or not call.is_training:
        return call()
    generated, accumulated = trainer.args.steps_per_generation, trainer.current_gradient_accumulation_steps
    if generated == accumulated:
        return call()
    inputs = call["inputs"]
    # A new mapping: the trainer keeps the old one and uses it again when num_iterations > 1.
    inputs = {**inputs, "num_items_in_batch": inputs["num_items_in_batch"] * accumulated / generated}
    return call.with_(inputs=inputs)()


def loss_is_divided_by_the_tokens_of_one_optimizer_step(module: ModuleType) -> Outcome:
    """Let an optimizer step see two of four micro-batches, then one: the losses are 2 and 4 times as large as of four.

    A step that sees all four, an evaluation and the other losses are right already, and are left alone.
    """
    outcomes: list[Outcome] = []
    for kind in _BY_TOKEN_COUNT:
        try:
            outcomes += _outcomes(module, kind)
        except ValueError as error:
            if "Unknown loss type" not in str(error):
                raise
    if not outcomes:
        return absent("this release has none of the losses that are divided by a token count")
    first = agreed(outcomes)
    # The ratio of the probabilities is 1: dapo is the sum of -advantage * length over 80 tokens, 1 / 80.
    if abs(first.numbers["right"] - 2 / 80) > 1e-6:
        raise AssertionError(f"dapo is not the sum of the token losses over their count: {first}")
    # Another loss needs no count of tokens.
    inputs = _Inputs(_micro_batches()[0])
    del inputs["num_items_in_batch"]
    _Step(module, "grpo").loss_and_gradient(inputs, accumulated=2)
    return first


class _Inputs(dict[str, Any]):
    """The inputs of a micro-batch, which note whether the loss is computed from them and not from a copy."""

    are_read = False

    def __getitem__(self, name: str) -> Any:
        self.are_read = self.are_read or name == "completion_mask"
        return super().__getitem__(name)


class _Step:
    """A trainer whose generations are of four micro-batches."""

    def __init__(self, module: ModuleType, kind: str) -> None:
        import torch

        self.log_probs = torch.full((4, 8), -0.5, requires_grad=True)
        self.trainer = stub_grpo_trainer(module, self.log_probs, loss_type=kind, beta=0.0, steps_per_generation=4)

    def loss_and_gradient(self, inputs: dict[str, Any], *, accumulated: int) -> tuple[float, Any]:
        """Return the loss, and its gradient for the log-prob of each token."""
        import torch

        self.trainer.current_gradient_accumulation_steps = accumulated
        loss = self.trainer._compute_loss(None, inputs)
        return float(loss.detach()), torch.autograd.grad(loss, self.log_probs)[0]


def _micro_batches() -> tuple[_Inputs, _Inputs]:
    """Return two of the four micro-batches of a generation of 80 tokens."""
    import torch

    def micro_batch(lengths: list[int], advantages: list[float]) -> _Inputs:
        mask = (torch.arange(8) < torch.tensor(lengths).unsqueeze(1)).long()
        return _Inputs(
            prompt_ids=torch.ones(4, 1, dtype=torch.long),
            prompt_mask=torch.ones(4, 1, dtype=torch.long),
            completion_ids=torch.ones_like(mask),
            completion_mask=mask,
            advantages=torch.tensor(advantages),
            old_per_token_logps=None,
            num_items_in_batch=torch.tensor(80),
        )

    return micro_batch([2, 4, 8, 6], [1.0, -1.0, 0.5, -0.5]), micro_batch([5, 1, 3, 7], [-0.5, 0.25, 1.0, -1.0])


def _outcomes(module: ModuleType, kind: str) -> Iterator[Outcome]:
    """Judge each micro-batch by the same one in a step of four. The second is in a step of two, and in one of one."""
    import torch

    step, batches = _Step(module, kind), _micro_batches()
    of_four = [step.loss_and_gradient(batch, accumulated=4) for batch in batches]
    if not all(batch.are_read for batch in batches):
        raise AssertionError(f"{kind}: a step of four is given other inputs than its own")
    # A later step uses the same inputs again if num_iterations > 1.
    for global_step, accumulated, number in ((0, 2, 0), (0, 2, 1), (1, 1, 1)):
        step.trainer.state.global_step = global_step
        loss, gradient = step.loss_and_gradient(batches[number], accumulated=accumulated)
        (loss_of_four, gradient_of_four), factor = of_four[number], 4 / accumulated
        outcome = judge(loss, right=factor * loss_of_four, wrong=loss_of_four, loss_type=kind, tokens=80)
        expected = gradient_of_four * (factor if outcome.verdict is Verdict.FIXED else 1)
        if not torch.allclose(gradient, expected, rtol=1e-5, atol=1e-7):
            raise AssertionError(f"{kind}: the gradient is not that of the loss: {gradient}, expected {expected}")
        yield outcome
    step.trainer.model.training = False
    evaluated, _ = step.loss_and_gradient(batches[1], accumulated=2)
    if abs(evaluated - of_four[1][0]) > 1e-6:
        raise AssertionError(
            f"{kind}: an evaluation is not divided by the whole count: {evaluated}, not {of_four[1][0]}"
        )
