"""Train two steps of two micro-batches with SFTTrainer on 1,040 rows, packed with ``wrapped``, and evaluate.

The trainer sees the rows of the second batch of ``datasets.map``, of the training set and of the evaluation set.
Losses and gradients are compared with those of their own tokens, and of as many from the beginning of the dataset.
The rows have labels: from 1.7.0 on TRL adds them to those that have none, and so writes all rows anew.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from trl_hotfix.authoring import absent

import tiny
from tiny.sft_steps import judged_sft_steps

ID = "sft-wrapped-packing-duplicates"
OVERLAYS = ()
PARITY = True
DATA = True
VARIANTS = "the data are packed before the model is compiled, and whatever part of it is trained"

BLOCK = 1000
"""The rows that ``datasets.map`` gives to a function at once."""

LENGTH = 8


def rows(count: int) -> list[list[int]]:
    """Return rows of one to three tokens."""
    return [[3 + (7 * row + row // 13 + 11 * place) % 60 for place in range(1 + row % 3)] for row in range(count)]


def cut(tokens: list[int]) -> list[list[int]]:
    return [tokens[begin : begin + LENGTH] for begin in range(0, len(tokens), LENGTH)]


def tokens_of(some: list[list[int]]) -> list[int]:
    return [token for row in some for token in row]


def sft_steps(count: int, *, shuffled: bool = False, **settings: Any) -> tuple[Any, Any]:
    """Return a trainer that has trained and evaluated on the last eight packed rows, and a model for the formulas."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    defaults = {"packing": True, "packing_strategy": "wrapped", "max_length": LENGTH, "max_seq_length": LENGTH}
    defaults |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 2, "optim": "sgd"}
    defaults |= {"learning_rate": 0.5, "eval_packing": True}
    # Some releases have the config in the fingerprint of the dataset.
    defaults |= {name: str(Path(tempfile.gettempdir(), "sft")) for name in ("output_dir", "logging_dir")}
    data = Dataset.from_dict({"input_ids": rows(count), "labels": rows(count)})
    if shuffled:
        data = data.shuffle(seed=0)
    with tempfile.TemporaryDirectory() as folder:
        model, copy = (tiny.llama(folder, seed=0) for _ in range(2))
        trainer = tiny.trainer(
            tiny.stepwise(SFTTrainer),
            model=model,
            args=tiny.config(SFTConfig, **{**defaults, **settings}),
            train_dataset=data,
            eval_dataset=data,
            tokenizer=tiny.tokenizer(),
        )
        for name in ("train_dataset", "eval_dataset"):
            packed = getattr(trainer, name)
            setattr(trainer, name, packed.select(range(len(packed) - 8, len(packed))))
        trainer.train()
        trainer.evaluate()
    return trainer, copy


def train() -> tiny.TrainingResult:
    from trl import data_utils

    if not hasattr(data_utils, "_pack_wrapped"):
        return tiny.TrainingResult(absent("this release has no _pack_wrapped"))
    data = rows(BLOCK + 40)
    of_second_block = tokens_of(data[BLOCK:])
    right, wrong = cut(of_second_block)[-8:], cut(tokens_of(data)[: len(of_second_block)])[-8:]
    places = {tuple(row): place for some in (right, wrong) for place, row in enumerate(some)}
    assert len(places) == 16

    def kind(expected: list[list[int]]) -> Any:
        def row_at_its_place(row: Any) -> Any:
            of_place = expected[places[tuple(row[0])]]
            return of_place, of_place

        return row_at_its_place

    trainer, model = sft_steps(len(data))
    outcome = judged_sft_steps(trainer, model, {"right": kind(right), "wrong": kind(wrong)})
    return tiny.result_of_runs({"wrapped": trainer}, outcome)


def unaffected() -> tiny.TrainingResult:
    """Train on the rows of one batch, on shuffled rows, which are in many pieces, and with another strategy."""
    with tiny.counted(ID) as counts:
        runs = {
            "one batch": sft_steps(60)[0],
            "shuffled": sft_steps(BLOCK + 40, shuffled=True)[0],
            "bfd": sft_steps(BLOCK + 40, packing_strategy="bfd")[0],
        }
        assert not counts().acted, "the wrapper acts"
    return tiny.result_of_runs(runs, absent("no batch is a slice of rows in one piece, or the strategy is another one"))
