"""A reward model in train mode scores without its dropout, and is in train mode again after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from trl.trainer import grpo_trainer, rloo_trainer

from trl_hotfix.authoring import shadowed
from trl_hotfix.testing import (
    PromptTokenizer,
    default_arguments,
    scored_completions,
    single_process,
    stub_that_generates,
    stub_that_scores,
    tiny_causal_lm,
    trainer_and_config,
)

import tiny

ID = "reward-model-left-in-train-mode"
METHODS = ("compute_loss", "_prepare_inputs", "_generate_and_score_completions", "_calculate_rewards")
ROWS = 2


class RewardModel(torch.nn.Module):
    """Scores 1, and 0 if its dropout is on; notes the mode of its parts."""

    config = SimpleNamespace(_name_or_path="reward")

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Dropout(0.0), torch.nn.Dropout(1.0))
        self.error = error
        self.scores: list[float] = []
        self.modes: list[list[bool]] = []

    def forward(self, input_ids: Any, **kwargs: Any) -> SimpleNamespace:
        if self.error:
            raise self.error
        logits = self.body(torch.ones(len(input_ids), 1))
        self.scores.append(float(logits.mean()))
        self.modes.append(modes_of(self))
        return SimpleNamespace(logits=logits)


def modes_of(model: Any) -> list[bool]:
    return [module.training for module in model.modules()]


def sdpo_trainer() -> ModuleType:
    try:
        return import_module("trl.experimental.sdpo.sdpo_trainer")
    except ImportError:
        pytest.skip("this release has no SDPO")


@pytest.fixture(params=["GRPO", "RLOO", "SDPO"])
def module(request: pytest.FixtureRequest) -> ModuleType:
    if request.param == "RLOO" and not hasattr(rloo_trainer.RLOOTrainer, "_calculate_rewards"):
        pytest.skip("RLOO of this release takes no reward models in a list")
    modules = {"GRPO": lambda: grpo_trainer, "RLOO": lambda: rloo_trainer, "SDPO": sdpo_trainer}
    return modules[request.param]()


def stub(module: ModuleType, reward_funcs: Sequence[Any], *, training: bool = True) -> Any:
    trainer_class, config_class = trainer_and_config(module, "GRPO", "RLOO", "SDPO")
    model = tiny_causal_lm(vocabulary=16)
    model.train(training)
    if hasattr(trainer_class, "_calculate_rewards"):
        trainer = stub_that_generates(trainer_class, default_arguments(config_class), model, environments=None)
    else:
        completions, rewards = [[5, 1]] * ROWS, [0.0] * ROWS
        trainer = stub_that_scores(
            module, completions, rewards, model=model, reference=model, training=training, num_generations=1
        )
    trainer.reward_funcs = list(reward_funcs)
    trainer.reward_processing_classes = [PromptTokenizer() for _ in reward_funcs]
    trainer.reward_func_names = [f"reward {number}" for number in range(len(reward_funcs))]
    trainer.reward_weights = torch.ones(len(reward_funcs))
    return trainer


def score(trainer: Any) -> Any:
    """Compute the rewards by the method in which this release does so."""
    module = import_module(type(trainer).__mro__[1].__module__)
    rows = [{"prompt": "a"} for _ in range(ROWS)]
    with single_process(module), ExitStack() as stack:
        if hasattr(trainer, "_calculate_rewards"):
            return trainer._calculate_rewards(rows, ["a"] * ROWS, ["b"] * ROWS, [[5]] * ROWS)
        if hasattr(trainer, "_get_per_token_logps"):
            return scored_completions(trainer)
        # 0.14 scores with models of transformers only.
        stack.enter_context(shadowed(module, "PreTrainedModel", torch.nn.Module))
        return trainer.compute_loss(trainer.model, rows)


def acts(trainer: Any) -> int:
    trainer_class = type(trainer).__mro__[1]
    targets = [f"{trainer_class.__module__}:{trainer_class.__name__}.{method}" for method in METHODS]
    return sum(tiny.acts(ID, target, trainer) or 0 for target in targets)


def constant(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    return [2.0] * len(completions)


each_mode = pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])


@each_mode
def test_the_reward_model_scores_without_dropout(module: ModuleType, training: bool) -> None:
    reward = RewardModel()
    trainer = stub(module, [reward], training=training)
    score(trainer)
    assert reward.scores == [1.0]
    assert reward.modes == [[False] * 4]
    assert acts(trainer) == 1


def test_it_is_in_train_mode_again_after_it(module: ModuleType) -> None:
    reward = RewardModel()
    score(stub(module, [reward]))
    assert modes_of(reward) == [True] * 4


def test_a_part_that_was_in_evaluation_mode_stays_so(module: ModuleType) -> None:
    reward = RewardModel()
    reward.body[1].eval()
    before = modes_of(reward)
    score(stub(module, [reward]))
    assert modes_of(reward) == before == [True, True, True, False]


def test_it_is_in_train_mode_again_after_an_error(module: ModuleType) -> None:
    reward = RewardModel(error=ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        score(stub(module, [reward]))
    assert modes_of(reward) == [True] * 4


def test_each_reward_model_beside_a_function_scores_without_dropout(module: ModuleType) -> None:
    rewards = [RewardModel(), constant, RewardModel().eval(), RewardModel()]
    score(stub(module, rewards))
    assert [reward.scores for reward in rewards if reward is not constant] == [[1.0]] * 3
    assert [reward.training for reward in rewards if reward is not constant] == [True, False, True]


def test_each_call_of_each_trainer_is_scored_without_dropout(module: ModuleType) -> None:
    rewards = RewardModel(), RewardModel()
    trainers = [stub(module, [reward]) for reward in rewards]
    for trainer in trainers * 2:
        score(trainer)
    assert [reward.scores for reward in rewards] == [[1.0, 1.0]] * 2
    assert [acts(trainer) for trainer in trainers] == [2, 2]


def test_the_policy_keeps_its_mode(module: ModuleType) -> None:
    trainer = stub(module, [RewardModel()])
    score(trainer)
    assert trainer.model.training


@pytest.mark.parametrize(
    "make",
    [lambda: [RewardModel().eval()], lambda: [constant]],
    ids=["evaluation mode", "function"],
)
def test_nothing_is_changed_where_no_reward_model_is_in_train_mode(
    module: ModuleType, make: Callable[[], list[Any]]
) -> None:
    trainer = stub(module, make())
    score(trainer)
    assert acts(trainer) == 0


def test_a_model_whose_part_alone_is_in_train_mode_is_left_as_it_is(module: ModuleType) -> None:
    reward = RewardModel().eval()
    reward.body[1].train()
    trainer = stub(module, [reward])
    score(trainer)
    assert reward.scores == [0.0]
    assert acts(trainer) == 0


def test_trl_scores_with_dropout(module: ModuleType, switch: Any) -> None:
    reward = RewardModel()
    with switch.off():
        score(stub(module, [reward]))
    assert reward.scores == [0.0]
