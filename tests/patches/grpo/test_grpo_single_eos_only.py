"""Completions end at each end-of-sequence token of the model, when they are generated and when they are scored."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from trl_hotfix.testing import scored_completions, stub_that_scores, tiny_causal_lm

import tiny

ID = "grpo-single-eos-only"
ENDLESS = ((5, 6, 7, 8), (2, 3, 7, 4), (2, 1, 3, 4), (2, 3, 4, 6))
"""What the model writes if nothing ends it. The tokenizer's end is 1, the model's others are 5 and 7."""
AT_EACH_END, AT_TOKENIZERS_END, ALL = [1, 3, 2, 4], [4, 4, 2, 4], [1, 5, 7]


def method_of(kind: str) -> str | None:
    """Return the method that scores completions, if this release has one."""
    trainer_class = tiny.classes(kind)[0]
    if hasattr(trainer_class, "_generate_and_score_completions"):
        return "_generate_and_score_completions"
    return "_prepare_inputs" if kind == "GRPO" else None


each = pytest.mark.parametrize("kind", [kind for kind in ("GRPO", "RLOO") if method_of(kind)])


class Generated(Exception):
    """The trainer has come to generate."""


class Case:
    """A trainer whose model has these ends of a sequence. Further attributes of the trainer are set as they are."""

    def __init__(self, kind: str, ends: Any, *, settings: dict[str, Any] | None = None, **attributes: Any) -> None:
        trainer_class = tiny.classes(kind)[0]
        self.module = sys.modules[trainer_class.__module__]
        self.target = f"{self.module.__name__}:{trainer_class.__name__}.{method_of(kind)}"
        self.model = tiny_causal_lm(vocabulary=16)
        self.model.generation_config = GenerationConfig(eos_token_id=ends)
        models = {"model": self.model, "reference": tiny_causal_lm(vocabulary=16)}
        self.trainer = stub_that_scores(
            self.module, ENDLESS, [1.0, 2.0, 3.0, 4.0], beta=0.0, **models, **settings or {}
        )
        asked_for = GenerationConfig(pad_token_id=0, eos_token_id=1)
        vars(self.trainer).update({"generation_config": asked_for, "eos_token_id": 1, **attributes})
        self.model.generate = self._generate
        self.generates_only = False
        self.end_of_generation: Any = None
        self.ids: list[Any] = []
        """The ids of the trainer and its tokenizers while it generates."""

    def _generate(self, input_ids: Any, *, generation_config: Any = None, **kwargs: Any) -> Any:
        trainer = self.trainer
        self.end_of_generation = end = getattr(generation_config, "eos_token_id", None)
        self.ids = [owner.eos_token_id for owner in (trainer, trainer._tokenizer, trainer.processing_class)]
        if self.generates_only:
            raise Generated
        ends = end if isinstance(end, list) else [end]
        rows = []
        for row in ENDLESS:
            length = next((place + 1 for place, token in enumerate(row) if token in ends), len(row))
            rows.append([*row[:length], *[0] * (len(row) - length)])
        return torch.cat([input_ids, torch.tensor(rows)], 1)

    def lengths(self, step: int = 0, *, training: bool = True) -> list[int]:
        """Return how many tokens of each completion are trained on, which are its first ones."""
        self.trainer.state.global_step = step
        self.model.train(training)
        self.trainer.control.should_evaluate = not training
        mask = scored_completions(self.trainer)["completion_mask"]
        lengths: list[int] = mask.sum(1).tolist()
        assert mask.tolist() == [[int(place < length) for place in range(mask.shape[1])] for length in lengths]
        return lengths

    def acts(self) -> int | None:
        return tiny.acts(ID, self.target, self.trainer)


@each
@pytest.mark.parametrize("ends", [[1, 5, 7], [7, 5]])
def test_each_generation_ends_at_each_end(kind: str, ends: list[int]) -> None:
    cases = [Case(kind, ends) for _ in range(2)]
    for step, training in ((0, True), (0, True), (1, True), (1, False)):
        for case in cases:
            assert case.lengths(step, training=training) == AT_EACH_END
            assert case.end_of_generation == ALL
    assert cases[1].acts() == 4


@each
def test_trl_ends_a_completion_at_the_tokenizers_end(kind: str, switch: Any) -> None:
    case = Case(kind, ALL)
    with switch.off():
        assert case.lengths() == AT_TOKENIZERS_END
    assert case.end_of_generation == 1


@each
def test_a_generation_leaves_the_trainer_as_it_was(kind: str) -> None:
    trainer = (case := Case(kind, ALL)).trainer
    names = ("eos_token_id", "_tokenizer", "processing_class", "generation_config")
    before = {name: getattr(trainer, name) for name in names}
    case.lengths()
    assert all(getattr(trainer, name) is before[name] for name in names)
    assert type(trainer.eos_token_id) is int
    assert trainer.generation_config.eos_token_id == 1
    assert type(trainer.processing_class.eos_token_id) is int


@each
def test_a_trainer_without_an_id_of_its_own_has_that_of_its_tokenizer(kind: str) -> None:
    case = Case(kind, ALL)
    del case.trainer.eos_token_id
    assert case.lengths() == AT_EACH_END
    assert case.end_of_generation == ALL
    assert "eos_token_id" not in vars(case.trainer)


@each
def test_the_ends_are_those_of_the_model_within_the_model(kind: str) -> None:
    case = Case(kind, ALL)
    case.model.inner = torch.nn.Module()
    case.model.inner.generation_config = case.model.generation_config
    del case.model.generation_config
    assert case.lengths() == AT_EACH_END


@each
def test_one_end_besides_the_tokenizers_ends_completions(kind: str) -> None:
    case = Case(kind, 5)
    assert case.lengths() == [1, 4, 2, 4]
    assert case.end_of_generation == [1, 5]


@each
@pytest.mark.parametrize("ends", [1, [1], None])
def test_a_model_that_has_no_other_end_is_left_alone(kind: str, ends: Any) -> None:
    case = Case(kind, ends)
    assert case.lengths() == AT_TOKENIZERS_END
    assert case.end_of_generation == 1
    assert case.acts() == 0


@each
def test_a_model_without_a_generation_config_is_left_alone(kind: str) -> None:
    case = Case(kind, None)
    del case.model.generation_config
    assert case.lengths() == AT_TOKENIZERS_END
    assert case.end_of_generation == 1
    assert case.acts() == 0


@each
def test_generation_kwargs_say_themselves_what_ends_a_generation(kind: str) -> None:
    case = Case(kind, ALL, settings={"generation_kwargs": {"eos_token_id": 1}})
    assert case.lengths() == AT_EACH_END
    assert case.end_of_generation == 1


@each
def test_other_generation_kwargs_leave_all_ends(kind: str) -> None:
    case = Case(kind, ALL, settings={"generation_kwargs": {"top_k": 3}})
    case.lengths()
    assert case.end_of_generation == ALL


@each
def test_without_a_generation_config_completions_are_scored_by_all_ends(kind: str) -> None:
    case = Case(kind, ALL, generation_config=None)
    assert case.lengths() == AT_EACH_END
    assert case.end_of_generation is None


@each
def test_a_truncated_completion_alone_is_masked(kind: str) -> None:
    if "mask_truncated_completions" not in tiny.classes(kind)[1].__dataclass_fields__:
        pytest.skip("this release cannot mask truncated completions")
    case = Case(kind, ALL, settings={"mask_truncated_completions": True})
    assert case.lengths() == [1, 3, 2, 0]


@each
def test_runs_with_tools_are_left_alone(kind: str) -> None:
    case = Case(kind, ALL, tools=[len], _standalone_tools=[len])
    if hasattr(case.trainer, "_tool_call_loop"):
        case.generates_only = True
        with pytest.raises(Generated):
            case.lengths()
    else:
        assert case.lengths() == AT_TOKENIZERS_END
    assert case.end_of_generation == 1
    assert case.acts() == 0


@each
def test_a_tokenizer_without_an_end_is_left_alone(kind: str) -> None:
    # vLLM alone allows that, and here TRL would fail after the generation.
    case = Case(kind, ALL)
    case.generates_only = True
    case.trainer.eos_token_id = case.trainer.processing_class.eos_token_id = None
    with pytest.raises(Generated):
        case.lengths()
    assert case.end_of_generation == 1
    assert case.ids == [None, None, None]


@each
@pytest.mark.parametrize("owner", range(3), ids=["trainer", "_tokenizer", "processing_class"])
def test_the_id_equals_each_end_and_is_the_tokenizers_otherwise(kind: str, owner: int) -> None:
    case = Case(kind, ALL)
    case.lengths()
    end, tokens = case.ids[owner], torch.tensor([1, 5, 2])
    for compared in (tokens == end, torch.eq(tokens, end), tokens.eq(end)):
        assert compared.tolist() == [True, True, False]
    assert [token == end for token in (1, 5, 2)] == [True, True, False]
    assert [token != end for token in (1, 5, 2)] == [False, False, True]
    assert (tokens + end).tolist() == [2, 6, 3]
    assert torch.add(tokens, end, alpha=2).tolist() == [3, 7, 4]
    assert int(end) == 1
    assert len({end, 1}) == 1
