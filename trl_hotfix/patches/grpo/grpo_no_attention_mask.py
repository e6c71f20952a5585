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
from types import ModuleType
from typing import Any

from ...authoring import Call, absent, judge, shadowed, wrapper
from ...model import Outcome
from ...testing import PromptTokenizer, stub_that_scores, tiny_causal_lm


@wrapper
def mask_the_padding_of_prompts(call: Call) -> Any:
    """Give policy and reference the mask of the prompts, with ones for their completions."""
    trainer, prompts = call.trainer, _Prompts(call.act_later())
    with ExitStack() as stack:
        stack.enter_context(shadowed(trainer, "processing_class", prompts.recorded_by(trainer.processing_class)))
        if (reference := getattr(trainer, "ref_model", None)) is not None:
            stack.enter_context(shadowed(trainer, "ref_model", prompts.masked_in(reference)))
        return call.with_(model=prompts.masked_in(call["model"]))()


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
        """Return the mask for these prompts with their completions, several for each prompt."""
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
    """Differentiate the loss by a logit of a prompt of one token, with two tokens of padding before it.

    The model multiplies its logits by the number of tokens that it attends to. The prompt has two completions of one
    token, a better and a worse one. So the gradient is that number times -advantage / 4. The other prompt, which has no
    padding, has equal rewards, and adds nothing.
    """
    import torch

    if "generate" not in inspect.unwrap(module.GRPOTrainer.compute_loss).__code__.co_names:
        return absent("in this release the loss is computed with the mask that the completions were drawn with")

    class Tokenizer(PromptTokenizer):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            ids = torch.tensor([[0, 0, 2], [3, 4, 5]])
            return {"input_ids": ids, "attention_mask": (ids != 0).long()}

    def attend(model: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        mask = kwargs.get("attention_mask", torch.ones_like(args[0]))
        outputs.logits = (outputs.logits * mask.cumsum(1)[..., None])[:, -kwargs["num_logits_to_keep"] :]

    model = tiny_causal_lm()
    model.register_forward_hook(attend, with_kwargs=True)
    completions, rewards = [[6], [7], [6], [7]], [1.0, 0.0, 0.0, 0.0]
    trainer = stub_that_scores(module, completions, rewards, model=model, reference=model, num_generations=2)
    trainer.processing_class = Tokenizer()
    model.generate = lambda input_ids, **kwargs: torch.cat(
        [input_ids.repeat_interleave(2, 0), torch.tensor(completions)], 1
    )
    loss = trainer.compute_loss(model, [{"prompt": "a"}, {"prompt": "b c d"}])
    (gradient,) = torch.autograd.grad(loss, model.weight)
    unit = -0.5 / (0.5**0.5 + 1e-4) / 4
    return judge(float(gradient[2, 6]), right=unit, wrong=3 * unit)
