"""GRPO of 0.14.0 computes the log-probs of policy and reference without an attention mask.

``get_per_token_logps`` within ``compute_loss`` (line 436) calls the model with ``input_ids`` alone. Prompts are padded
on the left, so every token of a shorter prompt and of its completions attends to padding. Pull request 2708 passes the
mask in 0.15.0.

What follows the end of a completion is masked there, too. No token that is trained on comes after it, so that this
changes no log-prob of a decoder, and is left out here.

The mask of the prompts is a local variable, which TRL cuts to ``max_prompt_length`` on the left. So it is recorded
where the tokenizer returns it, and a view of each model adds it to the call. The policy's own ``generate`` is given the
mask by TRL, and calls the model itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import absent, act_of_this_call, argument, replaced_argument, shadowed
from ...model import Outcome
from ...testing import PromptTokenizer, judge_with_gradients, stub_with_reference, token_losses_of_a_group


def mask_the_padding_of_prompts(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Give policy and reference the mask of the prompts, with ones for their completions."""
    prompts = _Prompts(act_of_this_call())
    policy = prompts.masked_in(argument(wrapped, args, kwargs, "model"))
    args, kwargs = replaced_argument(wrapped, args, kwargs, "model", policy)
    with ExitStack() as stack:
        stack.enter_context(shadowed(instance, "processing_class", prompts.recorded_by(instance.processing_class)))
        if (reference := getattr(instance, "ref_model", None)) is not None:
            stack.enter_context(shadowed(instance, "ref_model", prompts.masked_in(reference)))
        return wrapped(*args, **kwargs)


class _Prompts:
    """The mask of the prompts that are tokenized in a call of ``compute_loss``."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.act = act
        self.mask: Any = None

    def recorded_by(self, tokenizer: Any) -> Any:
        """Return a view of ``tokenizer`` whose calls record the mask that they return."""
        import wrapt

        prompts = self

        class View(wrapt.CallableObjectProxy):  # type: ignore[type-arg]
            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                encoded = self.__wrapped__(*args, **kwargs)
                prompts.mask = encoded.get("attention_mask")
                return encoded

        return View(tokenizer)

    def masked_in(self, model: Any) -> Any:
        """Return a view of ``model``, wrapped or not, whose calls are given a mask if a prompt is padded."""
        import wrapt

        prompts = self

        class View(wrapt.CallableObjectProxy):  # type: ignore[type-arg]
            def __call__(self, input_ids: Any, **kwargs: Any) -> Any:
                return self.__wrapped__(input_ids, **kwargs, **prompts.mask_of(input_ids, kwargs["num_logits_to_keep"]))

        return View(model)

    def mask_of(self, input_ids: Any, num_logits_to_keep: int) -> dict[str, Any]:
        """Return the mask for these prompts with their completions, of which several follow each prompt."""
        import torch

        if self.mask is None:  # A tokenizer can be made to return none.
            return {}
        # One logit more is kept than a completion has tokens.
        length = input_ids.size(1) + 1 - num_logits_to_keep
        of_prompts = self.mask[:, -length:].to(input_ids.device)
        if of_prompts.all():
            return {}
        self.act()
        mask = torch.ones_like(input_ids)
        mask[:, :length] = of_prompts.repeat_interleave(len(input_ids) // len(of_prompts), 0)
        return {"attention_mask": mask}


def padding_changes_no_log_prob(module: ModuleType) -> Outcome:
    """Compare losses and gradients with the formula on rows without their padding, for prompts of unequal lengths.

    Three micro-batches of two steps and one in evaluation, prompts that are cut, and another trainer with an adapter
    whose model is wrapped. Without padding, and without a mask from the tokenizer, the models are given none.
    """
    if "generate" not in inspect.unwrap(module.GRPOTrainer.compute_loss).__code__.co_names:
        return absent("in this release the loss is computed with the mask that the completions were drawn with")
    trainer = _Trainer(module)
    outcomes = [
        trainer.judged(("a", "bcd", "ef"), 0, training=True),
        trainer.judged(("bcde", "f", "a"), 0, training=True),
        trainer.judged(("c", "bd", "aef"), 1, training=True),
        trainer.judged(("fed", "cb", "a"), 1, training=False),
        _Trainer(module, max_prompt_length=3).judged(("abcde", "f", "ab"), 0, training=True),
        _Trainer(module, has_adapter=True).judged(("ab", "cdef", "a"), 0, training=True),
    ]
    if any(outcome.verdict is not outcomes[0].verdict for outcome in outcomes):
        raise AssertionError(f"some prompts are masked, and others are not: {outcomes}")
    _check_left_alone(module)
    return outcomes[0]


def _check_left_alone(module: ModuleType) -> None:
    """Check that no mask is given where there is no padding, where it is cut off, and where there is no mask."""
    for prompts, settings in (
        (("ab", "cd", "ef"), {}),
        (("abcd", "ef", "ab"), {"max_prompt_length": 2}),
        (("a", "bcd", "ef"), {"returns_a_mask": False}),
    ):
        trainer = _Trainer(module, **settings)
        trainer.loss_of(prompts)
        if any(mask is not None for mask in trainer.masks):
            raise AssertionError(f"a mask is given for {prompts}, with {settings}")


_BETA, _REWARDS = 0.3, (1.0, 4.0, 2.0, 0.0, 3.0, 8.0)
_LENGTHS = (3, 1, 4, 2, 3, 4)
"""Tokens of the completions before their end of sequence, which the longest do not have."""


class _Tokenizer(PromptTokenizer):
    """A tokenizer that has a token for each letter, and pads on the left."""

    def __init__(self, *, returns_a_mask: bool) -> None:
        self.returns_a_mask = returns_a_mask

    def __call__(self, text: Any = None, return_tensors: str | None = "pt", **kwargs: Any) -> Any:
        import torch

        longest = max(map(len, text))
        rows = [[0] * (longest - len(prompt)) + [ord(letter) - 94 for letter in prompt] for prompt in text]
        ids = torch.tensor(rows)
        return {"input_ids": ids} | ({"attention_mask": (ids != 0).long()} if self.returns_a_mask else {})


class _Trainer:
    """A trainer on two completions of each of three prompts. With an adapter the model is its own reference."""

    def __init__(
        self,
        module: ModuleType,
        *,
        has_adapter: bool = False,
        max_prompt_length: int | None = None,
        returns_a_mask: bool = True,
    ) -> None:
        self.masks: list[Any] = []
        self.policy, self.reference = _model(0.0, self.masks), _model(1.0, self.masks)
        self.max_prompt_length = max_prompt_length
        self.trainer = stub_with_reference(
            module,
            self.policy,
            self.reference,
            self._generate,
            _REWARDS,
            has_adapter=has_adapter,
            temperature=1.0,
            beta=_BETA,
            num_generations=2,
        )
        self.tokenizer = _Tokenizer(returns_a_mask=returns_a_mask)
        vars(self.trainer).update(processing_class=self.tokenizer, max_prompt_length=max_prompt_length)

    def _generate(self, input_ids: Any, **kwargs: Any) -> Any:
        import torch

        # The model calls itself here, with a mask of its own.
        self.policy(input_ids, num_logits_to_keep=1)
        if self.masks.pop() is not None:
            raise AssertionError("the model is given a mask where it generates")
        rows = [
            [*(2 + (7 * row + 3 * place + len(self.masks)) % 14 for place in range(length)), 1, 0, 0, 0][:4]
            for row, length in enumerate(_LENGTHS)
        ]
        self.tokens = torch.cat([input_ids.repeat_interleave(2, 0), torch.tensor(rows)], dim=1)
        return self.tokens

    def loss_of(self, prompts: tuple[str, ...]) -> Any:
        """Return the loss of completions of these prompts by the real method."""
        trainer = self.trainer
        loss = trainer.compute_loss(trainer.model, [{"prompt": prompt} for prompt in prompts])
        if trainer.processing_class is not self.tokenizer or trainer.ref_model not in (None, self.reference):
            raise AssertionError("the trainer has another tokenizer or another reference afterwards")
        return loss

    def judged(self, prompts: tuple[str, ...], global_step: int, *, training: bool) -> Outcome:
        """Judge loss and gradient of a micro-batch of completions of these prompts."""
        self.trainer.state.global_step = global_step
        self.trainer.model.train(training)
        loss = self.loss_of(prompts)
        cut = [len(prompt[-(self.max_prompt_length or 0) :]) for prompt in prompts]
        right, wrong = self._expected(cut), self._expected([max(cut)] * len(cut))
        return judge_with_gradients([self.policy.weight], [(loss, right, wrong)])

    def _expected(self, lengths: list[int]) -> Any:
        """Return the loss by the formula, if prompts have so many tokens: means over sequences of means over tokens."""
        import torch

        rewards = torch.tensor(_REWARDS).view(3, 2)
        trained_on = torch.arange(4) <= torch.tensor(_LENGTHS).view(3, 2, 1)
        losses = []
        for prompt, length in enumerate(lengths):
            ids = self.tokens.view(3, 2, -1)[prompt, :, -4 - length :]
            policy, reference = (_log_probs(model.weight, ids) for model in (self.policy, self.reference))
            token_losses = token_losses_of_a_group(policy, reference, rewards[prompt], _BETA)
            losses.append((token_losses * trained_on[prompt]).sum(1) / trained_on[prompt].sum(1))
        return torch.stack(losses).mean()


def _log_probs(weight: Any, ids: Any) -> Any:
    """Return the log-probs of the last four tokens of rows without padding."""
    here, before = weight[:, ids]
    logits = (here + before.cumsum(1))[:, -5:-1]
    return logits.log_softmax(-1).gather(-1, ids[:, -4:, None])[..., 0]


def _model(phase: float, masks: list[Any]) -> Any:
    """Return a model whose logits are sums over the tokens so far, and which appends the mask of each call."""
    import torch

    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            index = torch.arange(2 * 16 * 16, dtype=torch.float32, device="cpu")
            self.weight = torch.nn.Parameter(torch.sin(index + phase).view(2, 16, 16))

        def forward(self, input_ids: Any, attention_mask: Any = None, num_logits_to_keep: int = 0) -> Any:
            masks.append(attention_mask)
            mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            here, before = self.weight[:, input_ids]
            logits = here + (before * mask[..., None]).cumsum(1)
            return SimpleNamespace(logits=logits[:, -num_logits_to_keep:])

    return Model()
