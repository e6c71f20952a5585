"""A completion ends at each end that ``generation_kwargs`` names, and at those that ended it before."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Any

import pytest
import torch
from packaging.version import Version

from trl_hotfix.testing import scored_completions, stub_that_scores

import tiny

ID = "grpo-generation-kwargs-eos-trains-padding"
METHOD = "_generate_and_score_completions"
COMPLETIONS = ((2, 5), (2, 3, 7), (2, 3, 1), (2, 3, 4, 6))
"""What is generated. The tokenizer's end is 1, those of ``generation_kwargs`` are 5 and 7; the last is truncated."""
LENGTHS = [2, 3, 3, 4]
ASKED_FOR = {"eos_token_id": [1, 5, 7]}
AT_THE_TOKENIZERS_END = [4, 4, 3, 4]

LISTS_ENDS = Version(version("trl")) >= Version("1.14.2")

each = pytest.mark.parametrize("kind", [kind for kind in ("GRPO", "RLOO") if hasattr(tiny.classes(kind)[0], METHOD)])
with_a_list = pytest.mark.skipif(not LISTS_ENDS, reason="TRL of this release compares with one id")
with_one_id = pytest.mark.skipif(LISTS_ENDS, reason="TRL of this release compares with a list")


class Generated(Exception):
    """The trainer has come to generate."""


class Case:
    """A trainer with these ``generation_kwargs``. Further attributes of the trainer are set as they are."""

    def __init__(self, kind: str, asked: Any, *, settings: dict[str, Any] | None = None, **attributes: Any) -> None:
        trainer_class = tiny.classes(kind)[0]
        module = sys.modules[trainer_class.__module__]
        self.target = f"{module.__name__}:{trainer_class.__name__}.{METHOD}"
        self.trainer = stub_that_scores(
            module, COMPLETIONS, [1.0, 2.0, 3.0, 4.0], beta=0.0, generation_kwargs=asked, **settings or {}
        )
        vars(self.trainer).update(attributes)
        self.generate, self.trainer.model.generate = self.trainer.model.generate, self._generate
        self.generates_only = False
        self.ends: list[Any] = []
        """What the trainer and its tokenizers have as an end while it generates."""

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        trainer = self.trainer
        owners = (trainer, trainer._tokenizer, trainer.processing_class)
        self.ends = [*(owner.eos_token_id for owner in owners), trainer.eos_token_ids]
        if self.generates_only:
            raise Generated
        return self.generate(*args, **kwargs)

    def lengths(self, *, training: bool = True) -> list[int]:
        """Return how many tokens of each completion are trained on, which are its first ones."""
        self.trainer.model.train(training)
        self.trainer.control.should_evaluate = not training
        mask = scored_completions(self.trainer)["completion_mask"]
        lengths: list[int] = mask.sum(1).tolist()
        assert mask.tolist() == [[int(place < length) for place in range(mask.shape[1])] for length in lengths]
        return lengths

    def acts(self) -> int | None:
        return tiny.acts(ID, self.target, self.trainer)


@each
@pytest.mark.parametrize("ends", [[1, 5, 7], [7, 5], (5, 7)])
def test_no_padding_is_trained_on_in_any_generation(kind: str, ends: Any) -> None:
    cases = [Case(kind, {"eos_token_id": ends}) for _ in range(2)]
    for training in (True, True, False):
        for case in cases:
            assert case.lengths(training=training) == LENGTHS
    assert [case.acts() for case in cases] == [3, 3]


@each
def test_trl_trains_on_the_padding(kind: str, switch: Any) -> None:
    case = Case(kind, ASKED_FOR)
    with switch.off():
        assert case.lengths() == AT_THE_TOKENIZERS_END


@each
def test_one_end_may_be_a_number(kind: str) -> None:
    assert Case(kind, {"eos_token_id": 5}).lengths() == [2, 4, 3, 4]


@each
def test_a_generation_leaves_the_trainer_as_it_was(kind: str) -> None:
    trainer = (case := Case(kind, ASKED_FOR)).trainer
    names = ("eos_token_id", "eos_token_ids", "_tokenizer", "processing_class")
    before = {name: getattr(trainer, name) for name in names}
    case.lengths()
    assert all(getattr(trainer, name) is before[name] for name in names)
    assert trainer.eos_token_ids == [1]
    assert type(trainer.processing_class.eos_token_id) is int
    assert trainer.args.generation_kwargs == {"eos_token_id": [1, 5, 7]}


@each
def test_the_mean_length_is_that_of_the_completions(kind: str) -> None:
    case = Case(kind, ASKED_FOR)
    case.lengths()
    assert case.trainer._metrics["train"]["completions/mean_length"] == [3.0]
    assert case.trainer._metrics["train"]["completions/clipped_ratio"] == [0.25]


@each
def test_a_truncated_completion_alone_is_masked(kind: str) -> None:
    assert Case(kind, ASKED_FOR, settings={"mask_truncated_completions": True}).lengths() == [2, 3, 3, 0]


@each
@pytest.mark.parametrize(
    "asked", [None, {}, {"top_k": 3}, {"eos_token_id": None}, {"eos_token_id": 1}, {"eos_token_id": [1]}]
)
def test_a_run_that_asks_for_no_other_end_is_left_alone(kind: str, asked: Any, switch: Any) -> None:
    case = Case(kind, asked)
    assert case.lengths() == AT_THE_TOKENIZERS_END
    assert case.acts() == 0
    assert case.ends == [1, 1, 1, [1]]
    assert all(type(end) is int for end in case.ends[:3])


@each
def test_runs_with_tools_are_repaired_from_1_14_2_on(kind: str) -> None:
    case = Case(kind, ASKED_FOR, tools=[len], _standalone_tools=[len])
    if hasattr(case.trainer, "_tool_call_loop"):
        case.generates_only = True
        with pytest.raises(Generated):
            case.lengths()
    else:
        case.lengths()
    assert case.ends[:3] == [1, 1, 1]
    assert all(type(end) is int for end in case.ends[:3])
    assert case.ends[3] == ([1, 5, 7] if LISTS_ENDS else [1])


@each
@with_a_list
def test_the_models_ends_stay_and_come_first(kind: str) -> None:
    case = Case(kind, {"eos_token_id": [7, 5]}, eos_token_ids=[1, 7])
    assert case.lengths() == LENGTHS
    assert case.ends[3] == [1, 7, 5]
    known = Case(kind, {"eos_token_id": [7]}, eos_token_ids=[1, 7])
    assert known.lengths() == [4, 3, 3, 4]
    assert known.acts() == 0


@each
@with_one_id
def test_each_id_that_trl_may_compare_with_equals_each_end(kind: str) -> None:
    case = Case(kind, {"eos_token_id": [5]}, eos_token_id=1)
    case.lengths()
    for end in case.ends[:3]:
        assert (torch.tensor([1, 5, 2]) == end).tolist() == [True, True, False]
        assert int(end) == 1


@each
@with_one_id
def test_a_tokenizer_without_an_end_is_left_alone(kind: str) -> None:
    # vLLM alone allows that, and here TRL would fail after the generation.
    case = Case(kind, ASKED_FOR)
    case.generates_only = True
    case.trainer.eos_token_id = case.trainer.processing_class.eos_token_id = None
    with pytest.raises(Generated):
        case.lengths()
    assert case.ends[:3] == [None, None, None]
