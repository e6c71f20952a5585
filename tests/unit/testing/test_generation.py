"""Made-up trainers, since the TRL that is installed has no GRPO. tests/bench/test_testing.py has the real ones."""

from __future__ import annotations

import dataclasses
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from trl_hotfix.testing import (
    completions_of,
    default_arguments,
    scored_completions,
    stub_that_generates,
    stub_that_scores,
)

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


@dataclasses.dataclass
class MadeUpConfig:
    beta: float = 0.0
    num_generations: int = 8


class Sampling:
    def _generate_single_turn(self, prompt_ids: list[list[int]], num_generations: int) -> Any:
        return self.model.generate(prompt_ids, num_generations)  # type: ignore[attr-defined]


class Scoring:
    """Generate and score, with the calls that the trainers of all releases make."""

    def _generate_and_score_completions(self: Any, inputs: list[dict[str, str]]) -> dict[str, Any]:
        prompts = self.processing_class(text=[row["prompt"] for row in inputs], return_tensors="pt")
        ids = self.model_wrapped.generate(prompts["input_ids"], generation_config=self.generation_config)
        completion_ids = ids[:, prompts["input_ids"].shape[1] :]
        (reward_func,) = self.reward_funcs
        rewards = torch.tensor(reward_func(prompts=inputs, completions=[""] * len(inputs)))
        groups = rewards.view(-1, self.num_generations)
        self._metrics["train" if self.model.training else "eval"]["reward"].append(rewards.mean().item())
        return {
            "completion_ids": completion_ids,
            "log_probs": self.model(input_ids=ids).logits.log_softmax(-1),
            "advantages": (groups - groups.mean(dim=1, keepdim=True)).flatten() * self.reward_weights,
            "beta": self.beta,
        }


def a_module(method: str, trainer_class: type) -> Any:
    module = ModuleType("made_up")
    setattr(module, f"{method}Trainer", trainer_class)
    setattr(module, f"{method}Config", MadeUpConfig)
    return module


def test_a_stub_returns_the_completions_of_its_model() -> None:
    model = SimpleNamespace(generate=lambda ids, count: ("generated", ids, count))
    trainer = stub_that_generates(Sampling, default_arguments(MadeUpConfig), model)
    assert completions_of(trainer) == ("generated", [[3, 4]], 1)


@pytest.mark.parametrize("method", ["GRPO", "RLOO"])
def test_fixed_completions_are_scored_by_fixed_rewards(method: str) -> None:
    trainer = stub_that_scores(a_module(method, Scoring), [[5, 6, 1], [7, 1]], [1.0, 0.0], beta=0.5)
    output = scored_completions(trainer)
    assert output["completion_ids"].tolist() == [[5, 6, 1], [7, 1, 0]]
    assert output["advantages"].tolist() == [0.5, -0.5]
    assert output["log_probs"].shape == (2, 5, 16)
    assert output["beta"] == 0.5
    assert trainer._metrics["train"]["reward"] == [0.5]


def test_an_evaluation_of_several_prompts_is_scored() -> None:
    completions = [[5, 1]] * 4
    trainer = stub_that_scores(
        a_module("GRPO", Scoring), completions, [1.0, 0.0, 3.0, 1.0], num_generations=2, training=False
    )
    assert scored_completions(trainer)["advantages"].tolist() == [0.5, -0.5, 1.0, -1.0]
    assert list(trainer._metrics["eval"]) == ["reward"]


def test_0_15_scores_in_its_prepare_inputs() -> None:
    class Scoring015:
        _get_per_token_logps = None
        _prepare_inputs = Scoring._generate_and_score_completions

    trainer = stub_that_scores(a_module("GRPO", Scoring015), [[5, 1], [6, 1]], [1.0, 0.0])
    assert scored_completions(trainer)["advantages"].tolist() == [0.5, -0.5]


def test_a_release_without_a_scoring_method_is_an_error() -> None:
    class InTheLoss:
        def _prepare_inputs(self, inputs: Any) -> Any:
            return inputs

    trainer = stub_that_scores(a_module("GRPO", InTheLoss), [[5, 1]], [1.0])
    with pytest.raises(NotImplementedError, match="InTheLoss"):
        scored_completions(trainer)


def test_each_completion_has_a_reward() -> None:
    with pytest.raises(ValueError, match="2 completions with 1 rewards"):
        stub_that_scores(a_module("GRPO", Scoring), [[5, 1], [6, 1]], [1.0])
