"""Train two steps of two micro-batches, and evaluate, with the real SFTTrainer on texts, and on pairs of texts.

Losses and gradients are compared with the cross-entropy of sequences with an end-of-sequence token, and without one.
"""

from __future__ import annotations

from itertools import chain
from typing import Any
from unittest import mock

from packaging.version import Version

from trl_hotfix.authoring import absent
from trl_hotfix.model import Verdict

import tiny
from tiny import sft_steps

ID, TARGET = "sft-no-eos-appended", "trl.trainer.sft_trainer:SFTTrainer._prepare_dataset"

OVERLAYS = ()
PARITY = True
DATA = True
VARIANTS = "the data are prepared before the model is compiled, and whatever part of it is trained"

END = 1
TEXTS = [" ".join(f"w{(7 * index + 3 * place) % 56}" for place in range(3 + index % 4)) for index in range(8)]
PAIRS = [{"prompt": f"w{index} w9", "completion": f" {text}"} for index, text in enumerate(TEXTS)]
MESSAGES = [{"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "w3"}]} for text in TEXTS]


def column(name: str, texts: list[str] = TEXTS) -> list[dict[str, Any]]:
    return [{name: text} for text in texts]


def ended(texts: list[str]) -> list[list[int]]:
    return [[*tiny.tokenizer()(text)["input_ids"], END] for text in texts]


def ids_of(rows: Any) -> list[list[int]]:
    return [row["input_ids"] for row in rows]


def without_end(row: sft_steps.Row) -> sft_steps.Row:
    ids, labels = row
    return (ids[:-1], labels[:-1]) if ids[-1] == END else row


def with_end(row: sft_steps.Row) -> sft_steps.Row:
    ids, labels = without_end(row)
    return [*ids, END], [*labels, END]


def train() -> tiny.TrainingResult:
    import trl

    if not Version("0.15") <= Version(trl.__version__) < Version("0.17"):
        return tiny.TrainingResult(absent("it ends what it packs alone, or all texts, since 0.16.0"))
    kinds = {"right": with_end, "wrong": without_end}
    runs, outcomes = {}, []
    for name, rows in {"texts": column("text"), "pairs": PAIRS}.items():
        runs[name], model = sft_steps.sft_steps(rows)
        outcomes.append(sft_steps.judged_sft_steps(runs[name], model, kinds))
    outcome = outcomes[0]
    if any(other.verdict is not outcome.verdict for other in outcomes):
        raise AssertionError(f"some texts end, and others do not: {outcomes}")
    if outcome.verdict is Verdict.FIXED:
        assert ids_of(runs["texts"].train_dataset) == ended(TEXTS)
        assert ids_of(runs["pairs"].train_dataset) == ended([pair["prompt"] + pair["completion"] for pair in PAIRS])
        check_other_data()
    return tiny.result_of_runs(runs, outcome)


def check_other_data() -> None:
    """Check packing, several datasets, other processes, another column, and texts and tokenizers that end already."""
    from tokenizers.processors import TemplateProcessing

    expected = ended(TEXTS)
    words = tiny.tokenizer()
    words.backend_tokenizer.post_processor = TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", END)])
    settings: dict[str, Any] = {"trainer_arguments": {"eval_dataset": {"a": column("text"), "b": column("text")}}}
    trainers = {
        "texts that end": tiny.sft_step(column("text", [f"{text} <eos>" for text in TEXTS])).trainer,
        "a tokenizer that ends them": tiny.sft_step(column("text"), words=words).trainer,
        "another column": tiny.sft_step(column("content"), dataset_text_field="content").trainer,
        "formatted": tiny.sft_step(
            column("question"), trainer_arguments={"formatting_func": lambda row: row["question"]}
        ).trainer,
        "processes": tiny.sft_step(column("text"), dataset_num_proc=2, **settings).trainer,
    }
    datasets = {name: trainer.train_dataset for name, trainer in trainers.items()}
    datasets |= trainers["processes"].eval_dataset
    for name, dataset in datasets.items():
        assert ids_of(dataset) == expected, f"the token ids of {name} are {ids_of(dataset)}: expected {expected}"
    packed = tiny.sft_step(column("text"), packing=True, max_seq_length=7, max_length=7).trainer
    assert list(chain(*ids_of(packed.train_dataset))) == list(chain(*expected))
    # The user's own tokenizer is as it was.
    assert packed.processing_class("w1")["input_ids"] == [4]


def unaffected() -> tiny.TrainingResult:
    """Train on conversations, on tokens, with a tokenizer that has no end, and on what the library did not make."""
    from trl import data_utils

    without = tiny.chat_tokenizer()
    without.eos_token = None
    runs = {
        "conversations": tiny.sft_step(MESSAGES),
        "no end": tiny.sft_step(column("text"), words=without),
        "no dataset": _constant_length(),
    }
    if hasattr(data_utils, "maybe_convert_to_chatml"):  # 0.15.0 tokenises every dataset.
        runs["tokens"] = tiny.sft_step(
            [{"input_ids": ids[:-1], "attention_mask": [1] * 3} for ids in ended(TEXTS[::4])]
        )
        runs["older conversations"] = tiny.sft_step(
            [
                {"conversations": [{"from": "user", "value": text}, {"from": "assistant", "value": "w3"}]}
                for text in TEXTS
            ]
        )
    for name, run in runs.items():
        if tiny.acts(ID, TARGET, run.trainer):
            raise AssertionError(f"the wrapper acts: {name}")
    return tiny.TrainingResult(absent("nothing is to be ended"), *tiny.several(runs))


def _constant_length() -> tiny.SftRun:
    """Train a step on a ``ConstantLengthDataset``, which ends what it packs itself."""
    from datasets import Dataset
    from trl.trainer.utils import ConstantLengthDataset

    packed = ConstantLengthDataset(
        tiny.tokenizer(), Dataset.from_list(column("text")), dataset_text_field="text", seq_length=6, infinite=True
    )
    with mock.patch.object(Dataset, "from_list", return_value=packed):
        return tiny.sft_step(column("text"))
