"""Online DPO and A2PO tokenize plain-text prompts with ``add_special_tokens=False``, and so without a BOS.

That is right for a prompt that the chat template has rendered, and ``_generate`` (A2PO: ``_prepare_inputs`` and
``_estimate_optimal_values``) passes it for every prompt. Up to 0.22 ``tokenize_row`` put a BOS before each prompt. With
a vLLM server the completions are right: it tokenizes texts by itself, and ``_generate_vllm_server`` tokenizes them once
more for the loss. A colocated vLLM returns the ids that it has used.

``begun_with_bos`` gives the trainer a view of its tokenizer for one call.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from itertools import chain
from types import ModuleType
from typing import Any

from ...authoring import Call, absent, begun_with_bos, judge, wrapper
from ...model import Outcome
from ...testing import (
    CharacterTokenizer,
    absent_if_reexported,
    completions_of,
    default_arguments,
    single_process,
    stub_that_generates,
    tiny_causal_lm,
    trainer_and_config,
)


@wrapper
def begin_the_prompts(call: Call) -> Any:
    """Generate from prompts that begin with a BOS (Online DPO). Those with images are left as they are."""
    return call() if call["images"] is not None else begun_with_bos(call, call["prompts"])


@wrapper
def begin_the_prompts_of_the_rows(call: Call) -> Any:
    """Generate from prompts that begin with a BOS (A2PO, in each step)."""
    return begun_with_bos(call, (row["prompt"] for row in call["inputs"]))


@wrapper
def begin_the_prompts_of_the_datasets(call: Call) -> Any:
    """Generate from prompts that begin with a BOS (A2PO, once, for the optimal values)."""
    datasets = call.trainer.train_dataset, call.trainer.eval_dataset
    rows = chain.from_iterable(dataset for dataset in datasets if dataset is not None)
    return begun_with_bos(call, (row["prompt"] for row in rows))


class _Beginning(CharacterTokenizer):
    """A tokenizer that puts the character 2 before a text."""

    bos_token: Any = "\2"
    bos_token_id: Any = 2

    def __call__(self, text: Any, add_special_tokens: bool = True, **kwargs: Any) -> Any:
        from transformers import BatchEncoding

        if isinstance(text, str):
            return super().__call__("\2" * add_special_tokens + text)
        return BatchEncoding(self.pad([self(each, add_special_tokens) for each in text]))

    def batch_decode(self, ids: Any, **kwargs: Any) -> list[str]:
        return ["" for _ in ids]


def prompts_begin(module: ModuleType) -> Outcome:
    """Count the beginnings of what the model is given: Online DPO generates twice from a prompt, and so does A2PO."""
    import torch

    trainer_class, config_class = trainer_and_config(module, "OnlineDPO", "A2PO")
    if trainer_class.__name__ == "OnlineDPOTrainer":
        if reexported := absent_if_reexported(module, trainer_class.training_step):
            return reexported
        if "images" not in inspect.signature(getattr(trainer_class, "_generate", id)).parameters:
            return absent("in this release tokenize_row puts a BOS before each prompt")
    given = []

    def generate(input_ids: Any, **kwargs: Any) -> Any:
        given.append(input_ids)
        return torch.cat([input_ids, torch.ones_like(input_ids[:, :1])], dim=1)

    model, tokenizer = tiny_causal_lm(vocabulary=100), _Beginning()
    model.generate = generate
    attributes = {"processing_class": tokenizer, "_tokenizer": tokenizer, "ref_model": model, "eos_token_ids": [1]}
    attributes |= {"image_token": None, "is_vision_model": False, "use_transformers_paged": False}
    attributes |= {"train_dataset": [{"prompt": "a"}], "eval_dataset": None, "_optimal_values": {"a": 0.0}}
    attributes |= {"reward_funcs": [lambda prompts, **kwargs: [0.0]], "reward_weights": torch.ones(1)}
    attributes |= {"model_kwarg_keys": (), "_metrics": {"train": defaultdict(list)}}
    configs: dict[str, Any] = {"generation_config": None, "value_generation_config": None, "generation_kwargs": {}}
    settings = default_arguments(config_class, num_value_samples=1, filter_all_incorrect=False)
    trainer = stub_that_generates(trainer_class, settings, model, **attributes, **configs)
    # A DataLoader draws a random number.
    trainer.accelerator.prepare = lambda loader: [trainer.train_dataset]
    with single_process(module):
        getattr(trainer, "_estimate_optimal_values", list)()
        completions_of(trainer)
    return judge(sum(int((ids == 2).sum()) for ids in given), right=2, wrong=0)
