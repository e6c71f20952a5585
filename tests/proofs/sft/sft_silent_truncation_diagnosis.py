"""The proof: real SFT runs whose rows are cut, and what is said of each.

What is to be said is counted here, from the words of the rows. That the model is given the other tokens, and no more,
is counted in the batches of its steps.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import trl_hotfix
from trl_hotfix.authoring import absent, judge

import tiny

ID = "sft-silent-truncation-diagnosis"

OVERLAYS = ()
PARITY = False
EQUIVALENT = {
    "_lost: `dataset.with_format('arrow', columns=['input_ids'])` without `columns`": "what is not counted is read too",
}
MUTANTS_ON = ("1.14.2",)
VARIANTS = "the data are prepared before the model is compiled, and whatever part of it is trained"

LIMIT = 5
TEXTS = [" ".join(f"w{(7 * row + place) % 50}" for place in range(1 + (3 * row) % 8)) + " <eos>" for row in range(8)]
EVALUATION = ["w1 w2 <eos> w3 w4 w5 w6 <eos>", "w1 w2 <eos>", "w1 w2 w3 w4 <eos>"]


def columns(texts: list[str]) -> list[dict[str, Any]]:
    return [{"text": text} for text in texts]


def conversations() -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                {"role": "user", "content": f"w{row}"},
                {"role": "assistant", "content": " ".join(f"w{row + place}" for place in range(1 + row % 4))},
            ]
        }
        for row in range(8)
    ]


def pairs() -> list[dict[str, Any]]:
    return [{"prompt": f"w{row} w{row + 1}", "completion": " w3" * (1 + row % 4) + " <eos>"} for row in range(8)]


def tokens_of(row: dict[str, Any]) -> list[int]:
    """Return the tokens of a row: a word for the role and an end for each message; 1 is the end of sequence."""
    if "input_ids" in row:
        return list(row["input_ids"])
    if "messages" in row:
        turns = [f"{'w58' if turn['role'] == 'user' else 'w59'} {turn['content']} <eos>" for turn in row["messages"]]
        return tokens_of({"text": " ".join(turns)})
    words = (row["text"] if "text" in row else row["prompt"] + row["completion"]).split()
    return [1 if word == "<eos>" else 3 + int(word[1:]) for word in words]


def line(name: str, rows: list[dict[str, Any]], *, keep_end: bool = False) -> str:
    """Return what is to be said of this dataset."""
    tokens = [tokens_of(row) for row in rows]
    lost = [ids[:-LIMIT] if keep_end else ids[LIMIT:] for ids in tokens]
    total, gone, ends = sum(map(len, tokens)), sum(map(len, lost)), sum(ids.count(1) for ids in lost)
    return (
        f"SFT: max_length={LIMIT} cuts {sum(map(bool, lost))} of the {len(rows)} rows of the {name} dataset, the "
        f"longest of which has {max(map(len, tokens))} tokens. {gone} of {total} tokens are lost "
        f"({100 * gone / total:.1f}%), {ends} of them ends of sequence. Raise max_length, or split the longer rows"
    )


def new_trainer(rows: Any, *, evaluation: Any = None, streaming: bool = False, **settings: Any) -> Any:
    """Return a trainer of two steps of two micro-batches, on all of eight rows."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    arguments = {"data_collator": settings.pop("data_collator")} if "data_collator" in settings else {}
    dataset = Dataset.from_list(rows)
    usual = {"max_length": LIMIT, "max_steps": 2, "gradient_accumulation_steps": 2, "loss_type": "nll"}
    usual |= {"dataset_text_field": "text", "completion_only_loss": False}
    return tiny.trainer(
        tiny.stepwise(SFTTrainer),
        model=tiny.llama("model", seed=0),
        args=tiny.config(SFTConfig, **{**usual, **settings}),
        train_dataset=dataset.to_iterable_dataset() if streaming else dataset,
        eval_dataset={name: Dataset.from_list(split) for name, split in evaluation.items()}
        if isinstance(evaluation, dict)
        else evaluation and Dataset.from_list(evaluation),
        tokenizer=tiny.chat_tokenizer(),
        **arguments,
    )


def lines_of(make: Any) -> tuple[Any, list[str]]:
    result, lines = tiny.warnings_of(make)
    return result, [text for text in lines if text.startswith("SFT: ")]


def trained(rows: Any, **settings: Any) -> Any:
    trainer = new_trainer(rows, **settings)
    trainer.train()
    return trainer


def tokens_given(trainer: Any) -> int:
    """Return how many tokens the model was given in the micro-batches of all steps. 0 is the padding."""
    batches = [micro_batch.inputs for step in trainer.steps for micro_batch in step.micro_batches]
    assert len(batches) == 4
    return sum(int((batch["input_ids"] != 0).sum()) for batch in batches)


def train() -> tiny.TrainingResult:
    from trl.trainer import sft_trainer

    if not hasattr(sft_trainer, "pack_dataset"):
        return tiny.TrainingResult(absent("what cuts the rows shows no whole ones"))
    patched = trl_hotfix.status()[ID].state.value == "applied"
    fields = {field.name: field for field in dataclasses.fields(sft_trainer.SFTConfig)}
    text_rows, tokens = columns(TEXTS), [{"input_ids": tokens_of({"text": text})} for text in TEXTS]
    expected = {
        "texts": (line("train", text_rows), line("eval", columns(EVALUATION))),
        "conversations": (line("train", conversations()),),
        "pairs": (line("train", pairs()),),
        "tokens": (line("train", tokens), line("one", columns(EVALUATION))),
    }
    runs = {
        "texts": lines_of(lambda: trained(text_rows, evaluation=columns(EVALUATION))),
        "conversations": lines_of(lambda: new_trainer(conversations())),
        "pairs": lines_of(lambda: new_trainer(pairs())),
        "tokens": lines_of(
            lambda: trained(tokens, evaluation={"one": columns(EVALUATION), "short": columns(EVALUATION[1:])})
        ),
    }
    if "packing_strategy" in fields:
        expected["packing"] = (line("train", text_rows),)
        runs["packing"] = lines_of(lambda: new_trainer(text_rows, packing=True))
    if "truncation_mode" in fields:
        expected["keep_end"] = (
            line("train", text_rows, keep_end=True),
            line("eval", columns(EVALUATION), keep_end=True),
        )
        settings = {"evaluation": columns(EVALUATION), "truncation_mode": "keep_end"}
        runs["keep_end"] = lines_of(lambda: trained(text_rows, **settings))
    whole = sum(len(tokens_of(row)) for row in text_rows)
    for name in {"texts", "tokens", "keep_end"} & set(runs):
        lost = sum(len(tokens_of(row)) - LIMIT for row in text_rows if len(tokens_of(row)) > LIMIT)
        assert tokens_given(runs[name][0]) == whole - lost, name
    for name, (_, lines) in runs.items():
        assert lines == (list(expected[name]) if patched else []), (name, lines, expected[name])
    if patched:
        check_new_evaluations(runs["texts"][0], sft_trainer)
        check_what_loses_nothing(sft_trainer, fields)
        check_many_rows()
    outcome = judge(sum(len(lines) for _, lines in runs.values()), right=sum(map(len, expected.values())), wrong=0)
    trainer = runs["texts"][0]
    return tiny.TrainingResult(outcome, trainer.steps[0].micro_batches[0].loss, trainer.steps[0].gradients)


def check_new_evaluations(trainer: Any, sft_trainer: Any) -> None:
    """Say what is lost of a dataset that an evaluation prepares, and say it once."""
    from datasets import Dataset

    # What says that it evaluates stands on the class too.
    is_its_own = inspect.unwrap(sft_trainer.SFTTrainer.evaluate).__module__ == sft_trainer.__name__
    if not is_its_own or collator_cuts(sft_trainer):
        return  # only prepared datasets can be evaluated, or what is cut is not known when they are prepared
    dataset = Dataset.from_list(columns(EVALUATION[:2]))
    first, second = (lines_of(lambda: trainer.evaluate(dataset))[1] for _ in range(2))
    assert (first, second) == ([line("eval", columns(EVALUATION[:2]))], []), (first, second)


def collator_cuts(sft_trainer: Any) -> bool:
    return "truncation_mode" in getattr(sft_trainer.DataCollatorForLanguageModeling, "__dataclass_fields__", {})


def check_what_loses_nothing(sft_trainer: Any, fields: dict[str, Any]) -> None:
    """Say nothing of trainers that keep every token, or whose rows cannot be counted."""
    rows = columns(TEXTS)
    settings: dict[str, dict[str, Any]] = {
        "no limit": {"max_length": None},
        "the limit is the longest row": {"max_length": max(len(tokens_of(row)) for row in rows)},
        "a stream": {"streaming": True},
    }
    if collator_cuts(sft_trainer):
        settings["a collator of the user's"] = {"data_collator": list}
    if "packing_strategy" in fields:
        settings["wrapped"] = {"packing": True, "packing_strategy": "wrapped"}
    options = fields["packing_strategy"].metadata["help"] if "packing_strategy" in fields else ""
    for strategy in ("bfd_split", "bfd-requeue"):
        if f"{strategy}'" in options:
            settings[strategy] = {"packing": True, "packing_strategy": strategy}
    for name, setting in settings.items():
        _, lines = lines_of(lambda setting=setting: new_trainer(rows, **setting))
        assert not lines, (name, lines)


def check_many_rows() -> None:
    """Add up the rows of several tables."""
    rows = [{"input_ids": tokens_of({"text": TEXTS[row % 8]})} for row in range(1003)]
    assert lines_of(lambda: new_trainer(rows))[1] == [line("train", rows)]


def unaffected() -> tiny.TrainingResult:
    """Train on rows that are short enough, on others without a limit, on a stream, and on rows of which it is said.

    Nothing is changed, so the loss and the gradients of the last are the same bits too.
    """
    rows, short = columns(TEXTS), [{"text": " ".join(text.split()[-LIMIT:])} for text in TEXTS]
    runs = {
        "short": trained(short, evaluation=short[:3]),
        "no limit": trained(rows, max_length=None),
        "stream": trained(rows, streaming=True),
        "cut": trained(rows, evaluation=columns(EVALUATION)),
    }
    for name in ("short", "cut"):
        runs[name].evaluate()
    gradients = {
        f"{run} {number} {name}": gradient
        for run, trainer in runs.items()
        for number, step in enumerate(trainer.steps)
        for name, gradient in step.gradients.items()
    }
    losses = sum(
        micro_batch.loss for trainer in runs.values() for step in trainer.steps for micro_batch in step.micro_batches
    )
    losses += sum(micro_batch.loss for name in ("short", "cut") for micro_batch in runs[name].evaluations)
    return tiny.TrainingResult(absent("nothing is changed"), losses, gradients)
