"""The padding of the shorter prompts changes no log-prob, of the policy or of its reference."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl.trainer import grpo_trainer

from trl_hotfix.testing import PromptTokenizer, stub_with_reference, token_losses_of_a_group

import tiny

ID, TARGET = "grpo-no-attention-mask", "trl.trainer.grpo_trainer:GRPOTrainer.compute_loss"
BETA, REWARDS = 0.3, (1.0, 4.0, 2.0, 0.0, 3.0, 8.0)
LENGTHS = (3, 1, 4, 2, 3, 4)
"""Tokens of the completions before their end of sequence, which the longest do not have."""

Prompts = tuple[str, ...]


class Tokenizer(PromptTokenizer):
    """A tokenizer that has a token for each letter, and pads on the left."""

    def __init__(self, *, returns_a_mask: bool) -> None:
        self.returns_a_mask = returns_a_mask

    def __call__(self, text: Any = None, return_tensors: str | None = "pt", **kwargs: Any) -> Any:
        longest = max(map(len, text))
        rows = [[0] * (longest - len(prompt)) + [ord(letter) - 94 for letter in prompt] for prompt in text]
        ids = torch.tensor(rows)
        return {"input_ids": ids} | ({"attention_mask": (ids != 0).long()} if self.returns_a_mask else {})


class Model(torch.nn.Module):
    """Logits are sums over the tokens so far. ``masks`` has the mask of each call."""

    def __init__(self, phase: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.sin(torch.arange(2.0 * 16 * 16) + phase).view(2, 16, 16))
        self.masks: list[Any] = []

    def forward(self, input_ids: Any, attention_mask: Any = None, num_logits_to_keep: int = 0) -> Any:
        self.masks.append(attention_mask)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        here, before = self.weight[:, input_ids]
        logits = here + (before * mask[..., None]).cumsum(1)
        return SimpleNamespace(logits=logits[:, -num_logits_to_keep:])

    def log_probs(self, ids: Any) -> Any:
        """Return the log-probs of the last four tokens of rows without padding."""
        here, before = self.weight[:, ids]
        logits = (here + before.cumsum(1))[:, -5:-1]
        return logits.log_softmax(-1).gather(-1, ids[:, -4:, None])[..., 0]


class Case:
    """A trainer on two completions of each of three prompts. With an adapter the model is its own reference."""

    def __init__(
        self, *, has_adapter: bool = False, max_prompt_length: int | None = None, returns_a_mask: bool = True
    ) -> None:
        self.policy, self.reference = Model(0.0), Model(1.0)
        self.max_prompt_length = max_prompt_length
        settings: dict[str, Any] = {"has_adapter": has_adapter, "temperature": 1.0, "beta": BETA, "num_generations": 2}
        self.trainer = stub_with_reference(
            grpo_trainer, self.policy, self.reference, self._generate, REWARDS, **settings
        )
        self.tokenizer = Tokenizer(returns_a_mask=returns_a_mask)
        vars(self.trainer).update(processing_class=self.tokenizer, max_prompt_length=max_prompt_length)

    def _generate(self, input_ids: Any, **kwargs: Any) -> Any:
        # The model calls itself here, with a mask of its own.
        self.policy(input_ids, num_logits_to_keep=1)
        assert self.policy.masks.pop() is None
        rows = [
            [*(2 + (7 * row + 3 * place + len(self.policy.masks)) % 14 for place in range(length)), 1, 0, 0, 0][:4]
            for row, length in enumerate(LENGTHS)
        ]
        self.tokens = torch.cat([input_ids.repeat_interleave(2, 0), torch.tensor(rows)], dim=1)
        return self.tokens

    def loss(self, prompts: Prompts, step: int = 0, *, training: bool = True) -> Any:
        """Return the loss of completions of these prompts by TRL's method."""
        self.trainer.state.global_step = step
        self.trainer.model.train(training)
        return self.trainer.compute_loss(self.trainer.model, [{"prompt": prompt} for prompt in prompts])

    def formula(self, prompts: Prompts, *, counts_padding: bool = False) -> Any:
        """Return the loss of these completions: means over sequences of means over tokens."""
        lengths = [len(prompt[-(self.max_prompt_length or 0) :]) for prompt in prompts]
        rewards = torch.tensor(REWARDS).view(3, 2)
        trained_on = torch.arange(4) <= torch.tensor(LENGTHS).view(3, 2, 1)
        losses = []
        for number, length in enumerate(lengths):
            ids = self.tokens.view(3, 2, -1)[number, :, -4 - (max(lengths) if counts_padding else length) :]
            policy, reference = (model.log_probs(ids) for model in (self.policy, self.reference))
            token_losses = token_losses_of_a_group(policy, reference, rewards[number], BETA)
            losses.append((token_losses * trained_on[number]).sum(1) / trained_on[number].sum(1))
        return torch.stack(losses).mean()

    def assert_is(self, loss: Any, expected: Any) -> None:
        """Compare a loss and its gradient with those of the formula."""
        torch.testing.assert_close(loss, expected)
        gradients = (torch.autograd.grad(value, self.policy.weight)[0] for value in (loss, expected))
        torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


padded = pytest.mark.parametrize(
    ("prompts", "settings"),
    [
        (("a", "bcd", "ef"), {}),
        (("abcde", "f", "ab"), {"max_prompt_length": 3}),
        (("ab", "cdef", "a"), {"has_adapter": True}),
    ],
    ids=["whole prompts", "cut prompts", "adapter"],
)


@padded
def test_each_micro_batch_has_the_loss_of_prompts_without_padding(prompts: Prompts, settings: dict[str, Any]) -> None:
    cases = [Case(**settings) for _ in range(2)]
    micro_batches = (
        (prompts, 0, True),
        (("bcde", "f", "a"), 0, True),
        (("c", "bd", "aef"), 1, True),
        (prompts, 1, False),
    )
    for given, step, training in micro_batches:
        for case in cases:
            case.assert_is(case.loss(given, step, training=training), case.formula(given))
    assert tiny.acts(ID, TARGET, cases[1].trainer) == len(micro_batches)


@padded
def test_trl_has_the_loss_of_prompts_with_their_padding(
    prompts: Prompts, settings: dict[str, Any], switch: Any
) -> None:
    case = Case(**settings)
    with switch.off():
        loss = case.loss(prompts)
    case.assert_is(loss, case.formula(prompts, counts_padding=True))


def test_policy_and_reference_have_one_mask() -> None:
    case = Case()
    case.loss(("a", "bcd", "ef"))
    of_prompts = torch.tensor([[0, 0, 1], [1, 1, 1], [0, 1, 1]]).repeat_interleave(2, 0)
    expected = torch.cat([of_prompts, torch.ones(6, 4, dtype=torch.long)], dim=1)
    for model in (case.policy, case.reference):
        (mask,) = model.masks
        assert mask.equal(expected)


def test_a_loss_leaves_the_trainer_its_tokenizer_and_its_reference() -> None:
    case = Case()
    case.loss(("a", "bcd", "ef"))
    assert case.trainer.processing_class is case.tokenizer
    assert case.trainer.ref_model is case.reference


@pytest.mark.parametrize(
    ("prompts", "settings"),
    [
        (("ab", "cd", "ef"), {}),
        (("abcd", "ef", "ab"), {"max_prompt_length": 2}),
        (("a", "bcd", "ef"), {"returns_a_mask": False}),
    ],
    ids=["one length", "padding that is cut off", "no mask of the tokenizer"],
)
def test_without_padding_or_without_a_mask_the_loss_is_trls(
    prompts: Prompts, settings: dict[str, Any], switch: Any
) -> None:
    patched, unpatched = Case(**settings), Case(**settings)
    loss = patched.loss(prompts)
    with switch.off():
        assert loss.equal(unpatched.loss(prompts))
    assert patched.policy.masks == patched.reference.masks == [None]
    assert tiny.acts(ID, TARGET, patched.trainer) == 0
