"""The proof: one step of the real SFTTrainer on a column ``content``, and on the same texts called ``text``.

The expected result is the loss, and every gradient, of the same trainer on a column ``text``. The wrong loss is that of
the tokens without the last.
"""

from __future__ import annotations

import math
from typing import Any

import trl_hotfix
from trl_hotfix.authoring import absent, judge

import tiny

ID = "sft-eos-custom-text-field"

OVERLAYS = ()
PARITY = True
DATA = True
EQUIVALENT = {"applied twice": "the texts end when the second sees them, and stay as they are"}
VARIANTS = "the data are prepared before the model is compiled, and whatever part of it is trained"

TEXTS = [f"w{index} w{index + 1} w{index + 5}" + " w9" * index for index in range(4)]


def column(name: str, texts: list[str] = TEXTS) -> list[dict[str, Any]]:
    return [{name: text} for text in texts]


def ids(rows: Any) -> list[list[int]]:
    return [row["input_ids"] for row in rows]


def train() -> tiny.TrainingResult:
    patched = trl_hotfix.status()[ID].state.value == "applied"
    settings = {"dataset_text_field": "content"}
    run = tiny.sft_step(column("content"), **settings)
    right = tiny.sft_step(column("text"))
    if math.isclose(right.loss, run.loss, rel_tol=1e-6) and not patched and right.batch["input_ids"][0, 3] != 1:
        return tiny.TrainingResult(absent("this release adds no end-of-sequence token"), run.loss, run.gradients)
    words = tiny.tokenizer()
    tokens = [{"input_ids": words(text)["input_ids"]} for text in TEXTS]
    outcome = judge(run.loss, right=right.loss, wrong=tiny.sft_step(tokens).loss)
    if patched:
        assert run.difference(right) < 1e-6
    if patched:
        expected = ids(right.trainer.train_dataset)
        streamed = tiny.sft_step(column("content"), streaming=True, **settings)
        assert streamed.difference(right) < 1e-6
        ended = [f"{text} <eos>" for text in TEXTS]
        arguments = {"eval_dataset": {"one": column("content"), "ended": column("content", ended)}}
        trainer = tiny.sft_step(column("content"), trainer_arguments=arguments, **settings).trainer
        assert [ids(rows) for rows in trainer.eval_dataset.values()] == [expected, expected]
        check_that_the_end_of_the_tokenizer_is_not_doubled(expected)
    return tiny.TrainingResult(outcome, run.loss, run.gradients)


def check_that_the_end_of_the_tokenizer_is_not_doubled(expected: list[list[int]]) -> None:
    """Use a tokenizer that appends the end of sequence to each text itself."""
    from tokenizers.processors import TemplateProcessing

    words = tiny.tokenizer()
    words.backend_tokenizer.post_processor = TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 1)])
    trainer = tiny.sft_step(column("content"), words=words, dataset_text_field="content").trainer
    assert ids(trainer.train_dataset) == expected


def unaffected() -> tiny.TrainingResult:
    """Train on a column called ``text``, on pairs, and on rows that are tokenised already."""
    pairs = [{"prompt": f"w{index} ", "completion": f"w{index + 3} w{index + 4}"} for index in range(4)]
    tokens = [{"input_ids": tiny.tokenizer()(text)["input_ids"]} for text in TEXTS]
    runs = {
        "text": tiny.sft_step(column("text")),
        "pairs": tiny.sft_step(pairs, dataset_text_field="content"),
        "tokens": tiny.sft_step(tokens, dataset_text_field="content"),
    }
    return tiny.TrainingResult(absent("whom it does not hit"), *tiny.several(runs))
