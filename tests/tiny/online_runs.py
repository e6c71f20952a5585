"""OnlineDPO, XPO and NashMD on one prompt, and the log-probs of their completions without TRL's code."""

from __future__ import annotations

import inspect
from typing import Any

from .data import left_padding_tokenizer, tokenizer
from .trainers import config, trainer

ONLINE_LENGTHS = (5, 3, 4, 2)
"""Tokens of the completions in ``online_dpo``, with the end of sequence; they are padded to the longest."""


def online_completions(count: int) -> Any:
    """Return the fixed completions that ``online_dpo`` generates, ``(count, 5)``, padded with 0 after the end."""
    import torch

    rows = []
    for row in range(count):
        length = ONLINE_LENGTHS[row % len(ONLINE_LENGTHS)]
        token_ids = [10 + (11 * row + 3 * place) % 50 for place in range(length - 1)]
        rows.append([*token_ids, 1, *[0] * (max(ONLINE_LENGTHS) - length)])
    return torch.tensor(rows)


def online_dpo(trainer_class: type, config_class: type, model: Any, **settings: Any) -> Any:
    """Return a trainer of OnlineDPO, XPO or NashMD on one prompt; its reference is the model as it begins.

    Of the two completions of a prompt the first is the better one, if there is a judge or the trainer is OnlineDPO's.
    OnlineDPO's completions are those of ``online_completions``; XPO and NashMD sample.
    """
    import torch
    from datasets import Dataset

    def generate(input_ids: Any, **kwargs: Any) -> Any:
        return torch.cat([input_ids, online_completions(len(input_ids))], dim=1)

    class FirstIsBetter:
        def judge(self, prompts: Any, completions: Any, return_scores: bool = False, **kwargs: Any) -> Any:
            return [0.75 if return_scores else 0] * len(prompts)

    def reward(completions: Any, **kwargs: Any) -> list[float]:
        return [float(len(completions) - row) for row in range(len(completions))]

    def reward_model() -> Any:
        from transformers import LlamaForSequenceClassification

        torch.manual_seed(2)
        return LlamaForSequenceClassification(model.config)

    left_padding = left_padding_tokenizer()
    samples = hasattr(trainer_class, "_compute_losses")
    if not samples:
        model.generate = generate
    names = inspect.signature(trainer_class.__init__).parameters
    preference: dict[str, Any] = {"judge": FirstIsBetter()}
    if "judge" not in names:
        preference = {"reward_funcs": reward_model() if samples else reward}
        preference |= {name: left_padding for name in names if samples and name.startswith("reward_processing_class")}
    return trainer(
        trainer_class,
        model=model,
        **preference,
        args=config(config_class, **{"max_new_tokens": 5, "max_length": 16, "beta": 0.5, **settings}),
        train_dataset=Dataset.from_list([{"prompt": "w1 w2 w3"}] * 16),
        tokenizer=left_padding,
    )


def online_log_probs(model: Any, count: int, *, padding: bool = False) -> Any:
    """Return log-probs of the tokens of ``online_completions`` after the prompt, without TRL's code.

    They are 0 for padding, unless ``padding`` is true.
    """
    import torch

    completions = online_completions(count)
    prompt = torch.tensor([tokenizer()("w1 w2 w3")["input_ids"]] * count)
    lengths = torch.tensor([ONLINE_LENGTHS[row % len(ONLINE_LENGTHS)] for row in range(count)])
    completion_mask = torch.arange(completions.shape[1]) < lengths[:, None]
    token_ids = torch.cat([prompt, completions], dim=1)
    attention_mask = torch.cat([torch.ones_like(prompt), completion_mask.long()], dim=1)
    logits = model(input_ids=token_ids, attention_mask=attention_mask, use_cache=False).logits
    logits = logits[:, prompt.shape[1] - 1 : -1]
    return logits.log_softmax(-1).gather(2, completions[..., None])[..., 0] * (completion_mask | padding)
