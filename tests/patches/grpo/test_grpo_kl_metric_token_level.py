"""The ``kl`` that is logged is the one that the loss multiplies by ``beta``, and nothing else changes."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from trl.trainer import grpo_trainer

from trl_hotfix.testing import stub_grpo_trainer

import tiny

ID = "grpo-kl-metric-token-level"
BETA = 0.5
LENGTHS = ((2, 4, 8, 6), (5, 0, 3, 7), (8, 1, 1, 2))
"""Of the completions of three micro-batches. One of them has no token."""
LOG_RATIOS = torch.tensor([[0.2], [0.4], [0.8], [0.6]])
"""Of reference and policy, for each token of a completion."""
KL = LOG_RATIOS.exp() - LOG_RATIOS - 1
"""Of each token (DeepSeekMath, arXiv:2402.03300, equation 4)."""
OF_OTHER_RANK = 0.25
"""The KL of each token on the other of two ranks, which has as many tokens."""
OF_POLICY = torch.tensor([[1, 0] * 4, [0, 0] * 4, [0, 1] * 4, [1, 1] * 4])
"""The tokens that no tool has written."""
TAKES_TOOLS = "tool_mask" in inspect.unwrap(grpo_trainer.GRPOTrainer._compute_loss).__code__.co_consts

each_mode = pytest.mark.parametrize("mode", ["train", "eval"])


@pytest.fixture(params=["grpo", "sapo"])
def loss_type(request: pytest.FixtureRequest) -> Any:
    if request.param == "sapo" and not hasattr(grpo_trainer.GRPOConfig, "sapo_temperature_pos"):
        pytest.skip("this release has no sapo loss")
    return request.param


def mask_of(lengths: Sequence[int]) -> torch.Tensor:
    return (torch.arange(8) < torch.tensor(lengths)[:, None]).long()


def over_sequences(values: torch.Tensor, mask: torch.Tensor) -> float:
    return float((values * mask / mask.sum(1, keepdim=True).clamp(min=1)).sum(1).mean())


def over_tokens(values: torch.Tensor, mask: torch.Tensor) -> float:
    return float((values * mask).sum() / mask.sum())


class Run:
    """A trainer in the middle of a step. Advantages are 0, so that its loss is the KL term."""

    def __init__(self, loss_type: str, beta: float = BETA, *, ranks: int = 1, **settings: Any) -> None:
        self.log_probs = (torch.sin(torch.arange(32.0)).reshape(4, 8) - 2).requires_grad_()
        self.reference = self.log_probs.detach() + LOG_RATIOS
        # Later releases multiply the KL by the ratio of the policies unless they are told not to.
        fields = {"use_bias_correction_kl": False, "steps_per_generation": 1, "loss_type": loss_type, "beta": beta}
        self.trainer = stub_grpo_trainer(grpo_trainer, self.log_probs, self.reference, **{**fields, **settings})
        if ranks == 2:
            other = torch.tensor([OF_OTHER_RANK, 1.0])
            gather = dict.fromkeys(("gather", "gather_for_metrics"), lambda own: torch.stack([own.mean(), other[0]]))
            # From 1.9.0 on the sum of the KL and the number of tokens are reduced.
            vars(self.trainer.accelerator).update(gather, reduce=lambda sums, reduction: sums + other * sums[1])

    def loss(self, lengths: Sequence[int] = LENGTHS[0], mode: str = "train", **inputs: Any) -> torch.Tensor:
        self.trainer.model.training, self.trainer.control.should_evaluate = mode == "train", mode == "eval"
        # 0.26 looks at the tools of the trainer, and later releases at the batch.
        self.trainer.tools = "tool_mask" in inputs
        mask = mask_of(lengths)
        batch = {
            "prompt_ids": torch.ones(4, 1, dtype=torch.long),
            "prompt_mask": torch.ones(4, 1, dtype=torch.long),
            "completion_ids": torch.ones_like(mask),
            "completion_mask": mask,
            "advantages": torch.zeros(4),
            "old_per_token_logps": None,
            "ref_per_token_logps": self.reference,
            # Of the losses that are divided by the tokens of the step.
            "num_items_in_batch": mask.sum(),
        }
        loss: torch.Tensor = self.trainer._compute_loss(None, {**batch, **inputs})
        return loss

    def gradient(self, loss: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(loss, self.log_probs)[0]

    @property
    def metrics(self) -> dict[str, dict[str, list[float]]]:
        return {mode: {**metrics} for mode, metrics in self.trainer._metrics.items()}

    @property
    def kl(self) -> dict[str, list[float]]:
        return {mode: metrics["kl"] for mode, metrics in self.metrics.items() if "kl" in metrics}

    @property
    def acts(self) -> int | None:
        return tiny.acts(ID, "trl.trainer.grpo_trainer:GRPOTrainer._compute_loss", self.trainer)


@each_mode
def test_the_kl_of_each_micro_batch_is_the_mean_over_sequences(loss_type: str, mode: str) -> None:
    run = Run(loss_type)
    expected = []
    for step, lengths in enumerate(LENGTHS):
        run.trainer.state.global_step = step // 2
        run.loss(lengths, mode)
        expected.append(over_sequences(KL, mask_of(lengths)))
        assert run.kl == {mode: pytest.approx(expected)}
    assert run.acts == len(LENGTHS)


@each_mode
def test_trl_logs_the_mean_over_tokens(loss_type: str, mode: str, switch: Any) -> None:
    run = Run(loss_type)
    with switch.off():
        for lengths in LENGTHS:
            run.loss(lengths, mode)
    assert run.kl == {mode: pytest.approx([over_tokens(KL, mask_of(lengths)) for lengths in LENGTHS])}


@each_mode
@pytest.mark.parametrize("lengths", LENGTHS)
def test_the_loss_is_beta_times_this_kl(loss_type: str, mode: str, lengths: Sequence[int]) -> None:
    run = Run(loss_type)
    loss = run.loss(lengths, mode)
    assert float(loss) == pytest.approx(BETA * run.kl[mode][0])
    mask = mask_of(lengths)
    slope = BETA / 4 * (1 - LOG_RATIOS.exp()) * mask / mask.sum(1, keepdim=True).clamp(min=1)
    torch.testing.assert_close(run.gradient(loss), slope)


def test_the_kl_of_the_loss_is_corrected_by_the_ratio(loss_type: str) -> None:
    if not hasattr(grpo_trainer.GRPOConfig, "use_bias_correction_kl"):
        pytest.skip("this release corrects no KL")
    run = Run(loss_type, use_bias_correction_kl=True)
    loss = run.loss(old_per_token_logps=run.log_probs.detach() - torch.cos(torch.arange(8.0)) / 4)
    assert float(loss) == pytest.approx(BETA * run.kl["train"][0])
    assert float(loss) != pytest.approx(BETA * over_sequences(KL, mask_of(LENGTHS[0])))


@each_mode
def test_the_kl_is_the_mean_over_the_ranks(loss_type: str, mode: str) -> None:
    run = Run(loss_type, ranks=2)
    run.loss(mode=mode)
    assert run.kl == {mode: pytest.approx([(over_sequences(KL, mask_of(LENGTHS[0])) + OF_OTHER_RANK) / 2])}


@each_mode
def test_tokens_that_a_tool_has_written_are_left_out(loss_type: str, mode: str) -> None:
    if not TAKES_TOOLS:
        pytest.skip("this release has no tools")
    run = Run(loss_type)
    loss = run.loss(LENGTHS[0], mode, tool_mask=OF_POLICY)
    assert run.kl == {mode: pytest.approx([over_sequences(KL, mask_of(LENGTHS[0]) * OF_POLICY)])}
    assert float(loss) == pytest.approx(BETA * run.kl[mode][0])


def test_a_value_is_added_to_those_before(loss_type: str) -> None:
    run = Run(loss_type)
    for mode in ("train", "eval"):
        run.trainer._metrics[mode]["kl"].append(3.0)
    run.loss(mode="eval")
    assert run.kl == {"train": [3.0], "eval": [3.0, pytest.approx(over_sequences(KL, mask_of(LENGTHS[0])))]}


def test_each_trainer_has_its_own_kl(loss_type: str) -> None:
    runs = Run(loss_type), Run(loss_type, 0.1)
    for lengths in LENGTHS:
        for run in runs:
            run.loss(lengths)
    for run in runs:
        assert run.kl == {"train": pytest.approx([over_sequences(KL, mask_of(lengths)) for lengths in LENGTHS])}


def numbers_of(loss_type: str, mode: str, beta: float = BETA) -> tuple[Any, ...]:
    """Return the loss, its gradient, the metrics and the acts of a micro-batch with advantages."""
    run = Run(loss_type, beta)
    loss = run.loss(LENGTHS[0], mode, advantages=torch.tensor([0.5, -1.0, 2.0, 1.0]))
    return loss.tolist(), run.gradient(loss).tolist(), run.metrics, run.acts


@each_mode
def test_nothing_but_the_kl_changes(loss_type: str, mode: str, switch: Any) -> None:
    *patched, metrics, _ = numbers_of(loss_type, mode)
    with switch.off():
        *of_trl, metrics_of_trl, _ = numbers_of(loss_type, mode)
    assert patched == of_trl
    assert metrics[mode].pop("kl") != metrics_of_trl[mode].pop("kl")
    assert metrics == metrics_of_trl


@each_mode
@pytest.mark.parametrize("other", ["bnpo", "dr_grpo", "dapo"])
def test_another_loss_keeps_its_kl(other: str, mode: str, switch: Any) -> None:
    if f'"{other}"' not in inspect.getsource(grpo_trainer):
        pytest.skip("this release has no such loss")
    *patched, acts = numbers_of(other, mode)
    with switch.off():
        *of_trl, _ = numbers_of(other, mode)
    assert patched == of_trl
    assert acts == 0


@each_mode
def test_there_is_no_kl_without_beta(loss_type: str, mode: str, switch: Any) -> None:
    *patched, acts = numbers_of(loss_type, mode, 0.0)
    with switch.off():
        *of_trl, _ = numbers_of(loss_type, mode, 0.0)
    assert patched == of_trl
    assert "kl" not in patched[-1][mode]
    assert acts == 0


def test_the_trainer_keeps_its_beta(loss_type: str) -> None:
    run = Run(loss_type)
    run.trainer.beta = beta = 0.25
    run.loss()
    assert run.trainer.beta is beta


def test_the_trainer_keeps_its_beta_after_an_error(loss_type: str) -> None:
    run = Run(loss_type)
    run.trainer.beta = beta = 0.25
    with pytest.raises(KeyError):
        run.trainer._compute_loss(None, {})
    assert run.trainer.beta is beta
    assert run.kl == {}
