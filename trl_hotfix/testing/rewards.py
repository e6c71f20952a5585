"""GRPO, RLOO, SDPO and Online DPO while a reward model scores their completions."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from types import ModuleType, SimpleNamespace
from typing import Any

from ..authoring import shadowed
from .generation import stub_that_generates, stub_that_scores
from .models import tiny_causal_lm
from .processes import single_process
from .trainers import default_arguments, trainer_and_config

_METHODS = (
    "_calculate_rewards",
    "_calculate_rewards_from_functions",
    "_generate_and_score_completions",
    "_prepare_inputs",
)


class NotingReward:
    """Makes reward models that note the ids of each row that they score, and score 1."""

    def __new__(cls) -> Any:
        import torch

        class RewardModel(torch.nn.Module):  # type: ignore[misc]
            config = SimpleNamespace(_name_or_path="reward")

            def __init__(self) -> None:
                super().__init__()
                self.rows: list[list[int]] = []

            def forward(self, input_ids: Any, **kwargs: Any) -> SimpleNamespace:
                self.rows += [[token for token in row if token] for row in input_ids.tolist()]
                return SimpleNamespace(logits=torch.ones(len(input_ids), 1))

        return RewardModel().eval()


def stub_with_rewards(module: ModuleType, rewards: Sequence[Any], tokenizers: Sequence[Any]) -> Any:
    """Return a stub of this module's trainer for ``score_texts``, with these reward models and their tokenizers.

    RLOO before 0.22 and Online DPO before 0.23 take no reward models in a list: a ``LookupError``.
    """
    import torch

    trainer_class, config_class = trainer_and_config(module, "GRPO", "RLOO", "SDPO", "OnlineDPO")
    model = tiny_causal_lm(vocabulary=16)
    if any(hasattr(trainer_class, name) for name in _METHODS[:2]):
        trainer = stub_that_generates(trainer_class, default_arguments(config_class), model, environments=None)
    elif hasattr(module, "GRPOTrainer"):
        trainer = stub_that_scores(module, [[5, 1]] * 2, [0.0] * 2, model=model, reference=model, num_generations=1)
    else:
        raise LookupError(f"{trainer_class.__name__} of this release takes no reward models in a list")
    trainer.reward_funcs, trainer.reward_processing_classes = list(rewards), list(tokenizers)
    trainer.reward_func_names = [f"reward {number}" for number in range(len(rewards))]
    trainer.reward_weights = torch.ones(len(rewards))
    return trainer


def method_that_scores(trainer: Any) -> str:
    """Return the name of the method of a trainer in which this release computes rewards."""
    trainer_class = type(trainer).__mro__[1]
    found = (name for name in _METHODS if hasattr(trainer_class, name))
    name = next(found, "compute_loss")
    # 0.14 inherits the other one, and scores with the loss.
    return name if name != "_prepare_inputs" or hasattr(trainer_class, "_get_per_token_logps") else "compute_loss"


def score_texts(trainer: Any, prompts: Sequence[Any], completions: Sequence[Any]) -> None:
    """Have a stub compute the rewards of two completions. Up to 0.18 it decodes each of them as an empty text."""
    import torch

    trainer_class = type(trainer).__mro__[1]
    module = sys.modules[trainer_class.__module__]
    name, rows = method_that_scores(trainer), [{"prompt": prompt} for prompt in prompts]
    with single_process(module), ExitStack() as stack:
        if name == "_calculate_rewards_from_functions":
            trainer._calculate_rewards_from_functions(prompts, completions, [[5]] * len(prompts))
        elif name == "_calculate_rewards":
            trainer._calculate_rewards(rows, prompts, completions, [[5]] * len(prompts))
        elif name == "compute_loss":
            # 0.14 scores with models of transformers only.
            stack.enter_context(shadowed(module, "PreTrainedModel", torch.nn.Module))
            trainer.compute_loss(trainer.model, rows)
        else:
            getattr(trainer, name)(rows)
