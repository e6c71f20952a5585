"""GRPO, RLOO and SDPO compute rewards with whatever mode the reward model has, so with its dropout if that is on.

Their constructors prepare a reward model by ``accelerator.prepare_model(..., evaluation_mode=True)``, which skips DDP
and does not call ``eval()``. Only ``prepare_deepspeed`` and ``prepare_fsdp`` do. ``from_pretrained`` returns models in
evaluation mode; a model that was made from a config, or that a trainer has trained in the same process, is in train
mode. Online DPO calls ``eval()``, and PPO removes the dropout.

The modules are in evaluation mode for the call alone: the reward model may share some with the policy, or go on
training elsewhere. SDPO inherits the method up to 1.5.1.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, judge, shadowed, wrapper
from ...model import Outcome
from ...testing import (
    PromptTokenizer,
    default_arguments,
    scored_completions,
    single_process,
    stub_that_generates,
    stub_that_scores,
    tiny_causal_lm,
    trainer_and_config,
)


@wrapper
def score_in_evaluation_mode(call: Call) -> Any:
    """Switch the reward models that are in train mode to evaluation mode for this call."""
    import torch

    rewards = [function for function in call.trainer.reward_funcs if isinstance(function, torch.nn.Module)]
    in_train_mode = [module for reward in rewards if reward.training for module in reward.modules() if module.training]
    if not in_train_mode:
        return call()
    call.act()
    try:
        # Not by eval(): a module may do more there, such as merge its adapter.
        for module in in_train_mode:
            module.training = False
        return call()
    finally:
        for module in in_train_mode:
            module.training = True


def scores_have_no_dropout(module: ModuleType) -> Outcome:
    """Score two completions with a model that returns 1 for each, and 0 if its dropout is on."""
    import torch

    trainer_class, config_class = trainer_and_config(module, "GRPO", "RLOO", "SDPO")
    scores: list[float] = []

    class RewardModel(torch.nn.Module):  # type: ignore[misc]
        config = SimpleNamespace(_name_or_path="reward")

        def __init__(self) -> None:
            super().__init__()
            self.dropout = torch.nn.Dropout(1.0)

        def forward(self, input_ids: Any, **kwargs: Any) -> SimpleNamespace:
            logits = self.dropout(torch.ones(len(input_ids), 1))
            scores.append(float(logits.mean()))
            return SimpleNamespace(logits=logits)

    model, rows = tiny_causal_lm(vocabulary=16), [{"prompt": "a"}] * 2
    if hasattr(trainer_class, "_calculate_rewards"):
        trainer = stub_that_generates(trainer_class, default_arguments(config_class), model, environments=None)
    elif hasattr(module, "GRPOTrainer"):
        trainer = stub_that_scores(module, [[5, 1]] * 2, [0.0] * 2, model=model, reference=model, num_generations=1)
    else:
        return absent("RLOO of this release removes the dropout of its reward model")
    trainer.reward_funcs, trainer.reward_processing_classes = [RewardModel()], [PromptTokenizer()]
    trainer.reward_func_names = ["reward"]
    with single_process(module):
        if hasattr(trainer, "_calculate_rewards"):
            trainer._calculate_rewards(rows, ["a"] * 2, ["b"] * 2, [[5]] * 2)
        elif hasattr(trainer, "_get_per_token_logps"):
            scored_completions(trainer)
        else:
            # 0.14 scores with models of transformers only.
            with shadowed(module, "PreTrainedModel", torch.nn.Module):
                trainer.compute_loss(model, rows)
    return judge(scores[0], right=1, wrong=0)
