"""Train two steps of two micro-batches, and evaluate, with the real SFTTrainer on prompts and completions of messages.

The tokenizer is one of the installed transformers. Losses and gradients are compared with the cross-entropy of the
completions, and with that of all tokens but the first two.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from trl_hotfix.authoring import absent
from trl_hotfix.model import Verdict

import tiny
from tiny import chats, sft_steps

ID, TARGET = "sft-prompt-length-is-that-of-a-dict", "trl.trainer.sft_trainer:SFTTrainer._prepare_dataset"

OVERLAYS = ()
PARITY = True
DATA = True
VARIANTS = "the data are prepared before the model is compiled, and whatever part of it is trained"


def words() -> Any:
    """Return the tokenizer. Nothing begins an answer: before 0.24.0 prompts are rendered without such a beginning."""
    return tiny.chat_tokenizer(
        "{% for message in messages %}"
        "{{ 'w58 ' if message['role'] == 'user' else 'w59 ' }}{{ message['content'] }} <eos> {% endfor %}"
    )


def all_but_two(row: sft_steps.Row) -> sft_steps.Row:
    ids, _ = row
    return ids, [-100] * 2 + ids[2:]


def train() -> tiny.TrainingResult:
    from packaging.version import Version

    # ``trl.__version__`` is "unknown" in 0.22.0.
    release = Version(version("trl"))
    if release < Version("0.17"):
        return tiny.TrainingResult(absent("there is no loss of the completion alone"))
    trainer, model = sft_steps.sft_steps(chats.conversations(), words())
    outcome = sft_steps.judged_sft_steps(trainer, model, {"right": chats.trained_from(-1), "wrong": all_but_two})
    if outcome.verdict is Verdict.FIXED and Version("0.23") <= release < Version("0.28"):
        check_other_data()
    return tiny.result_of_runs({"conversations": trainer}, outcome)


def check_other_data() -> None:
    """Check other processes, the config's own choice, and packing."""
    rows, expected = chats.conversations(), {ids: length - 1 for ids, length in chats.prompt_lengths().items()}
    runs = {
        "processes": sft_steps.sft_steps(rows, words(), dataset_num_proc=2)[0],
        "chosen": sft_steps.sft_steps(rows, words(), completion_only_loss=True)[0],
    }
    for name, run in runs.items():
        lengths = chats.lengths_of_prompts(run.train_dataset)
        assert lengths == expected, f"the prompts of {name} have lengths {lengths}: expected {expected}"
    assert chats.lengths_of_prompts(runs["chosen"].eval_dataset).items() <= expected.items()
    packed = sft_steps.sft_steps(rows, words(), packing=True)[0].train_dataset
    assert sum(sum(row["completion_mask"]) for row in packed) == sum(len(ids) - expected[ids] for ids in expected)


def unaffected() -> tiny.TrainingResult:
    """Train on pairs of texts, on messages, on tokens, and on all tokens."""
    cases = chats.cases_without_masks()
    runs: dict[str, Any] = {
        name: sft_steps.sft_steps(data, words(), **settings)[0] for name, (data, settings) in cases.items()
    }
    for name, run in runs.items():
        if tiny.acts(ID, TARGET, run):
            raise AssertionError(f"the wrapper acts: {name}")
    return tiny.result_of_runs(runs, absent("no prompt is of messages, or it is trained on"))
