"""With the Liger kernel GRPO divides dapo, cispo and vespo by the tokens of a micro-batch, and by their number.

``compute_liger_loss`` calls ``LigerFusedLinearGRPOLoss``, which divides the sum over a micro-batch by its tokens, over
all ranks, and returns that by ``current_gradient_accumulation_steps``; up to 0.27.0 in evaluation, too. TRL 1.11.0
gives the kernel ``num_items_in_batch``, which kernels before 0.8.2 do not take.

So the wrapper gives TRL's method a view of the kernel that takes the kernel's divisor out of the loss, and the tokens
of a step in. It counts them itself: up to 1.8 TRL's number has the tokens of truncated completions that the loss
leaves out. The completions of a generation are all in ``_buffered_inputs``, in micro-batches.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import absent, argument, shadowed
from ...model import Outcome
from ...testing import judge_with_gradients, stub_grpo_trainer, tiny_attention_model

_BY_TOKENS = ("dapo", "cispo", "vespo")


def divide_by_the_tokens_of_the_step(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Have the sum over the tokens divided by all tokens of the step, if the loss is such a sum."""
    if instance.loss_type not in _BY_TOKENS:
        return wrapped(*args, **kwargs)
    inputs, parts = argument(wrapped, args, kwargs, "inputs"), 1.0
    generation = [inputs]
    if instance.model.training:
        generation = instance._buffered_inputs
        # A generation may be for several steps, or for a part of one.
        parts = instance.args.steps_per_generation / instance.current_gradient_accumulation_steps
    name = "liger_loss" if hasattr(instance, "liger_loss") else "liger_grpo_loss"
    kernel = _divided_by(getattr(instance, name), _tokens(generation), parts, instance.accelerator)
    with shadowed(instance, name, kernel), shadowed(instance, "current_gradient_accumulation_steps", 1):
        return wrapped(*args, **kwargs)


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


_GENERATION = (((5, 3, 9), (8, 3, 4, 6)), ((7,), (2, 5)))
"""The completions of two micro-batches."""
_ADVANTAGES = ((1.5, -0.5), (-2.0, 0.25))
_PROMPT = (3, 4)
_MORE = 3.0
"""How many more tokens each count has on the other rank, if there are any."""


def loss_is_divided_by_the_tokens_of_the_step(module: ModuleType) -> Outcome:
    """Judge the losses of the micro-batches of a generation, with their gradients, on the first of two ranks."""
    method = getattr(module.GRPOTrainer, "compute_liger_loss", None)
    if method is None:
        return absent("this release has no method for the loss of Liger")
    if "dapo" not in str(module.GRPOConfig.__dataclass_fields__["loss_type"].metadata):
        return absent("this release has no loss that is divided by the tokens of the step")
    code = inspect.unwrap(method).__code__
    make = functools.partial(_Case, module, tiny_attention_model())
    cases = [make(kind, number) for kind in _BY_TOKENS for number in range(2)]
    cases += [make("dapo", number, micro_batches=steps) for number in range(2) for steps in (1, 4)]
    cases += [make("dapo", number, left_out="completion_mask") for number in range(2)]
    if "tool_mask" in code.co_consts:
        cases += [make("dapo", number, left_out="tool_mask") for number in range(2)]
    evaluations = [make("cispo", number, training=False) for number in range(2)]
    if "normalizer" in code.co_varnames:
        for case in evaluations:
            case.check_that_it_is_right()
    else:
        # Up to 0.27.0 an evaluation is divided by the micro-batches of a step, too.
        cases += evaluations
    # One token of both ranks, and none at all: the kernel divides by one or more.
    cases.append(make("dapo", 0, kept=(1, None), more=-1.0))
    for number in range(2):
        make("dapo", number, kept=(0, 0), more=0.0).check_that_it_is_right()
    for kind in ("bnpo", "dr_grpo"):
        make(kind, 0).check_that_it_is_right()
    return judge_with_gradients(list(cases[0].model.parameters()), [case.losses() for case in cases])


class _Case:
    """A micro-batch of the generation. A mask may leave out a completion, or all but some tokens of a micro-batch."""

    def __init__(
        self,
        module: ModuleType,
        model: Any,
        kind: str,
        number: int,
        *,
        micro_batches: int = 2,
        left_out: str = "",
        kept: tuple[int | None, int | None] = (None, None),
        more: float = _MORE,
        training: bool = True,
    ) -> None:
        import torch

        self.model, self.kind, self.micro_batches, self.training, self.more = model, kind, micro_batches, training, more
        generation = [_batch(index, left_out) for index in range(2)]
        for part, tokens in zip(generation, kept, strict=True):
            if tokens is not None:
                part["completion_mask"].view(-1)[tokens:] = 0
        self.batch = generation[number]
        counted = [int(_mask(part).sum()) for part in (generation if training else [self.batch])]
        self.tokens, self.own_tokens = sum(counted), int(_mask(self.batch).sum())
        for part in generation:
            part["num_items_in_batch"] = torch.tensor(2 * self.tokens + more)
        settings = {"loss_type": kind, "beta": 0.0, "steps_per_generation": 2, "temperature": 1.0}
        trainer = stub_grpo_trainer(module, training=training, **settings)
        # Up to 1.7 the kernel has another name.
        name = "liger_loss" if _names(module, "liger_loss") else "liger_grpo_loss"
        self.own = {name: functools.partial(_kernel, kind, more), "current_gradient_accumulation_steps": micro_batches}
        vars(trainer).update(**self.own, _buffered_inputs=generation, model_kwarg_keys=set(), _is_vlm=False)
        trainer.accelerator.num_processes, trainer.accelerator.state = 2, SimpleNamespace(deepspeed_plugin=None)
        trainer.accelerator.gather = lambda values: torch.stack([values, values + more]).flatten()
        self.trainer = trainer

    def losses(self) -> tuple[Any, Any, Any]:
        """Return the loss, and that with the tokens of the step and with those of the micro-batch in the divisor."""
        measured = self.trainer.compute_liger_loss(self.model, self.batch)
        if any(vars(self.trainer)[name] is not value for name, value in self.own.items()):
            raise AssertionError("the trainer is left with another kernel, or another number of micro-batches")
        mask = _mask(self.batch)
        total = _sum_over_tokens(self.kind, _log_probs(self.model, self.batch), self.batch["advantages"], mask)
        mean, own_mean = (max((2 * tokens + self.more) / 2, 1) for tokens in (self.tokens, self.own_tokens))
        divisor, wrong = mean * (self.micro_batches / 2 if self.training else 1), own_mean * self.micro_batches
        return measured, total / divisor, total / wrong

    def check_that_it_is_right(self) -> None:
        """Check the loss of a micro-batch that is divided as it should be in each release."""
        measured, right, _ = self.losses()
        if self.kind not in _BY_TOKENS:
            rows = {"bnpo": self.own_tokens, "dr_grpo": 100.0}
            mask = _mask(self.batch)
            total = _sum_over_tokens(self.kind, _log_probs(self.model, self.batch), self.batch["advantages"], mask)
            right = total / rows[self.kind] / self.micro_batches
        # What is not a number is not right.
        if not abs(float((measured - right).detach())) <= 1e-6:
            raise AssertionError(f"{self.kind} is {measured} and not {right}")


def _names(module: ModuleType, attribute: str) -> bool:
    return attribute in inspect.unwrap(module.GRPOTrainer.compute_liger_loss).__code__.co_names


def _batch(number: int, left_out: str) -> dict[str, Any]:
    """Return a micro-batch of the generation, with padding on the right."""
    import torch

    completions = _GENERATION[number]
    longest = max(map(len, completions))
    lengths = torch.tensor([[len(completion)] for completion in completions])
    padded = [[*completion, *[0] * (longest - len(completion))] for completion in completions]
    places = torch.arange(longest)[None]
    batch = {
        "prompt_ids": torch.tensor([_PROMPT] * len(completions)),
        "prompt_mask": torch.ones(len(completions), len(_PROMPT), dtype=torch.long),
        "completion_ids": torch.tensor(padded),
        "completion_mask": (places < lengths).long(),
        "advantages": torch.tensor(_ADVANTAGES[number]),
    }
    if left_out:
        # The first completion of the generation is out of the loss: it is truncated, or a tool's.
        left = torch.ones_like(batch["completion_ids"])
        left[0] = number
        batch[left_out] = batch.get(left_out, 1) * left
    return batch


def _mask(batch: Mapping[str, Any]) -> Any:
    return batch["completion_mask"] * batch.get("tool_mask", 1)


def _log_probs(model: Any, batch: Mapping[str, Any]) -> Any:
    """Return the log-probs of the completions. A completion that is out of the loss is not attended to, either."""
    import torch

    tokens = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    logits = model(input_ids=tokens, attention_mask=attention).logits[:, len(_PROMPT) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, batch["completion_ids"][..., None])[..., 0]


def _sum_over_tokens(kind: str, log_probs: Any, advantages: Any, mask: Any) -> Any:
    """Return the sum of the losses of the tokens, for the policy that has drawn them and without a reference."""
    gains = log_probs if kind in ("cispo", "vespo") else (log_probs - log_probs.detach()).exp()
    return -(gains * advantages[:, None] * mask).sum()


def _kernel(
    kind: str,
    more: float,
    *,
    _input: Any,
    lin_weight: Any,
    selected_token_ids: Any,
    attention_mask: Any,
    advantages: Any,
    num_items_in_batch: Any = None,
    **others: Any,
) -> tuple[Any, tuple[Any, ...]]:
    """Return what ``LigerFusedLinearGRPOLoss`` returns on the first of two ranks. From 0.8.2 on it takes a number."""
    log_probs = (_input @ lin_weight.T).log_softmax(-1).gather(-1, selected_token_ids[..., None])[..., 0]
    own = attention_mask.sum()
    tokens = 2 * own + more if num_items_in_batch is None else num_items_in_batch
    divisor = {"bnpo": own, "dr_grpo": 100.0}.get(kind, (tokens / 2).clamp(min=1))
    return _sum_over_tokens(kind, log_probs, advantages, attention_mask) / divisor, (own * 0.0,)
