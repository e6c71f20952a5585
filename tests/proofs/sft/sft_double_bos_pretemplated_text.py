"""Train two steps of two micro-batches, and evaluate, with the real SFTTrainer on texts that begin with a beginning.

Losses and gradients are compared with the cross-entropy of sequences that begin once, and of those that begin twice.
"""

from __future__ import annotations

import inspect
from importlib.metadata import version
from typing import Any

from packaging.version import Version

from trl_hotfix.authoring import absent
from trl_hotfix.model import Verdict

import tiny
from tiny import sft_steps

OVERLAYS = ()
PARITY = False
DATA = True
VARIANTS = "the data are prepared before the model is compiled, and whatever part of it is trained"

BEGINNING, USER = 62, 59
EQUIVALENT = {"_adds_a_beginning: without `if beginning is None:`": "no text begins with None"}


def beginning_words(template: str = "w59 ") -> Any:
    """Return a tokenizer that puts the word w59 before a text, and whose chat template puts ``template`` there."""
    from tokenizers.processors import TemplateProcessing

    words = tiny.chat_tokenizer()
    words.bos_token = "w59"
    words.chat_template = template + words.chat_template.replace("w58", "w56").replace("w59", "w57")
    words.backend_tokenizer.post_processor = TemplateProcessing(single="w59 $A", special_tokens=[("w59", BEGINNING)])
    return words


def texts(beginning: str = "w59 ") -> list[str]:
    """Return texts of several lengths."""
    return [
        beginning + " ".join(f"w{(7 * index + 3 * place) % 56}" for place in range(3 + index % 4)) + " <eos>"
        for index in range(8)
    ]


def column(name: str, values: list[str]) -> list[dict[str, Any]]:
    return [{name: value} for value in values]


def beginning(times: int) -> Any:
    """Return what makes a row begin so many times."""

    def changed(row: sft_steps.Row) -> sft_steps.Row:
        ids, labels = row
        first = next(place for place, token in enumerate(ids) if token != BEGINNING)
        return [BEGINNING] * times + ids[first:], labels[:1] * times + labels[first:]

    return changed


def ids_of(trainer: Any) -> list[list[int]]:
    return [row["input_ids"] for row in trainer.train_dataset]


def train() -> tiny.TrainingResult:
    from trl import SFTTrainer

    prepare = getattr(SFTTrainer, "_prepare_dataset", None)
    if prepare is None or "args" not in inspect.signature(prepare).parameters:
        return tiny.TrainingResult(absent("dataset_kwargs says whether special tokens are added"))
    settings: dict[str, Any] = {"dataset_kwargs": {"add_special_tokens": False}}
    trainer, model = sft_steps.sft_steps(column("text", texts()), beginning_words(), **settings)
    outcome = sft_steps.judged_sft_steps(trainer, model, {"right": beginning(1), "wrong": beginning(2)})
    words = tiny.tokenizer()
    once = [words(text)["input_ids"] for text in texts()]
    is_fixed = outcome.verdict is Verdict.FIXED
    assert ids_of(trainer) == (once if is_fixed else [[BEGINNING, *ids] for ids in once])
    if is_fixed:
        check_other_data(once)
    return tiny.TrainingResult(outcome, trainer.steps[0].micro_batches[0].loss, trainer.steps[0].gradients)


def check_other_data(once: list[list[int]]) -> None:
    """Check streams, other processes, a formatting function, pairs and conversations."""
    words = beginning_words()
    rows = column("text", texts())
    pairs = [{"prompt": "w59 w1 w2 ", "completion": text} for text in texts("")]
    prepared = {
        "processes": sft_steps.sft_steps(rows, words, dataset_num_proc=2),
        "formatted": sft_steps.sft_steps(
            column("question", texts()), words, formatting_func=lambda row: row["question"]
        ),
        "pairs": sft_steps.sft_steps(pairs, words),
        "conversations": sft_steps.sft_steps(conversations(), words),
    }
    # 0.15 cannot read the columns of a stream that it has mapped.
    if Version(version("trl")) >= Version("0.16.0"):
        prepared["streams"] = sft_steps.sft_steps(rows, words, streaming=True)
    token_ids = {name: ids_of(trainer) for name, (trainer, _) in prepared.items()}
    expected = {name: once for name in ("streams", "processes", "formatted") if name in prepared}
    expected["pairs"] = [[BEGINNING, 4, 5, *ids[1:]] for ids in once]
    for name, ids in expected.items():
        assert token_ids[name] == ids, f"the token ids of {name} are {token_ids[name]}: expected {ids}"
    firsts = {tuple(ids[:2]) for ids in token_ids["conversations"]}
    assert firsts == {(BEGINNING, USER)}, f"conversations begin with {firsts}"
    # The user's own tokenizer is as it was.
    assert words("w59 w1")["input_ids"] == [BEGINNING, BEGINNING, 4]


def conversations() -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"messages": [{"role": role, "content": text} for role in roles]} for text in texts("")]


def unaffected() -> tiny.TrainingResult:
    """Train on texts without a beginning, with a tokenizer that adds none, and on tokens."""
    silent = tiny.tokenizer()
    silent.bos_token = "w59"
    twice = [[BEGINNING, *beginning_words()(text)["input_ids"]] for text in texts("")]
    # 0.15.0 tokenises a text in any case.
    tokens = [
        {"input_ids": ids, "attention_mask": [1] * len(ids), "text": text}
        for ids, text in zip(twice, texts(""), strict=True)
    ]
    runs = {
        "texts": sft_steps.sft_steps(column("text", texts("")), beginning_words()),
        "silent": sft_steps.sft_steps(column("text", texts()), silent),
        "tokens": sft_steps.sft_steps(tokens, beginning_words()),
    }
    steps = {f"{name}.{index}": step for name, (run, _) in runs.items() for index, step in enumerate(run.steps)}
    gradients = {f"{name}.{key}": value for name, step in steps.items() for key, value in step.gradients.items()}
    losses = [micro_batch.loss for step in steps.values() for micro_batch in step.micro_batches]
    return tiny.TrainingResult(absent("the texts begin once, or are tokens"), sum(losses), gradients)
