"""Trainers with continuous batching cast the float32 weights that are trained to bfloat16 for good.

The wrapper replaces the parameters of the model while it generates: the new ones share the memory of the originals.
``model.to`` then makes a copy in bfloat16 for the generation, as before, and does not change the originals. They are
restored afterwards as the same objects, with their gradients, their place in the optimizer and the hooks of DDP.

Buffers are restored, too. A model that is loaded in bfloat16 has no other weights, but the frequencies of its rotary
positions are in float32, and the cast takes up to 0.4 % from them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Once, absent, judge, shadowed
from ...model import Outcome, Verdict
from ...testing import (
    absent_if_reexported,
    completions_of,
    default_arguments,
    stub_that_generates,
    tiny_attention_model,
)

_OPTIONS = ("use_transformers_paged", "use_transformers_continuous_batching")
_log = logging.getLogger("trl_hotfix")
_first_warning = Once()


def keep_the_weights_as_they_are(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Generate with copies of the weights if the trainer would cast them."""
    import torch

    dtype = torch.bfloat16 if instance.args.bf16 else torch.float16 if instance.args.fp16 else None
    batching = any(getattr(instance, name, False) for name in _OPTIONS) and not instance.use_vllm
    if not batching or dtype is None:
        return wrapped(*args, **kwargs)
    model = instance.model
    cast = [weight for weight in model.parameters() if weight.is_floating_point() and weight.dtype != dtype]
    if cast and (instance.is_fsdp_enabled or any(hasattr(weight, "ds_id") for weight in cast)):
        if _first_warning(instance):
            _log.warning(
                "grpo-continuous-batching-casts-master-weights: the weights are sharded, and generating with "
                "continuous batching casts them to %s for good. Use vLLM, or leave use_transformers_paged and "
                "use_transformers_continuous_batching off.",
                dtype,
            )
        return wrapped(*args, **kwargs)
    with _replaced_parameters(model, cast) as restore:
        generate_batch = model.generate_batch

        def generate_and_restore(*args: Any, **kwargs: Any) -> Any:
            outputs = generate_batch(*args, **kwargs)
            # Up to 0.23 the same method scores the completions afterwards, which needs the original weights.
            restore()
            return outputs

        with shadowed(model, "generate_batch", generate_and_restore):
            return wrapped(*args, **kwargs)


@contextmanager
def _replaced_parameters(model: Any, cast: list[Any]) -> Iterator[Callable[[], None]]:
    """Give ``model`` others for these parameters on the same memory, until the function that is yielded restores all.

    The buffers are restored, too.
    """
    import torch

    # Tied weights stay tied. A subclass (quantised, DTensor) cannot be rebuilt from its data alone.
    substitutes = {id(weight): torch.nn.Parameter(weight.data) for weight in cast if type(weight) is torch.nn.Parameter}
    originals = [(module, dict(module._parameters), dict(module._buffers)) for module in model.modules()]

    def restore() -> None:
        for module, parameters, buffers in originals:
            module._parameters.update(parameters)
            module._buffers.update(buffers)

    for module, parameters, _ in originals:
        module._parameters.update({name: substitutes.get(id(own), own) for name, own in parameters.items()})
    try:
        yield restore
    finally:
        restore()


def weights_are_float32_after_a_generation(module: ModuleType) -> Outcome:
    """Count the bits of a weight after several generations with continuous batching, in bfloat16 and in float16.

    They are in two steps and in an evaluation, of two trainers. Of a model in bfloat16 it is the bits of its buffers.
    Where nothing is cast, or what is cast is sharded, the weights stay as TRL leaves them.
    """
    import torch

    method = next(name for name in ("GRPO", "RLOO", "OnlineDPO") if hasattr(module, f"{name}Trainer"))
    if method == "OnlineDPO" and (reexported := absent_if_reexported(module, module.OnlineDPOTrainer.training_step)):
        return reexported
    if not any(name in getattr(module, f"{method}Config").__dataclass_fields__ for name in _OPTIONS):
        return absent("this release has no continuous batching")
    model = tiny_attention_model()
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    # No cast changes them: whole numbers, and what only looks like a weight that can be rebuilt.
    model.levels = torch.nn.Parameter(torch.arange(2), requires_grad=False)
    model.quantised = type("Quantised", (torch.nn.Parameter,), {})(torch.arange(2), requires_grad=False)
    case = _Case(module, method, model)
    outcomes = [
        case.judged(step, training=training) for step, training in ((0, True), (0, True), (1, True), (1, False))
    ]
    outcomes.append(case.judged(1, fails=True))
    outcomes.append(_Case(module, method, model, bf16=False, fp16=True).judged(0))
    outcomes += [
        _Case(module, method, model, is_fsdp_enabled=sharded).judged_in_bfloat16() for sharded in (False, True)
    ]
    if any(outcome.verdict is not outcomes[0].verdict for outcome in outcomes):
        raise AssertionError(f"the weights are kept in some generations, and cast in others: {outcomes}")
    is_fixed = outcomes[0].verdict is Verdict.FIXED
    _check_that_others_are_left_alone(module, method, model)
    for name, settings in (("FSDP", {"is_fsdp_enabled": True}), ("ZeRO-3", {})):
        _check_what_is_sharded(_Case(module, method, model, **settings), name, warnings=is_fixed)
        model.lm_head.weight.ds_id = 1
    return outcomes[0]


class _Generated(Exception):
    """Where the stub is left: the completions are there."""


class _Stop:
    """What is compared with something else if vLLM generates."""

    def __init__(self, case: _Case) -> None:
        self.case = case

    def __ne__(self, other: object) -> bool:
        self.case.note()
        raise _Generated


class _Case:
    """A trainer that generates with continuous batching. The model is one of float32 at the beginning of each call."""

    def __init__(
        self, module: ModuleType, method: str, model: Any, *, bf16: bool = True, fp16: bool = False, **attributes: Any
    ) -> None:
        import torch

        self.model, self.fails = model, False
        self.dtype = torch.bfloat16 if bf16 else torch.float16
        settings = default_arguments(getattr(module, f"{method}Config"), bf16=bf16, fp16=fp16)
        unset: dict[str, Any] = {"generation_config": None, "continuous_batching_config": None, "generation_kwargs": {}}
        unset |= {"image_token": None, "is_vision_model": False, "_is_vlm": False, "use_vllm": False}
        self.trainer = stub_that_generates(
            getattr(module, f"{method}Trainer"),
            settings,
            model,
            **{**unset, **dict.fromkeys(_OPTIONS, True), **attributes},
        )

    def has_own(self, *, buffers: bool = False) -> bool:
        """Return whether the model has its own parameters, as objects, or its own buffers. A cast makes new ones."""
        own, now = (self.own_buffers, self.model.buffers()) if buffers else (self.own, self.model.parameters())
        return all(one is other for one, other in zip(own, now, strict=True))

    def generate(self, step: int = 0, *, training: bool = True) -> None:
        """Generate, and note the types of the weights in it, and whether they are the model's own, then and after."""
        # In place: the parameters are the same ones on other memory.
        self.model.float()
        self.own, self.own_buffers = list(self.model.parameters()), list(self.model.buffers())
        self.model.train(training)
        self.trainer.control.should_evaluate = not training
        self.trainer.state.global_step = step
        self.during: Any = None
        self.own_then = self.own_after = self.has_own()
        with (
            shadowed(self.model, "generate_batch", self._generate_batch),
            shadowed(self.model, "generate", self._generate),
        ):
            try:
                completions_of(self.trainer)
            except _Generated:
                return
        raise AssertionError("nothing was generated")

    def _generate_batch(self, *args: Any, **kwargs: Any) -> Any:
        self.note()
        if self.fails:
            raise _Generated
        return SimpleNamespace(values=self._read)

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        self.note()
        raise _Generated

    def note(self) -> None:
        """Note the weights that generate."""
        weights = [weight for weight in self.model.parameters() if weight.is_floating_point()]
        self.during, self.own_then = {weight.dtype for weight in weights}, self.has_own()
        self.head = self.model.lm_head.weight.detach().clone()

    def _read(self) -> Any:
        # What the method does with the completions, it does with the model's own weights.
        self.own_after = self.has_own()
        raise _Generated

    def judged(self, step: int, *, training: bool = True, fails: bool = False) -> Outcome:
        self.fails = fails
        head = self.model.lm_head.weight
        gradient = head.grad
        self.generate(step, training=training)
        bits = {_bits(weight) for weight in self.model.parameters() if weight.is_floating_point()}
        outcome = judge(float(min(bits)), right=32.0, wrong=16.0)
        if self.during != {self.dtype} or len(bits) != 1 or not (self.has_own() and self.own_after):
            raise AssertionError(f"generated with {self.during}, and the weights of {bits} bits are others then")
        if outcome.verdict is Verdict.FIXED and (self.own_then or not self.has_own(buffers=True)):
            raise AssertionError("the own weights are those that generate, or the buffers are others then")
        if outcome.verdict is Verdict.FIXED and head.grad is not gradient:
            raise AssertionError("the gradient of a weight is another one")
        if not self.head.equal(head.to(self.dtype)):
            raise AssertionError("the weights that generate have other values than the model's own")
        return outcome

    def judged_in_bfloat16(self) -> Outcome:
        """Judge the buffers, which are in float32, of a model whose weights need no cast."""
        with shadowed(self.model, "float", self._load_in_bfloat16):
            self.generate()
        outcome = judge(float(min(map(_bits, self.model.buffers()))), right=32.0, wrong=16.0)
        if outcome.verdict is Verdict.FIXED and not self.has_own(buffers=True):
            raise AssertionError("the model has other buffers afterwards")
        if not self.own_then or not self.has_own():
            raise AssertionError("weights are replaced that are in bfloat16 already")
        return outcome

    def _load_in_bfloat16(self) -> None:
        import torch

        for weight in self.model.parameters():
            if weight.is_floating_point():
                weight.data = weight.data.to(torch.bfloat16)
        for module in self.model.modules():
            module._buffers.update({name: buffer.float() for name, buffer in module._buffers.items()})


def _bits(tensor: Any) -> int:
    return 8 * int(tensor.element_size())


def _check_that_others_are_left_alone(module: ModuleType, method: str, model: Any) -> None:
    """Assert that nothing is replaced with vLLM, without batching, without mixed precision, or without a cast."""
    import torch

    padded, full_precision = _Case(module, method, model), _Case(module, method, model, bf16=False)
    for name in _OPTIONS:
        # The one that this release has is off by default.
        delattr(padded.trainer, name)
    cases = {"padded": padded, "no mixed precision": full_precision}
    if method != "OnlineDPO":  # It has another method for vLLM.
        cases["vLLM"] = vllm = _Case(module, method, model, use_vllm=True)
        vllm.trainer._last_loaded_step = _Stop(vllm)
    for name, case in cases.items():
        case.generate()
        if not case.own_then or case.during != {torch.float32}:
            raise AssertionError(f"{name}: generated with {case.during}, of its own weights: {case.own_then}")
    half = _Case(module, method, model)
    with shadowed(model, "float", lambda: model.to(torch.bfloat16)):
        half.generate()
    if not half.own_then:
        raise AssertionError("weights are replaced that are in bfloat16 already")


def _check_what_is_sharded(case: _Case, name: str, *, warnings: bool) -> None:
    """Assert that sharded weights are cast as TRL does, which is said once."""
    messages: list[str] = []
    # These are not for the log: the trainer is no user's.
    with shadowed(_log, "warning", lambda message, *args: messages.append(message % args)):
        for step in range(2):
            case.generate(step)
            if not case.own_then or case.during != {case.dtype}:
                raise AssertionError(f"{name}: generated with {case.during}, of its own weights: {case.own_then}")
    if len(messages) != int(warnings) or any(str(case.dtype) not in message for message in messages):
        raise AssertionError(f"{name}: in two generations it is said: {messages}")
