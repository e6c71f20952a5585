"""CPO and ORPO cut the responses of a long pair by the length of the longer response, and not of the prompt.

TRL 0.28.0 removed ``max_prompt_length`` from ``tokenize_row``. If the prompt and the longer response of a pair have
more than ``max_length`` tokens, it keeps ``response[: max_length - longer_response_length]`` of both. That is too much
after a long prompt and too little after a short one; it is nothing if the longer response fills ``max_length``. The
mean log-prob of no tokens is 0 / 0. 1.15.0 (pull request 6588) keeps ``max_length`` minus the tokens of the prompt.

The wrapper has TRL cut nothing, and cuts then. Only the prompt of a row may fill ``max_length``; 1.15.0 keeps such a
row, whose gradient is NaN. The datasets are prepared within the constructor, so its wrapper drops these rows.
"""

from __future__ import annotations

import logging
import sys
from types import ModuleType
from typing import Any

from ...authoring import Call, absent, judge, only_rows, wrapper
from ...model import Outcome
from ...testing import CharacterTokenizer, dpo_stub

_log = logging.getLogger("trl_hotfix")

_NOT_TRAINED_ON = -100
_SIDES = ("chosen", "rejected")


@wrapper
def cut_each_row_at_the_limit(call: Call) -> Any:
    """Tokenise a pair, and keep of each response what fits into ``max_length`` after its prompt."""
    from transformers.utils import is_torch_xla_available

    # On a TPU ORPO pads each row to max_length.
    trainer = call.trainer
    if trainer.is_encoder_decoder or is_torch_xla_available():
        return call()
    limit = trainer.max_length
    trainer.max_length = sys.maxsize
    try:
        row = call()
    finally:
        trainer.max_length = limit
    prompts = {side: row[f"{side}_labels"].count(_NOT_TRAINED_ON) for side in _SIDES}
    longer_response = max(len(row[f"{side}_labels"]) - prompts[side] for side in _SIDES)
    if max(prompts.values()) + longer_response > limit:  # TRL cuts.
        call.act()
    for side in _SIDES:
        for name in ("input_ids", "attention_mask", "labels"):
            row[f"{side}_{name}"] = row[f"{side}_{name}"][: max(limit, prompts[side])]
    return row


@wrapper
def drop_rows_without_a_response(call: Call) -> None:
    """Make the trainer, and drop the rows whose prompt alone fills ``max_length``."""
    call()
    trainer = call.trainer
    trainer.train_dataset = _with_responses(call, trainer.train_dataset, "train")
    evaluation = trainer.eval_dataset
    if isinstance(evaluation, dict):
        kept = {name: _with_responses(call, dataset, name) for name, dataset in evaluation.items()}
        trainer.eval_dataset = type(evaluation)(kept)
    elif evaluation is not None:
        trainer.eval_dataset = _with_responses(call, evaluation, "eval")


def _with_responses(call: Call, dataset: Any, name: str) -> Any:
    import accelerate  # type: ignore[import-untyped]

    # tokenize_row may be the user's.
    if not {f"{side}_labels" for side in _SIDES} <= set(dataset.column_names):
        return dataset
    trainer = call.trainer

    def has_responses(row: Any) -> bool:
        return all(max(row[f"{side}_labels"]) > _NOT_TRAINED_ON for side in _SIDES)

    kept = only_rows(accelerate, dataset, has_responses, trainer.args, f"Dropping rows without a response from {name}")
    if kept is not dataset:
        call.act()
        _log.warning(
            "cpo-orpo-truncation-by-longer-response: %s of %s rows are dropped from the %s dataset. Their prompt fills "
            "max_length=%s, and nothing is left of a response. Raise max_length to train on them",
            len(dataset) - len(kept),
            len(dataset),
            name,
            trainer.max_length,
        )
    return kept


def responses_fill_the_room(module: ModuleType) -> Outcome:
    """Count the tokens of a response of 13 after a prompt of 10, where ``max_length`` is 20."""
    method = "CPO" if hasattr(module, "CPOTrainer") else "ORPO"
    if "max_prompt_length" in getattr(module, f"{method}Config").__dataclass_fields__:
        return absent("prompts are cut at max_prompt_length")
    trainer = dpo_stub(module, method, max_length=20, processing_class=CharacterTokenizer())
    row = trainer.tokenize_row({"prompt": 10 * "p", "chosen": 12 * "c", "rejected": "r"})
    return judge(sum(label != _NOT_TRAINED_ON for label in row["chosen_labels"]), right=10, wrong=7)
