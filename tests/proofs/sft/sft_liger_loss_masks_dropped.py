"""Train two steps of two micro-batches, and evaluate, with the real SFTTrainer, Liger and data whose loss is masked.

Losses and gradients are compared with the cross-entropy of the completions, or of the answers, and with that of all
tokens. Liger is a stand-in which changes nothing in the model: the masks are lost before it runs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import trl_hotfix
from trl_hotfix.authoring import absent
from trl_hotfix.model import Verdict

import tiny
from tiny import liger, sft_steps

ID = "sft-liger-loss-masks-dropped"

OVERLAYS = ()
PARITY = True
DATA = True
VARIANTS = "the data are prepared before the model is compiled, and whatever part of it is trained"

END, BEGIN, ASSISTANT = 1, 59, 62
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ 'w58 ' + message['content'] + ' <eos> ' }}"
    "{% else %}{{ 'w59 ' }}{% generation %}{{ message['content'] + ' <eos>' }}{% endgeneration %}{{ ' ' }}{% endif %}"
    "{% endfor %}"
)


def pairs() -> list[dict[str, Any]]:
    """Return prompts and completions of several lengths. ``w56`` is the end of a prompt, and stands nowhere else."""
    return [
        {
            "prompt": " ".join(f"w{index + place}" for place in range(2 + index % 3)) + " w56 ",
            "completion": " ".join(f"w{(7 * index + 3 * place) % 50}" for place in range(2 + index % 4)),
        }
        for index in range(8)
    ]


def conversations() -> list[dict[str, Any]]:
    """Return conversations of one turn or two, with answers of one to four words."""
    return [
        {"messages": [message for turn in range(1 + row % 2) for message in exchange(row, turn)]} for row in range(8)
    ]


def exchange(row: int, turn: int) -> list[dict[str, str]]:
    answer = " ".join(f"w{(5 * row + 3 * place + turn) % 50}" for place in range(1 + (row + turn) % 4))
    return [{"role": "user", "content": f"w{row} w{turn}"}, {"role": "assistant", "content": answer}]


def of_completion(row: sft_steps.Row) -> sft_steps.Row:
    ids, _ = row
    begin = ids.index(BEGIN) + 1
    return ids, [-100] * begin + ids[begin:]


def of_assistant(row: sft_steps.Row) -> sft_steps.Row:
    ids, _ = row
    labels, is_answer = [], False
    for token in ids:
        labels.append(token if is_answer else -100)
        is_answer = token == ASSISTANT or (is_answer and token != END)
    return ids, labels


def of_all(row: sft_steps.Row) -> sft_steps.Row:
    ids, _ = row
    return ids, ids


def run(rows: list[dict[str, Any]], **settings: Any) -> tuple[Any, Any]:
    words = tiny.chat_tokenizer(TEMPLATE)
    with liger.names_of_liger("trl.trainer.sft_trainer"):
        return sft_steps.sft_steps(rows, words, **{"use_liger_kernel": True, "loss_type": "nll", **settings})


def train() -> tiny.TrainingResult:
    from trl import SFTConfig

    names = {field.name for field in dataclasses.fields(SFTConfig)}
    if "completion_only_loss" not in names:
        return tiny.TrainingResult(absent("this release has no loss of completions alone"))
    kinds = {"completions": (of_completion, pairs(), {})}
    if "assistant_only_loss" in names:
        kinds["assistants"] = (of_assistant, conversations(), {"assistant_only_loss": True})
    runs, outcomes = {}, []
    for name, (masked, rows, settings) in kinds.items():
        runs[name], model = run(rows, **settings)
        outcomes.append(sft_steps.judged_sft_steps(runs[name], model, {"right": masked, "wrong": of_all}))
    if trl_hotfix.status()[ID].state.value == "applied":
        check_other_data(has_assistants="assistants" in kinds)
    outcome = next((outcome for outcome in outcomes if outcome.verdict is Verdict.REPRODUCED), outcomes[0])
    first = runs["completions"].steps[0]
    return tiny.TrainingResult(outcome, first.micro_batches[0].loss, first.gradients)


def check_other_data(*, has_assistants: bool) -> None:
    """Train completions of a stream, those of tokenised rows, and masks that a tokenised dataset has."""
    import trl.trainer.sft_trainer
    from datasets import Dataset

    trainer, model = run(pairs(), completion_only_loss=True, dataset_num_proc=2)
    rows = [{**row, "more": "w1"} for row in Dataset.to_list(trainer.train_dataset)]
    tokenised = [{name: row[name] for name in ("input_ids", "completion_mask", "more")} for row in rows]
    runs = [(of_completion, (trainer, model)), (of_completion, run(tokenised, completion_only_loss=True))]
    if has_assistants:
        masks = [[int(label != -100) for label in of_completion((row["input_ids"], []))[1]] for row in rows]
        of_assistants = [{**row, "assistant_masks": mask} for row, mask in zip(tokenised, masks, strict=True)]
        runs.append((of_completion, run(of_assistants)))
    if not hasattr(trl.trainer.sft_trainer.DataCollatorForLanguageModeling, "_convert_seq_lengths_to_position_ids"):
        # From 0.20.0 on a stream has to know its columns, and completions are not what the patch keeps there.
        runs.append((of_completion, run(pairs(), streaming=True)))
    for masked, (trainer, model) in runs:
        outcome = sft_steps.judged_sft_steps(trainer, model, {"right": masked, "wrong": of_all})
        if outcome.verdict is not Verdict.FIXED:
            raise AssertionError(f"the mask is dropped: {outcome}")


def unaffected() -> tiny.TrainingResult:
    """Train without Liger, and with it on texts and on all tokens of completions."""
    texts = [{"text": row["prompt"] + row["completion"]} for row in pairs()]
    runs = {
        "without Liger": run(pairs(), use_liger_kernel=False),
        "texts": run(texts),
        "all tokens": run(pairs(), completion_only_loss=False),
    }
    trainers = {name: trainer for name, (trainer, _) in runs.items()}
    return tiny.result_of_runs(trainers, absent("there is no Liger, or no mask"))
