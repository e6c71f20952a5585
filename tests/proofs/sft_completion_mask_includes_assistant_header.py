"""Train two steps of two micro-batches, and evaluate, with the real SFTTrainer on prompts and completions of messages.

Losses and gradients are compared with the cross-entropy of the completions behind the header of the assistant's turn,
and with that of the completions and this header.
"""

from __future__ import annotations

import functools
from importlib.metadata import version
from typing import Any

from trl_hotfix.authoring import absent
from trl_hotfix.model import Verdict

import tiny
from tiny import sft_steps

ID, TARGET = "sft-completion-mask-includes-assistant-header", "trl.trainer.sft_trainer:SFTTrainer._prepare_dataset"

OVERLAYS = ()
PARITY = True
DATA = True
EQUIVALENT = {"applied twice": "the inner view adds what the outer one has added already"}
VARIANTS = "the data are prepared before the model is compiled, and whatever part of it is trained"

HEADERS = {"user": "w58", "assistant": "w59"}
"""The word that opens a turn in the template of the tiny tokenizer."""


def chat_words() -> Any:
    """Return the tokenizer, which renders a conversation as a list unless it is asked for a dict.

    Under transformers 5 it is the other way round, and TRL before 0.27.1 takes the length of the dict.
    """
    words = tiny.chat_tokenizer()
    words.apply_chat_template = functools.partial(words.apply_chat_template, return_dict=False)
    return words


def message(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def conversations() -> list[dict[str, Any]]:
    """Return prompts of one turn or three, and completions of one to four words, some with a second exchange."""
    rows = []
    for row in range(8):
        words = [f"w{(7 * row + 3 * place) % 56}" for place in range(8)]
        earlier = [message("user", words[5]), message("assistant", f"{words[6]} {words[7]}")] if row % 3 == 1 else []
        later = [message("user", words[6]), message("assistant", words[5])] if row % 4 == 2 else []
        prompt = [*earlier, message("user", " ".join(words[: 1 + row % 2]))]
        rows.append({"prompt": prompt, "completion": [message("assistant", " ".join(words[2 : 3 + row % 4])), *later]})
    return rows


def rendered(messages: list[dict[str, str]]) -> list[int]:
    """Return the token ids of messages: for each a header, its words and an end of sequence."""
    text = " ".join(f"{HEADERS[part['role']]} {part['content']} <eos>" for part in messages)
    token_ids: list[int] = tiny.tokenizer()(text)["input_ids"]
    return token_ids


def prompt_lengths() -> dict[tuple[int, ...], int]:
    """Return how many tokens the prompt has with the header, by the tokens of the conversation."""
    return {
        tuple(rendered(row["prompt"] + row["completion"])): len(rendered(row["prompt"])) + 1 for row in conversations()
    }


def trained_from(offset: int) -> Any:
    """Return what makes the labels of a row begin ``offset`` tokens behind its header."""
    lengths = prompt_lengths()

    def labelled(row: sft_steps.Row) -> sft_steps.Row:
        ids, _ = row
        begin = lengths[tuple(ids)] + offset
        return ids, [-100] * begin + ids[begin:]

    return labelled


def prepared(trainer: Any) -> dict[tuple[int, ...], int]:
    """Return the length of each prompt by the prepared dataset of the trainer."""
    return {tuple(row["input_ids"]): row["completion_mask"].index(1) for row in trainer.train_dataset}


def train() -> tiny.TrainingResult:
    from packaging.version import Version

    # ``trl.__version__`` is "unknown" in 0.22.0.
    if Version(version("trl")) < Version("0.17"):
        return tiny.TrainingResult(absent("there is no loss of the completion alone"))
    trainer, model = sft_steps.sft_steps(conversations(), chat_words())
    outcome = sft_steps.judged_sft_steps(trainer, model, {"right": trained_from(0), "wrong": trained_from(-1)})
    if outcome.verdict is Verdict.FIXED and Version("0.19") <= Version(version("trl")) < Version("0.24"):
        check_other_data()
    return tiny.result_of_runs({"conversations": trainer}, outcome)


def check_other_data() -> None:
    """Check other processes, a stream, several datasets, the config's own choice, packing, and the user's tokenizer."""
    from packaging.version import Version

    words, rows, expected = chat_words(), conversations(), prompt_lengths()
    runs = {
        "processes": sft_steps.sft_steps(rows, words, dataset_num_proc=2)[0],
        "chosen": sft_steps.sft_steps(rows, words, completion_only_loss=True)[0],
        "plain": sft_steps.sft_steps(rows, tiny.chat_tokenizer())[0],
    }
    # Before 0.23.1 a stream has to have known columns.
    if Version(version("trl")) >= Version("0.23.1"):
        runs["stream"] = sft_steps.sft_steps(rows, words, streaming=True)[0]
    for name, run in runs.items():
        assert prepared(run) == expected, f"the prompts of {name} have lengths {prepared(run)}: expected {expected}"
    evaluated = {tuple(row["input_ids"]): row["completion_mask"].index(1) for row in runs["chosen"].eval_dataset}
    assert len(evaluated) == 2
    assert evaluated.items() <= expected.items()
    packed = sft_steps.sft_steps(rows, words, packing=True)[0].train_dataset
    # 0.19 loses the mask when it packs.
    if "completion_mask" in packed.column_names:
        trained = sum(len(ids) - length for ids, length in expected.items())
        assert sum(sum(row["completion_mask"]) for row in packed) == trained
    # The user's own tokenizer is as it was.
    assert words.apply_chat_template(rows[0]["prompt"]) == rendered(rows[0]["prompt"])


def unaffected() -> tiny.TrainingResult:
    """Train on pairs of texts, on messages, on tokens, and on all tokens."""
    words, rows = chat_words(), conversations()
    masks = {ids: [0] * length + [1] * (len(ids) - length) for ids, length in prompt_lengths().items()}
    cases: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
        "texts": ([{"prompt": "w1 w2", "completion": f" w{row} w3"} for row in range(8)], {}),
        "messages": ([{"messages": row["prompt"] + row["completion"]} for row in rows], {}),
        "tokens": ([{"input_ids": list(ids), "completion_mask": mask} for ids, mask in masks.items()], {}),
        "all tokens": (rows, {"completion_only_loss": False}),
    }
    runs = {name: sft_steps.sft_steps(data, words, **settings)[0] for name, (data, settings) in cases.items()}
    for name, run in runs.items():
        if tiny.acts(ID, TARGET, run):
            raise AssertionError(f"the wrapper acts: {name}")
    return tiny.result_of_runs(runs, absent("no prompt is of messages, or it is trained on"))
