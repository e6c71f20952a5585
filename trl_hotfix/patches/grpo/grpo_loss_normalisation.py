"""GRPO of TRL 0.16 gives every token of a micro-batch the same weight, where the paper does so for every sequence.

The paper (DeepSeekMath, arXiv:2402.03300, equation 3) takes the mean over the sequences of the mean over the tokens of
each sequence:

    loss = mean_i( sum_t(l[i, t] * mask[i, t]) / sum_t(mask[i, t]) )       l, mask: (batch, completion length)

Pull requests 2881 (the loss) and 3004 (the ``kl`` metric) replaced it in 0.16.0 by the mean over all tokens of the
local batch (issue 2995). Pull request 3256 made it an option.

The method computes ``sum(l * mask) / sum(mask)`` for the loss and for its two metrics. With the weights
``mask / length`` in place of the mask it computes the means of the paper, because the weights of a sequence add up
to 1. The mask also tells the model which tokens to attend to, so on its way to the model it becomes 0 and 1 again.

0.16 does not give all tokens the same weight either if there are several ranks: each rank divides by its own tokens,
and the mean of the ranks' gradients gives the tokens of a rank with short completions more weight. For
``normalisation=global`` the loss and the logged metrics are multiplied by
``tokens of this rank * ranks / tokens of all ranks``, so that the mean over the ranks is the sum over all tokens
divided by their number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from ...authoring import absent, argument, judge, replaced_argument, shadowed
from ...model import Options, Outcome, Verdict
from ...testing import stub_grpo_trainer, tiny_causal_lm


def normalise(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
) -> Any:
    """Give every sequence the same weight, or every token of all ranks."""
    over = _all_tokens if options["normalisation"] == "global" else _sequences
    return over(wrapped, instance, args, kwargs)


def _all_tokens(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Multiply the loss and the metrics of this rank by its share of the tokens of all ranks, times the ranks."""
    accelerator = instance.accelerator
    tokens = argument(wrapped, args, kwargs, "inputs")["completion_mask"].sum()
    weight = tokens * accelerator.num_processes / accelerator.reduce(tokens, "sum")
    gather = accelerator.gather_for_metrics
    # kl and clip_ratio are means over the tokens of this rank until the trainer gathers them.
    with shadowed(
        accelerator, "gather_for_metrics", lambda value, *args, **kwargs: gather(value * weight, *args, **kwargs)
    ):
        return wrapped(*args, **kwargs) * weight


def _sequences(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Give ``compute_loss`` a completion mask whose rows add up to 1, and the model the original one."""
    inputs = argument(wrapped, args, kwargs, "inputs")
    mask = inputs["completion_mask"]
    log_probs = instance._get_per_token_logps

    def with_binary_mask(model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int) -> Any:
        return log_probs(model, input_ids, (attention_mask > 0).to(mask.dtype), logits_to_keep)

    # A new mapping: the trainer keeps the old one and uses it again when num_iterations > 1.
    inputs = {**inputs, "completion_mask": mask / mask.sum(dim=1, keepdim=True).clamp(min=1)}
    args, kwargs = replaced_argument(wrapped, args, kwargs, "inputs", inputs)
    with shadowed(instance, "_get_per_token_logps", with_binary_mask):
        return wrapped(*args, **kwargs)


def sequences_or_tokens_weigh_the_same(module: ModuleType, options: Options) -> Outcome:
    """Compare loss, gradient and ``kl`` of unequally long sequences with the formula, on one rank of two.

    Three micro-batches of two training steps, and one of an evaluation.
    """
    if not hasattr(module.GRPOTrainer, "_generate_and_score_completions"):
        return absent("0.14 generates in compute_loss; it has the loss of the paper (0.14.0, line 512)")
    has_loss_type = "loss_type" in module.GRPOConfig.__dataclass_fields__
    over_ranks = options["normalisation"] == "global"
    if over_ranks and has_loss_type:
        return absent("GRPOConfig has loss_type")
    rank = _Rank(module, has_loss_type=has_loss_type)
    outcomes: list[Outcome] = []
    for global_step, mode, lengths, tokens_elsewhere in (
        (0, "train", (2, 4, 8, 6), 44),
        (0, "eval", (2, 4, 8, 6), 44),
        (0, "train", (7, 3, 1, 5), 9),
        (1, "train", (2, 4, 8, 6), 10),
    ):
        micro_batch = rank.micro_batch(global_step, mode, lengths, tokens_elsewhere)
        sequences, tokens, all_tokens = micro_batch.expected()
        loss = float(micro_batch.loss.detach())
        if over_ranks and math.isclose(loss, float(sequences), rel_tol=1e-5):
            return absent("every sequence weighs the same, on every rank")
        right, wrong = all_tokens if over_ranks else sequences, tokens
        outcome = judge(loss, right=float(right), wrong=float(wrong), lengths=list(lengths))
        micro_batch.check_gradient(right if outcome.verdict is Verdict.FIXED else wrong)
        outcomes.append(outcome)
        if not has_loss_type:
            of_sequences, of_tokens, of_all_tokens = micro_batch.expected_kl()
            right_kl = of_all_tokens if over_ranks else of_sequences
            outcomes.append(judge(micro_batch.kl, right=right_kl, wrong=of_tokens))
    if any(outcome.verdict is not outcomes[0].verdict for outcome in outcomes):
        raise AssertionError(f"losses and kl are not all of one kind: {outcomes}")
    return outcomes[0]


_BETA = 0.1


class _Rank:
    """A trainer on one of two ranks, with a real model, whose reference differs more from one sequence than another."""

    def __init__(self, module: ModuleType, *, has_loss_type: bool) -> None:
        import torch

        self.model = tiny_causal_lm(SimpleNamespace())
        self.tokens = torch.arange(36).reshape(4, 9) % 11
        # Of the other rank.
        self.tokens_elsewhere = 0
        self.attention_masks: list[Any] = []
        self.model.register_forward_pre_hook(
            lambda _, args, kwargs: self.attention_masks.append(kwargs["attention_mask"]), with_kwargs=True
        )
        self.log_ratio = torch.tensor([[0.2], [0.4], [0.8], [0.6]])
        self.reference = self.log_probs().detach() + self.log_ratio
        # In a release with loss_type, only the loss of "grpo" is computed, from given log-probs.
        self.trainer = stub_grpo_trainer(
            module,
            self.log_probs() if has_loss_type else None,
            self.reference,
            loss_type="grpo",
            beta=_BETA,
            temperature=1.0,
            num_iterations=1,
            use_bias_correction_kl=False,
        )
        ranks = {"num_processes": 2, "reduce": lambda tokens, reduction: tokens + self.tokens_elsewhere}
        vars(self.trainer.accelerator).update(ranks)

    def log_probs(self) -> Any:
        import torch

        next_tokens = torch.log_softmax(self.model.weight[self.tokens[:, :-1]], dim=-1)
        return next_tokens.gather(-1, self.tokens[:, 1:].unsqueeze(-1)).squeeze(-1)

    def micro_batch(self, global_step: int, mode: str, lengths: tuple[int, ...], tokens_elsewhere: int) -> _MicroBatch:
        """Have the trainer compute the loss of sequences of these lengths."""
        import torch

        self.tokens_elsewhere, self.trainer.state.global_step = tokens_elsewhere, global_step
        self.trainer.model.training, self.trainer.control.should_evaluate = mode == "train", mode == "eval"
        mask = (torch.arange(8) < torch.tensor(lengths).unsqueeze(1)).long()
        inputs = {
            "prompt_ids": self.tokens[:, :1],
            "prompt_mask": torch.ones(4, 1, dtype=torch.long),
            "completion_ids": self.tokens[:, 1:],
            "completion_mask": mask,
            "advantages": torch.tensor([1.0, -1.0, 0.5, -0.5]),
            "old_per_token_logps": None,
            "ref_per_token_logps": self.reference,
        }
        self.attention_masks.clear()
        loss = self.trainer.compute_loss(self.model, inputs)
        if inputs["completion_mask"] is not mask:
            raise AssertionError("the inputs were changed, and the trainer uses them again")
        for attended in self.attention_masks:
            if attended.dtype != mask.dtype or not torch.equal(attended[:, 1:], mask) or not attended[:, 0].all():
                raise AssertionError(f"the model was given another attention mask than the batch: {attended}")
        # Up to 0.15 the metrics are not kept by mode.
        metrics = self.trainer._metrics
        metrics = metrics if "kl" in metrics else metrics[mode]
        return _MicroBatch(self, inputs["advantages"], mask, loss, metrics["kl"][-1])


class _MicroBatch(NamedTuple):
    """A loss, its ``kl``, and what they are computed from."""

    rank: _Rank
    advantages: Any
    mask: Any
    loss: Any
    kl: float

    def expected(self) -> tuple[Any, Any, Any]:
        """Return the means of the losses over sequences, over tokens, and over the tokens of both ranks."""
        import torch

        log_probs = self.rank.log_probs()
        log_ratio = self.rank.reference - log_probs
        # The ratio of the probabilities is 1, and only its derivative counts.
        ratio = torch.exp(log_probs - log_probs.detach())
        return self._means(_BETA * (torch.exp(log_ratio) - log_ratio - 1) - ratio * self.advantages.unsqueeze(1))

    def expected_kl(self) -> tuple[float, float, float]:
        """Return these means of exp(d) - d - 1 with d = reference - policy (arXiv:2402.03300, equation 4)."""
        import torch

        sequences, tokens, all_tokens = self._means(torch.exp(self.rank.log_ratio) - self.rank.log_ratio - 1)
        return float(sequences), float(tokens), float(all_tokens)

    def check_gradient(self, expected: Any) -> None:
        """Assert that the gradient of the loss is the one of the expected loss."""
        import torch

        weight = self.rank.model.weight
        (gradient,) = torch.autograd.grad(self.loss, weight, retain_graph=True)
        (expected_gradient,) = torch.autograd.grad(expected, weight)
        if not torch.allclose(gradient, expected_gradient, rtol=1e-4, atol=1e-6):
            raise AssertionError(f"the gradient is not that of the loss: {gradient}, expected {expected_gradient}")

    def _means(self, values: Any) -> tuple[Any, Any, Any]:
        total, tokens = (values * self.mask).sum(), self.mask.sum()
        sequences = ((values * self.mask).sum(1) / self.mask.sum(1)).mean()
        return sequences, total / tokens, 2 * total / (tokens + self.rank.tokens_elsewhere)
