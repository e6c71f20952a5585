"""With the Liger kernel GRPO divides dapo, cispo and vespo by the tokens of a micro-batch, and by their number.

``compute_liger_loss`` calls ``LigerFusedLinearGRPOLoss``, which divides the sum over a micro-batch by its tokens, over
all ranks, and returns that by ``current_gradient_accumulation_steps``; up to 0.27.0 in evaluation, too. TRL 1.11.0
gives the kernel ``num_items_in_batch``, which kernels before 0.8.2 do not take.

So the wrapper gives TRL's method a view of the kernel that takes the kernel's divisor out of the loss, and the tokens
of a step in. It counts them itself: up to 1.8 TRL's number has the tokens of truncated completions that the loss
leaves out. The completions of a generation are all in ``_buffered_inputs``, in micro-batches.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, judge, shadowed, wrapper
from ...model import Outcome
from ...testing import stub_grpo_trainer

_BY_TOKENS = ("dapo", "cispo", "vespo")


@wrapper
def divide_by_the_tokens_of_the_step(call: Call) -> Any:
    """Have the sum over the tokens divided by all tokens of the step, if the loss is such a sum."""
    trainer = call.trainer
    if trainer.loss_type not in _BY_TOKENS:
        return call()
    generation, parts = [call["inputs"]], 1.0
    if call.is_training:
        generation = trainer._buffered_inputs
        # A generation may be for several steps, or for a part of one.
        parts = trainer.args.steps_per_generation / trainer.current_gradient_accumulation_steps
    name = "liger_loss" if hasattr(trainer, "liger_loss") else "liger_grpo_loss"
    kernel = _divided_by(getattr(trainer, name), _tokens(generation), parts, trainer.accelerator)
    with shadowed(trainer, name, kernel), shadowed(trainer, "current_gradient_accumulation_steps", 1):
        return call()


def _tokens(generation: Sequence[Mapping[str, Any]]) -> Any:
    """Return how many tokens of the completions are in the loss. A tool's answers are not."""
    return sum((part["completion_mask"] * part.get("tool_mask", 1)).sum() for part in generation)


def _divided_by(kernel: Any, tokens: Any, parts: float, accelerator: Any) -> Any:
    """Return a view of the kernel whose loss is divided by one of so many ``parts`` of ``tokens``, over all ranks."""
    import torch
    import wrapt

    class View(wrapt.CallableObjectProxy):  # type: ignore[type-arg]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            loss, metrics = self.__wrapped__(*args, **kwargs)
            counts = torch.stack([kwargs["attention_mask"].sum().float(), tokens.float()])
            # The mean of the ranks is the loss. So each is divided by the mean of their tokens.
            mean = accelerator.gather(counts).view(-1, 2).mean(dim=0).clamp(min=1)
            return loss * mean[0] / mean[1] * parts, metrics

    return View(kernel)


def loss_is_divided_by_the_tokens_of_the_step(module: ModuleType) -> Outcome:
    """Differentiate the loss of the first of two micro-batches. It has 3 tokens, the other one has 1.

    The loss of a token is the weight of the head, so that right is 3 / 4, and wrong 3 / 3 / 2.
    """
    import torch

    method = getattr(module.GRPOTrainer, "compute_liger_loss", None)
    if method is None:
        return absent("this release has no method for the loss of Liger")
    if "dapo" not in str(module.GRPOConfig.__dataclass_fields__["loss_type"].metadata):
        return absent("this release has no loss that is divided by the tokens of the step")

    def kernel(lin_weight: Any, attention_mask: Any, num_items_in_batch: Any = None, **others: Any) -> Any:
        """Return what Liger's kernel does. From 0.8.2 on it takes a number of tokens."""
        tokens = attention_mask.sum()
        return lin_weight * tokens / (tokens if num_items_in_batch is None else num_items_in_batch), (torch.zeros(()),)

    weight = torch.nn.Parameter(torch.tensor(2.0))
    parts = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    micro_batches = [{name: torch.ones(1, length, dtype=torch.long) for name in parts} for length in (3, 1)]
    for micro_batch in micro_batches:
        micro_batch |= {"advantages": torch.ones(1), "num_items_in_batch": torch.tensor(4)}
    trainer = stub_grpo_trainer(module, loss_type="dapo", beta=0.0, steps_per_generation=2)
    # Up to 1.7 the kernel has another name.
    name = "liger_loss" if "liger_loss" in inspect.unwrap(method).__code__.co_names else "liger_grpo_loss"
    vars(trainer).update({name: kernel, "current_gradient_accumulation_steps": 2, "_buffered_inputs": micro_batches})
    trainer._get_last_hidden_state = lambda *args: None
    trainer.accelerator.state = SimpleNamespace(deepspeed_plugin=None)
    model = SimpleNamespace(lm_head=SimpleNamespace(weight=weight, bias=None))
    (gradient,) = torch.autograd.grad(trainer.compute_liger_loss(model, micro_batches[0]), weight)
    return judge(float(gradient), right=3 / 4, wrong=3 / 3 / 2)
