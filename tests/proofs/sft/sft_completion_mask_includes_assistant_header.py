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
from tiny import chats, sft_steps

ID, TARGET = "sft-completion-mask-includes-assistant-header", "trl.trainer.sft_trainer:SFTTrainer._prepare_dataset"

OVERLAYS = ()
PARITY = True
DATA = True
VARIANTS = "the data are prepared before the model is compiled, and whatever part of it is trained"


def chat_words() -> Any:
    """Return the tokenizer, which renders a conversation as a list unless it is asked for a dict.

    Under transformers 5 it is the other way round, which is another bug, sft-prompt-length-is-that-of-a-dict.
    """
    words = tiny.chat_tokenizer()
    words.apply_chat_template = functools.partial(words.apply_chat_template, return_dict=False)
    return words


def train() -> tiny.TrainingResult:
    from packaging.version import Version

    # ``trl.__version__`` is "unknown" in 0.22.0.
    if Version(version("trl")) < Version("0.17"):
        return tiny.TrainingResult(absent("there is no loss of the completion alone"))
    trainer, model = sft_steps.sft_steps(chats.conversations(), chat_words())
    outcome = sft_steps.judged_sft_steps(
        trainer, model, {"right": chats.trained_from(0), "wrong": chats.trained_from(-1)}
    )
    if outcome.verdict is Verdict.FIXED and Version("0.19") <= Version(version("trl")) < Version("0.24"):
        check_other_data()
    return tiny.result_of_runs({"conversations": trainer}, outcome)


def check_other_data() -> None:
    """Check other processes, a stream, several datasets, the config's own choice, packing, and the user's tokenizer."""
    from packaging.version import Version

    words, rows, expected = chat_words(), chats.conversations(), chats.prompt_lengths()
    runs = {
        "processes": sft_steps.sft_steps(rows, words, dataset_num_proc=2)[0],
        "chosen": sft_steps.sft_steps(rows, words, completion_only_loss=True)[0],
    }
    # Before 0.23.1 a stream has to have known columns.
    if Version(version("trl")) >= Version("0.23.1"):
        runs["stream"] = sft_steps.sft_steps(rows, words, streaming=True)[0]
    for name, run in runs.items():
        lengths = chats.lengths_of_prompts(run.train_dataset)
        assert lengths == expected, f"the prompts of {name} have lengths {lengths}: expected {expected}"
    evaluated = chats.lengths_of_prompts(runs["chosen"].eval_dataset)
    assert len(evaluated) == 2
    assert evaluated.items() <= expected.items()
    packed = sft_steps.sft_steps(rows, words, packing=True)[0].train_dataset
    # 0.19 loses the mask when it packs.
    if "completion_mask" in packed.column_names:
        trained = sum(len(ids) - length for ids, length in expected.items())
        assert sum(sum(row["completion_mask"]) for row in packed) == trained
    # The user's own tokenizer is as it was.
    assert words.apply_chat_template(rows[0]["prompt"]) == chats.rendered(rows[0]["prompt"])


def unaffected() -> tiny.TrainingResult:
    """Train on pairs of texts, on messages, on tokens, and on all tokens."""
    words, cases = chat_words(), chats.cases_without_masks()
    runs = {name: sft_steps.sft_steps(data, words, **settings)[0] for name, (data, settings) in cases.items()}
    for name, run in runs.items():
        if tiny.acts(ID, TARGET, run):
            raise AssertionError(f"the wrapper acts: {name}")
    return tiny.result_of_runs(runs, absent("no prompt is of messages, or it is trained on"))
