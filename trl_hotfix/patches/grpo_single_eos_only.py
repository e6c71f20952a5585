"""GRPO and RLOO end a completion at the tokenizer's end-of-sequence token only, and at no other that the model has.

Many chat models have several: Gemma's turns end with ``<end_of_turn>`` and Llama 3's tool calls with ``<|eom_id|>``,
which their ``generation_config.eos_token_id`` lists and ``tokenizer.eos_token_id`` is not. Such a completion is sampled
on past its end up to ``max_completion_length``, what follows is rewarded and trained on, and it counts as truncated:
with ``mask_truncated_completions`` it is masked whole, and ``clipped_ratio`` is 1. With vLLM, which stops at all of
them, the completion is right and counts as truncated all the same.

TRL 1.14.2 has every token that the model lists end a completion. Here ``_generate_and_score_completions`` runs with a
``generation_config`` that lists them, and what it compares completions with is an id that equals each of them: the
mask, the lengths, the metrics and ``mask_truncated_completions`` are then TRL's own. The id is put into the trainer, or
into a view of its tokenizer, for the time of the call. With tools the trainer compares other things with that id, so
such runs are left alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from typing import Any

from ..authoring import absent, judge, shadowed
from ..model import Outcome
from ..stubs import default_arguments, stub_that_generates, tiny_attention_model


def end_at_every_end(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Generate and score with all the end-of-sequence tokens that the model lists."""
    model = next((each for each in instance.model.modules() if "generation_config" in vars(each)), None)
    listed = None if model is None else model.generation_config.eos_token_id
    ids = set(listed if isinstance(listed, (list, tuple)) else [] if listed is None else [listed])
    owners = [instance, *(vars(instance).get(name) for name in ("_tokenizer", "processing_class"))]
    first = next((its for each in owners if (its := getattr(each, "eos_token_id", None)) is not None), None)
    if first is None or ids <= {first} or getattr(instance, "tools", None):
        return wrapped(*args, **kwargs)
    every = [first, *sorted(ids - {first})]
    with ExitStack() as stack:
        if "eos_token_id" in vars(instance):
            stack.enter_context(shadowed(instance, "eos_token_id", _AnyOf(first, every)))
        for name in ("_tokenizer", "processing_class"):
            if getattr(vars(instance).get(name), "eos_token_id", None) is not None:
                view = _with_ends(vars(instance)[name], _AnyOf(first, every))
                stack.enter_context(shadowed(instance, name, view))
        config = getattr(instance, "generation_config", None)
        if config is not None and "eos_token_id" not in (getattr(instance.args, "generation_kwargs", None) or {}):
            stack.enter_context(shadowed(config, "eos_token_id", every))
        return wrapped(*args, **kwargs)


class _AnyOf(int):
    """An id that equals several: ``id == any_of`` and ``tensor == any_of``. Otherwise it is the first of them."""

    every: list[int]

    def __new__(cls, first: int, every: list[int]) -> _AnyOf:
        made = super().__new__(cls, first)
        made.every = every
        return made

    def __eq__(self, other: object) -> bool:
        return other in self.every

    def __ne__(self, other: object) -> bool:
        return other not in self.every

    __hash__ = int.__hash__

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        import torch

        if function in (torch.Tensor.__eq__, torch.Tensor.eq, torch.eq):
            (tensor,) = (each for each in args if isinstance(each, torch.Tensor))
            (any_of,) = (each for each in args if isinstance(each, cls))
            return torch.isin(tensor, torch.tensor(any_of.every, device=tensor.device))
        return function(*(int(each) if isinstance(each, cls) else each for each in args), **(kwargs or {}))


def _with_ends(tokenizer: Any, any_of: _AnyOf) -> Any:
    import wrapt

    class EndsView(wrapt.CallableObjectProxy):  # type: ignore[type-arg]
        pass

    EndsView.eos_token_id = property(lambda self: any_of)  # type: ignore[attr-defined]
    return EndsView(tokenizer)


def a_completion_ends_at_each_end_of_the_model(module: ModuleType) -> Outcome:
    """A completion whose first token is the model's second end-of-sequence token: how many tokens are trained on?"""
    import torch
    from transformers import GenerationConfig

    method = "GRPO" if hasattr(module, "GRPOTrainer") else "RLOO"
    trainer_class = getattr(module, f"{method}Trainer")
    if "_generate_and_score_completions" not in vars(trainer_class):
        return absent("this release generates elsewhere")

    class Scored(Exception):
        pass

    def score(*args: Any, **kwargs: Any) -> Any:
        raise Scored

    def generate(input_ids: Any, *, generation_config: Any, **kwargs: Any) -> Any:
        ends = generation_config.eos_token_id
        stops = 5 in (ends if isinstance(ends, list) else [ends])
        return torch.cat([input_ids, torch.tensor([[5, 0, 0, 0] if stops else [5, 6, 7, 8]] * len(input_ids))], 1)

    def trained_on(**settings: Any) -> int:
        """The sum of the mask at the time when the completions are scored."""
        model = tiny_attention_model()
        model.generation_config.eos_token_id = [1, 5]
        model.generate = generate
        of_a_step = {"beta": 0.0, "num_iterations": 1, "steps_per_generation": 1, "num_generations": 1}
        arguments = default_arguments(getattr(module, f"{method}Config"), **{**of_a_step, **settings})
        trainer = stub_that_generates(
            trainer_class,
            arguments,
            model,
            generation_config=GenerationConfig(pad_token_id=0, eos_token_id=1),
            generation_kwargs={},
            reward_funcs=[score],
            reward_processing_classes=[None],
            reward_func_names=["score"],
            _calculate_rewards=score,
            _metrics=defaultdict(list, {"train": defaultdict(list), "eval": defaultdict(list)}),
            _is_vlm=False,
            eos_token_ids=[1, 5],
            environment_factories=None,
            environments=None,
            ref_model=None,
            model_kwarg_keys=set(),
        )
        trainer.accelerator.autocast = torch.no_grad
        try:
            trainer._generate_and_score_completions([{"prompt": "a"}])
        except Scored as scored:
            trace = scored.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_name == "_generate_and_score_completions":
                return int(trace.tb_frame.f_locals["completion_mask"].sum())
            trace = trace.tb_next
        raise AssertionError("the completions are not scored where they are generated")

    if "mask_truncated_completions" not in getattr(module, f"{method}Config").__dataclass_fields__:
        return judge(trained_on(), right=1, wrong=4)
    # Truncated or not: all is masked, or the one token is trained on.
    counted = trained_on(mask_truncated_completions=True)
    if counted not in (0, 1) or (trained_on() == 1) != (counted == 1):
        raise AssertionError(f"{trained_on()} tokens are trained on, with mask_truncated_completions {counted}")
    return judge(trained_on(), right=1, wrong=4, with_truncated_ones_masked=counted)
