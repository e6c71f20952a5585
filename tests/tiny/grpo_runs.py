"""GRPO trainers whose completions and rewards are fixed, so that no result depends on what a release samples."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from .data import left_padding_tokenizer
from .trainers import config, trainer

COMPLETION_LENGTHS = (2, 4, 8, 6)
"""Tokens of the completions of each group in ``grpo``, with the end of sequence."""

PROMPTS = tuple(f"w{index} w{index + 1} w{index + 2}" for index in range(8))
"""The prompts of ``grpo``."""

_SETTINGS = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 8, "temperature": 1.0}


def grpo(
    trainer_class: type,
    model: Any,
    config_class: type | None = None,
    lengths: tuple[int, ...] = COMPLETION_LENGTHS,
    *,
    reward_funcs: Any = None,
    prompts: Sequence[Any] | None = None,
    peft_config: Any = None,
    **settings: Any,
) -> Any:
    """Return a trainer on groups of four fixed completions, whose rewards are proportional to their lengths.

    The config is GRPO's, unless another ``config_class`` is passed. ``reward_funcs`` and ``prompts`` replace these
    rewards and the eight prompts of three words, and ``peft_config`` adds an adapter.

    Results then do not depend on what a release samples, nor on how it scales the rewards of a group: their standard
    deviation is 1 (0.22.0 and 0.22.1 scale when they should not, TRL pull request 3992).
    """
    import torch
    from datasets import Dataset
    from trl import GRPOConfig

    def generate(input_ids: Any, **kwargs: Any) -> Any:
        rows = []
        for row in range(len(input_ids)):
            length = lengths[row % len(lengths)]
            token_ids = [10 + (7 * (row % 4) + 3 * place) % 50 for place in range(length - 1)]
            rows.append([*token_ids, 1, *[0] * (8 - length)])
        return torch.cat([input_ids, torch.tensor(rows)], dim=1)

    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        # The trainer shuffles the batch after it has the rewards.
        torch.manual_seed(0)
        return [len(completion.split()) * reward_per_token for completion in completions]

    reward_per_token = _unit(COMPLETION_LENGTHS)
    model.generate = generate
    return trainer(
        trainer_class,
        model=model,
        reward_funcs=reward if reward_funcs is None else reward_funcs,
        args=config(config_class or GRPOConfig, **{**_SETTINGS, **settings}),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts or PROMPTS]),
        tokenizer=left_padding_tokenizer(),
        **({} if peft_config is None else {"peft_config": peft_config}),
    )


def grpo_of_one_length(
    trainer_class: type, model: Any, peft_config: Any = None, config_class: type | None = None, **settings: Any
) -> Any:
    """Return a GRPO trainer on one prompt whose completions all have eight tokens, with an adapter if one is passed.

    The mean over sequences is then the mean over tokens, and the order of the prompts does not matter: every release
    has the same loss. The config is GRPO's, unless another ``config_class`` is passed.
    """
    import torch
    from datasets import Dataset
    from trl import GRPOConfig

    def generate(input_ids: Any, generation_config: Any = None, **kwargs: Any) -> Any:
        # 0.14.0 leaves it to the model to answer a prompt several times.
        input_ids = input_ids.repeat_interleave(getattr(generation_config, "num_return_sequences", None) or 1, 0)
        rows = [[*(10 + (7 * (row % 4) + 3 * place) % 50 for place in range(7)), 1] for row in range(len(input_ids))]
        return torch.cat([input_ids, torch.tensor(rows)], dim=1)

    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        torch.manual_seed(0)
        return [row % 4 * reward_step for row in range(len(completions))]

    reward_step = _unit(range(4))
    model.generate = generate
    return trainer(
        trainer_class,
        model=model,
        reward_funcs=reward,
        args=config(config_class or GRPOConfig, **{**_SETTINGS, "beta": 1.0, **settings}),
        train_dataset=Dataset.from_list([{"prompt": "w1 w2 w3"}] * 8),
        tokenizer=left_padding_tokenizer(),
        peft_config=peft_config,
    )


def _unit(rewards: Sequence[int]) -> float:
    """Return the factor that gives ``rewards`` a standard deviation of 1, so that scaling them changes nothing."""
    # TRL divides by the deviation plus 1e-4.
    return (1 - 1e-4) / statistics.stdev(rewards)
