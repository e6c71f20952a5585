"""GRPO, RLOO, SDPO and Online DPO tokenize what a reward model scores with ``add_special_tokens=False``.

That is right for a conversation, since the chat template writes the special tokens. A plain text of a prompt and its
completion then lacks them: the BOS of Llama 3, Gemma or Mistral, the ``[CLS]`` and ``[SEP]`` of BERT. RewardTrainer has
tokenized plain texts with them in every release, and so does a pipeline of transformers.

From 0.24 on RewardTrainer also puts an EOS behind plain texts. Not every reward model was trained with it, so the
wrapper adds none.

For one call the trainer has views of the tokenizers of its reward models, that add the special tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from ...authoring import Call, absent, judge, shadowed, wrapper
from ...model import Outcome
from ...testing import (
    BeginningTokenizer,
    NotingReward,
    absent_if_reexported,
    score_texts,
    stub_with_rewards,
    trainer_and_config,
)


@wrapper
def score_with_special_tokens(call: Call) -> Any:
    """Score the prompts of this call with special tokens."""
    return _scored(call, call["prompts"])


@wrapper
def score_rows_with_special_tokens(call: Call) -> Any:
    """Score the prompts of these rows with special tokens."""
    return _scored(call, [row["prompt"] for row in call["inputs"]])


def _scored(call: Call, prompts: Sequence[Any]) -> Any:
    """Have TRL tokenize with special tokens if the prompts are texts, and a tokenizer adds such tokens to texts."""
    import torch

    trainer = call.trainer
    if not isinstance(prompts[0], str):
        return call()
    pairs = list(zip(trainer.reward_funcs, trainer.reward_processing_classes, strict=True))
    hit = [isinstance(reward, torch.nn.Module) and _adds_tokens(tokenizer, prompts) for reward, tokenizer in pairs]
    if not any(hit):
        return call()
    views = [_adding(tokenizer) if is_hit else tokenizer for (_, tokenizer), is_hit in zip(pairs, hit, strict=True)]
    with shadowed(trainer, "reward_processing_classes", views):
        return call()


def _adds_tokens(tokenizer: Any, prompts: Sequence[str]) -> bool:
    """Return whether the tokenizer adds tokens to a text, and these prompts do not begin with them already."""
    beginning = _beginning(tokenizer)
    if beginning and all(prompt.startswith(beginning) for prompt in prompts):
        return False
    return bool(tokenizer("a")["input_ids"] != tokenizer("a", add_special_tokens=False)["input_ids"])


def _beginning(tokenizer: Any) -> str:
    return getattr(tokenizer, "bos_token", None) or getattr(tokenizer, "cls_token", None) or ""


def _adding(tokenizer: Any) -> Any:
    """Return a view of ``tokenizer`` that adds its special tokens to each text, whatever TRL asks for."""
    import wrapt

    beginning = _beginning(tokenizer)

    class View(wrapt.CallableObjectProxy):  # type: ignore[type-arg]
        def __call__(self, text: list[str], **settings: Any) -> Any:
            texts = [each.removeprefix(beginning) for each in text]
            return self.__wrapped__(texts, **{**settings, "add_special_tokens": True})

    return View(tokenizer)


def a_text_has_its_special_tokens(module: ModuleType) -> Outcome:
    """Count the beginnings of two texts that a reward model is given."""
    trainer_class, _ = trainer_and_config(module, "GRPO", "RLOO", "SDPO", "OnlineDPO")
    # SDPO may have its method from a base of its own.
    of_online = getattr(trainer_class, "_calculate_rewards_from_functions", None)
    if of_online and (reexported := absent_if_reexported(module, of_online)):
        return reexported
    reward = NotingReward()
    try:
        trainer = stub_with_rewards(module, [reward], [BeginningTokenizer()])
    except LookupError as error:
        return absent(str(error))
    score_texts(trainer, ["a", "b"], ["c", "d"])
    return judge(sum(row.count(2) for row in reward.rows), right=2, wrong=0)
