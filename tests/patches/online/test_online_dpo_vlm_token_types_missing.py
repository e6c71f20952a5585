"""The types of tokens go from the processor to where completions are sampled and scored, and nowhere else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl.experimental.online_dpo import online_dpo_trainer

from trl_hotfix.testing import (
    CharacterTokenizer,
    default_arguments,
    single_process,
    stub_that_generates,
    tiny_causal_lm,
)

import tiny

ID = "online-dpo-vlm-token-types-missing"
IDS = torch.tensor([[3, 2, 2, 4], [0, 5, 2, 2]])
MASK = IDS.clamp(max=1)
TYPES = {"token_type_ids": (IDS == 2).long(), "mm_token_type_ids": 3 * (IDS == 2).long()}
COMPLETIONS = torch.tensor([[7, 1, 0], [8, 9, 1], [6, 6, 1], [1, 0, 0]])


class Processor(CharacterTokenizer):
    """A processor that returns the ``types``, and says that it returns those that are ``named``."""

    def __init__(self, types: Any, named: Any) -> None:
        self.types, self.model_input_names = types, ("input_ids", *named)

    def __call__(self, text: Any, **kwargs: Any) -> Any:
        batch = {"input_ids": IDS, "attention_mask": MASK, **{name: TYPES[name] for name in self.types}}
        return {**batch, "pixel_values": torch.ones(2, 3)} if "images" in kwargs else batch


class Adapted(torch.nn.Module):
    """A PeftModel, whose forward takes any keywords."""

    is_gradient_checkpointing = False

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base, self.generate = base, base.generate

    def get_base_model(self) -> Any:
        return self.base

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base(*args, **kwargs)


def as_it_is(model: Any) -> Any:
    return model


class Compiled(torch.nn.Module):
    """What ``torch_compile`` puts around a model, and accelerate keeps: its forward takes any keywords."""

    is_gradient_checkpointing = False

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._orig_mod = model

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self._orig_mod.generate(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._orig_mod(*args, **kwargs)


class Run:
    """A trainer, and what its models are given: ``sampled`` and ``scored``, dicts of types."""

    def __init__(self, *types: str, named: Any = None, known: Any = None, wrapped: Any = as_it_is) -> None:
        self.sampled: list[Any] = []
        self.scored: list[Any] = []
        self.processor = Processor(types, types if named is None else named)
        model, reference = (self.model(types if known is None else known) for _ in range(2))
        model = wrapped(model)
        attributes = {"processing_class": self.processor, "_tokenizer": self.processor, "ref_model": reference}
        attributes |= {"image_token": None, "is_vision_model": True, "use_transformers_paged": False}
        attributes |= {"generation_config": None, "generation_kwargs": {}, "eos_token_ids": [1], "max_length": 64}
        args = default_arguments(online_dpo_trainer.OnlineDPOConfig)
        self.trainer = stub_that_generates(online_dpo_trainer.OnlineDPOTrainer, args, model, **attributes)

    def model(self, known: Any) -> Any:
        model = tiny_causal_lm()

        def with_both(input_ids: Any, token_type_ids: Any = None, mm_token_type_ids: Any = None, **kwargs: Any) -> Any:
            found = {"token_type_ids": token_type_ids, "mm_token_type_ids": mm_token_type_ids}
            self.scored.append({name: value for name, value in found.items() if value is not None})
            return SimpleNamespace(logits=model.weight[input_ids])

        def with_one(input_ids: Any, token_type_ids: Any = None, **kwargs: Any) -> Any:
            return with_both(input_ids, token_type_ids, **kwargs)

        def without(input_ids: Any, **kwargs: Any) -> Any:
            return with_both(input_ids, **kwargs)

        def generate(input_ids: Any, **kwargs: Any) -> Any:
            self.sampled.append({name: kwargs[name] for name in TYPES if name in kwargs})
            return torch.cat([input_ids, COMPLETIONS], dim=1)

        model.forward = with_both if "mm_token_type_ids" in known else with_one if known else without
        model.generate = generate
        return model

    @property
    def acts(self) -> int:
        methods = [f"{online_dpo_trainer.__name__}:OnlineDPOTrainer.{name}" for name in ("_generate", "_forward")]
        return sum(tiny.acts(ID, method, self.trainer) or 0 for method in methods)

    def step(self, images: Any = (7, 8)) -> Any:
        """Sample completions of two prompts, and score them with the policy and the reference."""
        with single_process(online_dpo_trainer):
            generated = self.trainer._generate(self.trainer.model, ["a", "b"], images and list(images))
            for model in (self.trainer.model, self.trainer.ref_model):
                log_probs = self.trainer._forward(model, *generated)
                assert log_probs.shape == COMPLETIONS.shape
        return generated


def assert_equal(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].tolist() == value.tolist()


@pytest.mark.parametrize("names", [("token_type_ids",), ("mm_token_type_ids",), tuple(TYPES)], ids=str)
@pytest.mark.parametrize("wrapped", [as_it_is, Adapted, Compiled])
def test_the_types_reach_both_models_in_each_step(names: tuple[str, ...], wrapped: Any) -> None:
    run = Run(*names, wrapped=wrapped)
    of_prompts = {name: torch.cat([TYPES[name]] * 2) for name in names}
    of_all = {name: torch.cat([value, torch.zeros(4, 3)], dim=1) for name, value in of_prompts.items()}
    for number in (1, 2):
        images = run.step()[4]
        assert images.keys() == {"pixel_values", *names}
        assert (len(run.sampled), len(run.scored)) == (number, 2 * number)
        assert_equal(run.sampled[-1], of_prompts)
        for scored in run.scored[-2:]:
            assert_equal(scored, of_all)
        assert run.acts == 3 * number


def test_the_trainer_is_as_before() -> None:
    run = Run("token_type_ids")
    generate = run.trainer.model.generate
    run.step()
    assert run.trainer.processing_class is run.processor
    assert run.trainer.model.generate is generate


def test_the_log_probs_are_those_of_the_model(switch: Any) -> None:
    run = Run("token_type_ids")
    patched = run.trainer._forward(run.trainer.model, *run.step())
    with switch.off():
        assert patched.equal(run.trainer._forward(run.trainer.model, *run.step()))


def test_trl_passes_none_on(switch: Any) -> None:
    run = Run(*TYPES)
    with switch.off():
        images = run.step()[4]
    assert images.keys() == {"pixel_values"}
    assert run.sampled + run.scored == [{}] * 3


@pytest.mark.parametrize(
    "run",
    [Run(), Run("token_type_ids", known=()), Run("token_type_ids", named=())],
    ids=["no types", "the model takes none", "the processor names none"],
)
def test_without_types_nothing_is_touched(run: Run) -> None:
    assert run.step()[4].keys() == {"pixel_values"}
    assert run.sampled + run.scored == [{}] * 3
    assert run.acts == 0


def test_texts_are_not_touched() -> None:
    run = Run("token_type_ids")
    assert run.step(images=None)[4] is None
    assert run.sampled + run.scored == [{}] * 3
    assert run.acts == 0


def test_one_of_two_types_may_be_unknown_to_the_model() -> None:
    run = Run(*TYPES, known=("token_type_ids",))
    assert run.step()[4].keys() == {"pixel_values", "token_type_ids"}
    assert [found.keys() for found in run.sampled + run.scored] == [{"token_type_ids"}] * 3


def test_a_processor_may_return_fewer_types_than_it_names() -> None:
    run = Run("token_type_ids", named=tuple(TYPES), known=tuple(TYPES))
    assert run.step()[4].keys() == {"pixel_values", "token_type_ids"}
