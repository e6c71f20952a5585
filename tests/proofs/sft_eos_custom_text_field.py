"""The proof: one step of the real SFTTrainer on a column ``content``, and on the same texts called ``text``.

What is right is the loss, and every gradient, of the same trainer on a column ``text``; what is wrong is the loss of
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
VARIANTS = "the data are prepared before the model is compiled, and whatever part of it is trained"

TEXTS = [f"w{index} w{index + 1} w{index + 5}" + " w9" * index for index in range(4)]


def column(name: str, texts: list[str] = TEXTS) -> list[dict[str, Any]]:
    return [{name: each} for each in texts]


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
    tokens = [{"input_ids": words(each)["input_ids"]} for each in TEXTS]
    outcome = judge(run.loss, right=right.loss, wrong=tiny.sft_step(tokens).loss)
    if patched:
        assert run.difference(right) < 1e-6
    if patched:
        expected = ids(right.trainer.train_dataset)
        streamed = tiny.sft_step(column("content"), streaming=True, **settings)
        assert streamed.difference(right) < 1e-6
        ended = [f"{each} <eos>" for each in TEXTS]
        given = {"eval_dataset": {"one": column("content"), "ended": column("content", ended)}}
        made = tiny.sft_step(column("content"), given=given, **settings).trainer
        assert [ids(each) for each in made.eval_dataset.values()] == [expected, expected]
        an_end_of_its_own_is_not_doubled(expected)
    return tiny.TrainingResult(outcome, run.loss, run.gradients)


def an_end_of_its_own_is_not_doubled(expected: list[list[int]]) -> None:
    """A tokenizer that ends each text itself."""
    from tokenizers.processors import TemplateProcessing

    words = tiny.tokenizer()
    words.backend_tokenizer.post_processor = TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 1)])
    made = tiny.sft_step(column("content"), words=words, dataset_text_field="content").trainer
    assert ids(made.train_dataset) == expected


def unaffected() -> tiny.TrainingResult:
    """The column is called ``text``, or it is none that is tokenised."""
    pairs = [{"prompt": f"w{index} ", "completion": f"w{index + 3} w{index + 4}"} for index in range(4)]
    tokens = [{"input_ids": tiny.tokenizer()(each)["input_ids"]} for each in TEXTS]
    runs = {
        "text": tiny.sft_step(column("text")),
        "pairs": tiny.sft_step(pairs, dataset_text_field="content"),
        "tokens": tiny.sft_step(tokens, dataset_text_field="content"),
    }
    return tiny.TrainingResult(absent("whom it does not hit"), *tiny.several(runs))
