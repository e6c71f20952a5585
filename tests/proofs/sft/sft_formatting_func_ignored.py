"""The proof: one step of the real SFTTrainer with a formatting function, and with the texts formatted beforehand.

The expected result is the loss, and every gradient, of the same trainer on a dataset of these texts without a
formatting function. The wrong result is that of the dataset to which they have been added as a column ``text``.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import trl_hotfix
from trl_hotfix.authoring import absent, judge

import tiny

ID = "sft-formatting-func-ignored"

OVERLAYS = ()
PARITY = False
DATA = True
VARIANTS = "the data are prepared before the model is compiled, and whatever part of it is trained"


def conversations(key: str = "messages") -> list[dict[str, Any]]:
    names = ("from", "value") if key == "conversations" else ("role", "content")
    return [
        {
            key: [
                dict(zip(names, ("user", f"w{index} w{index + 1}"), strict=True)),
                dict(zip(names, ("assistant", f"w{index + 7} w{index + 9} w{index + 2}"), strict=True)),
            ]
        }
        for index in range(4)
    ]


def of_a_conversation(example: Mapping[str, Any]) -> str:
    (messages,) = example.values()
    return "w40 " + " w41 ".join(message.get("content") or message["value"] for message in messages)


def of_a_pair(example: Mapping[str, Any]) -> str:
    return f"w42 {example['prompt']} w43 {example['completion']}"


def of_a_field(example: Mapping[str, Any]) -> str:
    return f"w44 {example['content']} w45"


PAIRS = [{"prompt": f"w{index} w{index + 1}", "completion": f"w{index + 3} w{index + 8}"} for index in range(4)]
FIELDS = [{"content": f"w{index} w{index + 1} w{index + 5}"} for index in range(4)]

CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "messages": (conversations(), of_a_conversation, {}),
    "prompt and completion": (PAIRS, of_a_pair, {"completion_only_loss": False}),
    "text field": (FIELDS, of_a_field, {"dataset_text_field": "content"}),
}


def formatted_beforehand(rows: list[dict[str, Any]], function: Any, **settings: Any) -> tiny.SftRun:
    texts = [{"text": function(row)} for row in rows]
    return tiny.sft_step(texts, **{**settings, "dataset_text_field": "text"})


def train() -> tiny.TrainingResult:
    from trl.trainer import sft_trainer

    if "args" not in inspect.signature(sft_trainer.SFTTrainer._prepare_dataset).parameters:
        return tiny.TrainingResult(
            absent("this release takes the text of the formatting function and looks at no other column")
        )
    patched = trl_hotfix.status()[ID].state.value == "applied"
    runs: dict[str, tiny.SftRun] = {}
    outcomes = {}
    for name, (rows, function, settings) in CASES.items():
        runs[name] = tiny.sft_step(rows, trainer_arguments={"formatting_func": function}, **settings)
        right = formatted_beforehand(rows, function, **settings)
        wrong = tiny.sft_step([{**row, "text": function(row)} for row in rows], **settings)
        outcomes[name] = judge(runs[name].loss, right=right.loss, wrong=wrong.loss)
        assert outcomes[name].verdict.value == ("fixed" if patched else "reproduced"), (name, outcomes[name])
        assert not patched or runs[name].difference(right) < 1e-6, name
    if patched:
        check_streams_and_evaluations(sft_trainer)
        check_that_assistant_only_loss_excludes_it()
    return tiny.TrainingResult(outcomes["messages"], *tiny.several(runs))


def check_streams_and_evaluations(sft_trainer: Any) -> None:
    """Format an ``IterableDataset``, each dataset of a dict, and the other form of conversations."""
    right = formatted_beforehand(conversations(), of_a_conversation)
    # 0.15 does not support a formatting function with a stream.
    if "first_example" in inspect.unwrap(sft_trainer.SFTTrainer._prepare_dataset).__code__.co_varnames:
        streamed = tiny.sft_step(
            conversations(), trainer_arguments={"formatting_func": of_a_conversation}, streaming=True
        )
        assert abs(streamed.loss - right.loss) < 1e-6
    eval_datasets = {"one": conversations(), "two": conversations()}
    arguments = {"formatting_func": of_a_conversation, "eval_dataset": eval_datasets}
    trainer = tiny.sft_step(conversations(), trainer_arguments=arguments).trainer
    expected = [row["input_ids"] for row in right.trainer.train_dataset]
    for eval_dataset in trainer.eval_dataset.values():
        assert [row["input_ids"] for row in eval_dataset] == expected
    if hasattr(sft_trainer, "maybe_convert_to_chatml"):  # 0.15.0 has no conversations of "from" and "value"
        rows = conversations("conversations")
        assert tiny.sft_step(rows, trainer_arguments={"formatting_func": of_a_conversation}).difference(right) < 1e-6


def check_that_assistant_only_loss_excludes_it() -> None:
    """Where ``assistant_only_loss`` is set too, TRL's own choice stands, and is no longer silent."""
    from trl import SFTConfig

    if "assistant_only_loss" not in {field.name for field in dataclasses.fields(SFTConfig)}:
        return
    words = tiny.chat_tokenizer(
        "{% for message in messages %}{% if message['role'] == 'user' %}{{ 'w58 ' + message['content'] + ' <eos> ' }}"
        "{% else %}{{ 'w59 ' }}{% generation %}{{ message['content'] + ' <eos>' }}{% endgeneration %}{% endif %}"
        "{% endfor %}"
    )
    arguments = {"formatting_func": of_a_conversation}
    settings = {"words": words, "assistant_only_loss": True}
    run, messages = tiny.warnings_of(lambda: tiny.sft_step(conversations(), trainer_arguments=arguments, **settings))
    assert len(messages) == 1
    assert "formatting_func is not applied" in messages[0]
    assert "assistant_only_loss=True" in messages[0]
    assert run.difference(tiny.sft_step(conversations(), **settings)) == 0.0


def unaffected() -> tiny.TrainingResult:
    """Train with a function whose text conflicts with no other column, and without a function."""
    questions = [{"question": f"w{index}", "answer": f"w{index + 3} w{index + 4}"} for index in range(4)]

    def of_a_question(example: Mapping[str, Any]) -> str:
        return f"{example['question']} w46 {example['answer']}"

    runs = {
        "function": tiny.sft_step(questions, trainer_arguments={"formatting_func": of_a_question}),
        "messages": tiny.sft_step(conversations()),
        "pairs": tiny.sft_step(PAIRS),
    }
    return tiny.TrainingResult(absent("whom it does not hit"), *tiny.several(runs))
