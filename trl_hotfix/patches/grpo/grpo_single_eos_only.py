"""GRPO and RLOO end a completion at the tokenizer's end-of-sequence token only, and not at the model's other ones.

In TRL 1.14.2 every token that ``generation_config.eos_token_id`` lists ends a completion. The wrapper changes only the
two values that ``_generate_and_score_completions`` (0.15: ``_prepare_inputs``) reads, the ``generation_config`` and the
id that it compares completions with: the mask, the lengths, the metrics and ``mask_truncated_completions`` are then
TRL's own. For the time of the call the id is set on the trainer, or on a view of its tokenizer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack, suppress
from types import ModuleType
from typing import Any

from ...authoring import absent, judge, shadowed
from ...model import Outcome, Verdict
from ...testing import scored_completions, stub_that_scores


def end_at_every_end(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Generate and score with all end-of-sequence tokens that the model lists."""
    configs = (vars(module).get("generation_config") for module in instance.model.modules())
    listed = next((config.eos_token_id for config in configs if config is not None), None)
    ids = set(listed if isinstance(listed, (list, tuple)) else [] if listed is None else [listed])
    owners = [instance, *(vars(instance).get(name) for name in ("_tokenizer", "processing_class"))]
    first = next((eos for owner in owners if (eos := getattr(owner, "eos_token_id", None)) is not None), None)
    if first is None or ids <= {first} or getattr(instance, "tools", None):
        return wrapped(*args, **kwargs)
    eos_ids = [first, *sorted(ids - {first})]
    with ExitStack() as stack:
        # The trainer compares with an id of its own from 0.20 to 1.2, and with that of its tokenizer before and after.
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
            return torch.stack([tensor == one for one in eos.ids]).any(0)
        return function(*(int(value) if isinstance(value, cls) else value for value in args), **(kwargs or {}))


def _with_eos_id(tokenizer: Any, eos: _AnyOf) -> Any:
    """Return a view of ``tokenizer`` whose ``eos_token_id`` is ``eos``."""
    import wrapt

    class EosView(wrapt.CallableObjectProxy):  # type: ignore[type-arg]
        pass

    EosView.eos_token_id = property(lambda self: eos)  # type: ignore[attr-defined]
    return EosView(tokenizer)


def a_completion_ends_at_each_end_of_the_model(module: ModuleType) -> Outcome:
    """Compare the masks of four completions with their lengths, in two steps and an evaluation of two trainers.

    They end at the model's second and third end of sequence, at the tokenizer's, and not at all.
    """
    method = "GRPO" if hasattr(module, "GRPOTrainer") else "RLOO"
    fields = getattr(module, f"{method}Config").__dataclass_fields__
    _check_the_id()
    outcomes = []
    try:
        for ends in ([1, 5, 7], [7, 5]):
            case = _Case(module, ends)
            lengths = [case.lengths(step) for step in (0, 0, 1)]
            case.trainer.model.eval()
            lengths.append(case.lengths(1))
            outcomes += [judge(digits, right=1324, wrong=4424) for digits in lengths]
    except NotImplementedError:
        return absent("this release scores its completions in no method of its own")
    if len({outcome.verdict for outcome in outcomes}) != 1:
        raise AssertionError(f"the calls do not agree: {outcomes}")
    if outcomes[0].verdict is Verdict.REPRODUCED or _constructor_lists_the_ends(module):
        return outcomes[0]
    _check_without_an_end(module)
    cases = {
        "the model has one end": (_Case(module, 5), 1424, [1, 5]),
        "it has the tokenizer's": (_Case(module, 1), 4424, 1),
        "it has none": (_Case(module, None), 4424, 1),
        "generation_kwargs has one": (_Case(module, [1, 5, 7], generation_kwargs={"eos_token_id": 1}), 1324, 1),
        "there is no generation_config": (_Case(module, [1, 5, 7], generation_config=None), 1324, None),
    }
    if "mask_truncated_completions" in fields:
        # A truncated completion is masked altogether; of one that has ended, its tokens are trained on.
        cases["truncated"] = (_Case(module, [1, 5, 7], mask_truncated_completions=True), 1320, [1, 5, 7])
    if "generation_kwargs" not in inspect.signature(module.unwrap_model_for_generation).parameters:
        # Later releases change the model's own generation_config while it generates.
        without_config = _Case(module, None)
        without_config.trainer.model.generation_config = None
        cases["the model has no generation_config"] = (without_config, 4424, 1)
    if not hasattr(getattr(module, f"{method}Trainer"), "_tool_call_loop"):
        cases["tools"] = (_Case(module, [1, 5, 7], tools=[len]), 4424, 1)
    for name, (case, expected, eos) in cases.items():
        if (digits := case.lengths(0)) != expected or case.eos_of_generation != eos:
            raise AssertionError(f"{name}: {digits} tokens are trained on, {case.eos_of_generation} ends a generation")
    return outcomes[0]


def _check_the_id() -> None:
    """Check that an ``_AnyOf`` is each id when it is compared, and one id otherwise."""
    import torch

    eos, tokens = _AnyOf(1, [1, 5]), torch.tensor([1, 5, 2])
    compared = [(tokens == eos).tolist(), torch.eq(tokens, eos).tolist(), [token == eos for token in (1, 5, 2)]]
    if compared != [[True, True, False]] * 3 or [token != eos for token in (1, 5, 2)] != [False, False, True]:
        raise AssertionError(f"the id is not equal to each end: {compared}")
    if (tokens + eos).tolist() != [2, 6, 3] or torch.add(tokens, eos, alpha=2).tolist() != [3, 7, 4]:
        raise AssertionError(f"the id is not the first end in a sum: {tokens + eos}")
    if len({eos, 1}) != 1:
        raise AssertionError("the id is another key than the first end")


def _check_without_an_end(module: ModuleType) -> None:
    """Check that a trainer generates as it is if its tokenizer has no end of a sequence, which only vLLM allows."""
    case = _Case(module, [1, 5, 7])
    case.generates_only = True
    case.trainer.eos_token_id = case.trainer.processing_class.eos_token_id = None
    with suppress(_Generated):
        case.lengths(0)
    if case.eos_of_generation != 1:
        raise AssertionError(f"the tokenizer has no end, and {case.eos_of_generation} ends a generation")


def _constructor_lists_the_ends(module: ModuleType) -> bool:
    """Return whether the trainer itself keeps a list of all ends, as from 1.14.2 on."""
    trainer_class = module.GRPOTrainer if hasattr(module, "GRPOTrainer") else module.RLOOTrainer
    method = getattr(trainer_class, "_generate_and_score_completions", None)
    return method is not None and "eos_token_ids" in inspect.unwrap(method).__code__.co_names


class _Generated(Exception):
    """The trainer has come to generate."""


class _Case:
    """A trainer whose model has these ends of a sequence, and goes on to four tokens if none of its ends comes."""

    def __init__(self, module: ModuleType, ends: Any, **settings: Any) -> None:
        from transformers import GenerationConfig

        attributes: dict[str, Any] = {
            name: settings.pop(name) for name in ("tools", "generation_config") if name in settings
        }
        self.trainer = stub_that_scores(module, _ENDLESS, [1.0, 2.0, 3.0, 4.0], beta=0.0, **settings)
        asked_for: Any = 1
        if _constructor_lists_the_ends(module):
            asked_for = self.trainer.eos_token_ids = [1, *(end for end in ends if end != 1)]
        self.trainer.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=asked_for)
        vars(self.trainer).update({"eos_token_id": 1, **attributes})
        self.trainer.model.generation_config.eos_token_id = ends
        self.trainer.model.generate = self._generate
        self.eos_of_generation: Any = None
        self.generates_only = False

    def _generate(self, input_ids: Any, *, generation_config: Any = None, **kwargs: Any) -> Any:
        import torch

        self.eos_of_generation = eos = getattr(generation_config, "eos_token_id", None)
        if self.generates_only:
            raise _Generated
        ends = eos if isinstance(eos, list) else [eos]
        rows = []
        for row in _ENDLESS:
            length = next((place + 1 for place, token in enumerate(row) if token in ends), len(row))
            rows.append([*row[:length], *[0] * (len(row) - length)])
        return torch.cat([input_ids, torch.tensor(rows)], 1)

    def lengths(self, global_step: int) -> int:
        """Return how many tokens of each completion are trained on, as digits."""
        self.trainer.state.global_step = global_step
        names = ("eos_token_id", "_tokenizer", "processing_class", "generation_config")
        before = [getattr(self.trainer, name) for name in names]
        asked_for = getattr(self.trainer.generation_config, "eos_token_id", None)
        mask = scored_completions(self.trainer)["completion_mask"]
        changed = [name for name, own in zip(names, before, strict=True) if getattr(self.trainer, name) is not own]
        if changed or getattr(self.trainer.generation_config, "eos_token_id", None) is not asked_for:
            raise AssertionError(f"the trainer is left with other ends: {changed}, {self.trainer.generation_config}")
        lengths = mask.sum(1).tolist()
        if mask.tolist() != [[int(place < length) for place in range(mask.shape[1])] for length in lengths]:
            raise AssertionError(f"the mask is not of the first tokens: {mask}")
        return int("".join(map(str, lengths)))


_ENDLESS = ((5, 6, 7, 8), (2, 3, 7, 4), (2, 1, 3, 4), (2, 3, 4, 6))
"""What the model writes if nothing ends it."""
