"""A model has its own weights, gradients and buffers after each generation with continuous batching."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trl_hotfix.testing import (
    completions_of,
    default_arguments,
    recorded_warnings,
    stub_that_generates,
    tiny_attention_model,
)

import tiny

OPTIONS = ("use_transformers_paged", "use_transformers_continuous_batching")


def has_batching(kind: str) -> bool:
    fields = getattr(tiny.classes(kind)[1], "__dataclass_fields__", {})
    return any(name in fields for name in OPTIONS)


each = pytest.mark.parametrize("kind", [kind for kind in ("GRPO", "RLOO", "OnlineDPO") if has_batching(kind)])
precisions = pytest.mark.parametrize("precision", ["bf16", "fp16"])
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Generated(Exception):
    """Where a trainer is left."""


class Generation:
    """What a model has while it generates: its parameters, as objects, and copies of them."""

    def __init__(self, trainer: Any, *, fails: bool = False) -> None:
        model = self.model = trainer.model
        self.fails = fails
        self.parameters: list[Any] = []
        self.afterwards: list[Any] = []
        """The parameters at the moment when the trainer reads its completions."""
        model.generate_batch = self._generate_batch
        model.generate = lambda *args, **kwargs: self._read()
        # vLLM: the step is compared with this one before anything else is done.
        trainer._last_loaded_step = type("Step", (), {"__ne__": lambda step, other: self._read()})()
        with pytest.raises(Generated):
            completions_of(trainer)
        assert model.generate_batch == self._generate_batch

    def _generate_batch(self, *args: Any, **kwargs: Any) -> Any:
        self._note()
        if self.fails:
            raise Generated
        return SimpleNamespace(values=self._read)

    def _note(self) -> None:
        self.parameters = list(self.model.parameters())
        self.dtypes = {weight.dtype for weight in self.parameters if weight.is_floating_point()}
        self.values = [weight.detach().clone() for weight in self.parameters]

    def _read(self) -> Any:
        if not self.parameters:
            self._note()
        self.afterwards = list(self.model.parameters())
        raise Generated


def trainer_of(kind: str, model: Any = None, precision: str | None = "bf16", **attributes: Any) -> Any:
    """Return a trainer that generates with continuous batching, in mixed precision."""
    trainer_class, config_class = tiny.classes(kind)
    args = default_arguments(config_class, bf16=precision == "bf16", fp16=precision == "fp16")
    unset: dict[str, Any] = {"generation_config": None, "continuous_batching_config": None, "generation_kwargs": {}}
    unset |= {"image_token": None, "is_vision_model": False, "_is_vlm": False, "use_vllm": False}
    model = tiny_attention_model() if model is None else model
    trainer = stub_that_generates(trainer_class, args, model, **{**unset, **dict.fromkeys(OPTIONS, True), **attributes})
    # A trainer has the option of its release alone.
    for name in set(OPTIONS) - set(config_class.__dataclass_fields__):
        delattr(trainer, name)
    return trainer


def model_in_bfloat16() -> Any:
    """Return a model with the weights in bfloat16 and the buffers in float32, as it is when it is loaded."""
    model = tiny_attention_model()
    for weight in model.parameters():
        weight.data = weight.data.to(torch.bfloat16)
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}
    return model


def are_same(some: Any, others: Any) -> bool:
    """Return whether these are the same objects. A cast of a model makes new buffers, and may make new parameters."""
    return all(one is other for one, other in zip(some, others, strict=True))


def dtypes_of(tensors: Any) -> set[Any]:
    return {tensor.dtype for tensor in tensors}


@each
@precisions
def test_a_model_has_its_own_weights_after_each_generation(kind: str, precision: str) -> None:
    trainers = [trainer_of(kind, precision=precision) for _ in range(2)]
    for step, training in ((0, True), (0, True), (1, True), (1, False)):
        for trainer in trainers:
            model = trainer.model.train(training)
            trainer.control.should_evaluate, trainer.state.global_step = not training, step
            for weight in model.parameters():
                weight.grad = torch.ones_like(weight)
            parameters, buffers = list(model.parameters()), list(model.buffers())
            gradients = [weight.grad for weight in parameters]
            values = copy.deepcopy([*parameters, *buffers, *gradients])
            generation = Generation(trainer)
            assert are_same(model.parameters(), parameters)
            assert are_same(generation.afterwards, parameters)
            assert are_same(model.buffers(), buffers)
            assert are_same([weight.grad for weight in parameters], gradients)
            for now, before in zip([*parameters, *buffers, *gradients], values, strict=True):
                assert now.dtype == torch.float32
                assert now.equal(before)


@each
@precisions
def test_a_copy_of_the_weights_generates(kind: str, precision: str) -> None:
    trainer = trainer_of(kind, precision=precision)
    generation = Generation(trainer)
    own = list(trainer.model.parameters())
    assert generation.dtypes == {DTYPES[precision]}
    assert not {id(weight) for weight in generation.parameters} & {id(weight) for weight in own}
    assert all(used.equal(weight.to(used.dtype)) for used, weight in zip(generation.values, own, strict=True))


@each
@precisions
def test_trl_leaves_the_weights_as_it_has_cast_them(kind: str, precision: str, switch: Any) -> None:
    trainer = trainer_of(kind, precision=precision)
    with switch.off():
        Generation(trainer)
    assert dtypes_of([*trainer.model.parameters(), *trainer.model.buffers()]) == {DTYPES[precision]}


@each
def test_a_generation_that_fails_leaves_the_own_weights(kind: str) -> None:
    trainer = trainer_of(kind)
    parameters, buffers = list(trainer.model.parameters()), list(trainer.model.buffers())
    generation = Generation(trainer, fails=True)
    assert generation.dtypes == {torch.bfloat16}
    assert are_same(trainer.model.parameters(), parameters)
    assert are_same(trainer.model.buffers(), buffers)
    assert dtypes_of([*parameters, *buffers]) == {torch.float32}


@each
def test_tied_weights_are_tied_while_they_generate(kind: str) -> None:
    model = tiny_attention_model()
    model.lm_head.weight = model.model.embed_tokens.weight
    count = len(list(model.parameters()))
    generation = Generation(trainer_of(kind, model))
    assert len(generation.parameters) == count
    assert model.lm_head.weight is model.model.embed_tokens.weight


@each
def test_whole_numbers_and_special_parameters_are_not_replaced(kind: str) -> None:
    model = tiny_attention_model()
    quantised = type("Quantised", (torch.nn.Parameter,), {})
    model.levels = torch.nn.Parameter(torch.arange(2), requires_grad=False)
    model.quantised = quantised(torch.arange(2), requires_grad=False)
    model.scales = quantised(torch.ones(2))
    special = [model.levels, model.quantised, model.scales]
    generation = Generation(trainer_of(kind, model))
    ids = {id(weight) for weight in generation.parameters}
    assert all(id(weight) in ids for weight in special)
    assert dtypes_of(special[:2]) == {torch.int64}
    assert model.lm_head.weight.dtype == torch.float32


@each
@pytest.mark.parametrize("is_fsdp_enabled", [False, True])
def test_a_model_in_bfloat16_keeps_its_buffers(kind: str, is_fsdp_enabled: bool) -> None:
    trainer = trainer_of(kind, model_in_bfloat16(), is_fsdp_enabled=is_fsdp_enabled)
    parameters, buffers = list(trainer.model.parameters()), list(trainer.model.buffers())
    with recorded_warnings() as messages:
        generation = Generation(trainer)
    assert are_same(generation.parameters, parameters)
    assert are_same(trainer.model.parameters(), parameters)
    assert are_same(trainer.model.buffers(), buffers)
    assert dtypes_of(buffers) == {torch.float32}
    assert not messages


@each
def test_trl_casts_the_buffers_of_a_model_in_bfloat16(kind: str, switch: Any) -> None:
    trainer = trainer_of(kind, model_in_bfloat16())
    with switch.off():
        Generation(trainer)
    assert dtypes_of(trainer.model.buffers()) == {torch.bfloat16}


@each
@pytest.mark.parametrize(
    ("precision", "attributes"),
    [("bf16", dict.fromkeys(OPTIONS, False)), (None, {}), ("bf16", {"use_vllm": True})],
    ids=["padded", "full precision", "vLLM"],
)
def test_the_own_weights_generate_where_nothing_is_cast(
    kind: str, precision: str | None, attributes: dict[str, bool]
) -> None:
    if attributes.get("use_vllm") and kind == "OnlineDPO":
        pytest.skip("Online DPO has another method for vLLM")
    trainer = trainer_of(kind, precision=precision, **attributes)
    generation = Generation(trainer)
    assert are_same(generation.parameters, trainer.model.parameters())
    assert generation.dtypes == {torch.float32}


@each
def test_a_model_wholly_in_bfloat16_generates_with_its_own_weights(kind: str) -> None:
    trainer = trainer_of(kind, tiny_attention_model().to(torch.bfloat16))
    generation = Generation(trainer)
    assert are_same(generation.parameters, trainer.model.parameters())


@each
@precisions
@pytest.mark.parametrize("sharded_by", ["FSDP", "ZeRO-3"])
def test_sharded_weights_are_cast_with_one_warning_for_each_trainer(kind: str, precision: str, sharded_by: str) -> None:
    for _ in range(2):
        trainer = trainer_of(kind, precision=precision, is_fsdp_enabled=sharded_by == "FSDP")
        if sharded_by == "ZeRO-3":
            trainer.model.lm_head.weight.ds_id = 1
        with recorded_warnings() as messages:
            for step in range(2):
                trainer.state.global_step = step
                # As an optimizer has it that keeps its weights in float32: in place.
                trainer.model.float()
                parameters = list(trainer.model.parameters())
                generation = Generation(trainer)
                assert are_same(generation.parameters, parameters)
                assert generation.dtypes == {DTYPES[precision]}
        (message,) = messages
        assert "the weights are sharded" in message
        assert str(DTYPES[precision]) in message
