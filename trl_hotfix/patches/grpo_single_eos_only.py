"""GRPO and RLOO end a completion at the tokenizer's end-of-sequence token only, and not at the model's other ones.

In TRL 1.14.2 every token that ``generation_config.eos_token_id`` lists ends a completion. The wrapper changes only the
two values that ``_generate_and_score_completions`` reads, the ``generation_config`` and the id that it compares
completions with: the mask, the lengths, the metrics and ``mask_truncated_completions`` are then TRL's own. For the time
of the call the id is set on the trainer, or on a view of its tokenizer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from typing import Any

from ..authoring import absent, judge, shadowed
from ..model import Outcome
from ..testing import default_arguments, stub_that_generates, tiny_attention_model


def end_at_every_end(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Generate and score with all end-of-sequence tokens that the model lists."""
    model = next((module for module in instance.model.modules() if "generation_config" in vars(module)), None)
    listed = None if model is None else model.generation_config.eos_token_id
    ids = set(listed if isinstance(listed, (list, tuple)) else [] if listed is None else [listed])
    owners = [instance, *(vars(instance).get(name) for name in ("_tokenizer", "processing_class"))]
    first = next((eos for owner in owners if (eos := getattr(owner, "eos_token_id", None)) is not None), None)
    if first is None or ids <= {first} or getattr(instance, "tools", None):
        return wrapped(*args, **kwargs)
    eos_ids = [first, *sorted(ids - {first})]
    with ExitStack() as stack:
        if "eos_token_id" in vars(instance):
            stack.enter_context(shadowed(instance, "eos_token_id", _AnyOf(first, eos_ids)))
        for name in ("_tokenizer", "processing_class"):
            if getattr(vars(instance).get(name), "eos_token_id", None) is not None:
                view = _with_eos_id(vars(instance)[name], _AnyOf(first, eos_ids))
                stack.enter_context(shadowed(instance, name, view))
        config = getattr(instance, "generation_config", None)
        if config is not None and "eos_token_id" not in (getattr(instance.args, "generation_kwargs", None) or {}):
            stack.enter_context(shadowed(config, "eos_token_id", eos_ids))
        return wrapped(*args, **kwargs)


class _AnyOf(int):
    """An id that equals each of several, in ``id == eos`` and ``tensor == eos``. Otherwise it is the first of them."""

    ids: list[int]

    def __new__(cls, first: int, ids: list[int]) -> _AnyOf:
        eos = super().__new__(cls, first)
        eos.ids = ids
        return eos

    def __eq__(self, other: object) -> bool:
        return other in self.ids

    def __ne__(self, other: object) -> bool:
        return other not in self.ids

    __hash__ = int.__hash__

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        import torch

        if function in (torch.Tensor.__eq__, torch.Tensor.eq, torch.eq):
            (tensor,) = (operand for operand in args if isinstance(operand, torch.Tensor))
            (eos,) = (operand for operand in args if isinstance(operand, cls))
            return torch.isin(tensor, torch.tensor(eos.ids, device=tensor.device))
        return function(*(int(value) if isinstance(value, cls) else value for value in args), **(kwargs or {}))


def _with_eos_id(tokenizer: Any, eos: _AnyOf) -> Any:
    """Return a view of ``tokenizer`` whose ``eos_token_id`` is ``eos``."""
    import wrapt

    class EosView(wrapt.CallableObjectProxy):  # type: ignore[type-arg]
        pass

    EosView.eos_token_id = property(lambda self: eos)  # type: ignore[attr-defined]
    return EosView(tokenizer)


def a_completion_ends_at_each_end_of_the_model(module: ModuleType) -> Outcome:
    """Count the trained tokens of a completion whose first token is the model's second end-of-sequence token."""
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
        eos = generation_config.eos_token_id
        stops = 5 in (eos if isinstance(eos, list) else [eos])
        return torch.cat([input_ids, torch.tensor([[5, 0, 0, 0] if stops else [5, 6, 7, 8]] * len(input_ids))], 1)

    def trained_on(**settings: Any) -> int:
        """Return the sum of the completion mask when the completions are scored."""
        model = tiny_attention_model()
        model.generation_config.eos_token_id = [1, 5]
        model.generate = generate
        step_settings = {"beta": 0.0, "num_iterations": 1, "steps_per_generation": 1, "num_generations": 1}
        arguments = default_arguments(getattr(module, f"{method}Config"), **{**step_settings, **settings})
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
    # A truncated completion is masked altogether; of one that has ended, its one token is trained on.
    counted = trained_on(mask_truncated_completions=True)
    if counted not in (0, 1) or (trained_on() == 1) != (counted == 1):
        raise AssertionError(f"{trained_on()} tokens are trained on, with mask_truncated_completions {counted}")
    return judge(trained_on(), right=1, wrong=4, with_truncated_ones_masked=counted)
