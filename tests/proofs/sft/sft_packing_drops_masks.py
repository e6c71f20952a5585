"""Train two steps of two micro-batches, and evaluate, with the real SFTTrainer and packed data whose loss is masked.

Losses and gradients are compared with the cross-entropy of the completions, or of the answers, and with that of all
tokens. The strategy is ``wrapped``, which keeps no borders: a packed row is one sequence.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import trl_hotfix
from trl_hotfix.authoring import absent

import tiny
from tiny import sft_steps

ID = "sft-packing-drops-masks"

OVERLAYS = ()
PARITY = True
DATA = True
VARIANTS = "the data are packed before the model is compiled, and whatever part of it is trained"

END, ANSWERS = 1, range(23, 53)
"""The end of an answer, and the tokens of ``w20`` to ``w49``, which stand in answers alone."""

TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ 'w58 ' + message['content'] + ' ' }}"
    "{% else %}{{ 'w59 ' }}{% generation %}{{ message['content'] + ' <eos>' }}{% endgeneration %}{{ ' ' }}{% endif %}"
    "{% endfor %}"
)


def question(row: int) -> str:
    return " ".join(f"w{(row + place) % 10}" for place in range(2 + row % 3))


def answer(row: int) -> str:
    return " ".join(f"w{20 + (7 * row + 3 * place) % 30}" for place in range(2 + row % 4))


PAIRS = [{"prompt": question(row) + " w56 ", "completion": answer(row)} for row in range(24)]
CONVERSATIONS = [
    {"messages": [{"role": "user", "content": question(row)}, {"role": "assistant", "content": answer(row)}]}
    for row in range(24)
]


def of_answers(row: sft_steps.Row) -> sft_steps.Row:
    ids, _ = row
    return ids, [token if token == END or token in ANSWERS else -100 for token in ids]


def of_all(row: sft_steps.Row) -> sft_steps.Row:
    ids, _ = row
    return ids, ids


def run(rows: list[dict[str, Any]], **settings: Any) -> tuple[Any, Any]:
    from trl import SFTConfig

    names = {field.name for field in dataclasses.fields(SFTConfig)}
    wrapped = {"packing_strategy": "wrapped"} if "packing_strategy" in names else {}
    defaults = {"packing": True, "max_length": 12, "max_seq_length": 12, "loss_type": "nll", **wrapped}
    return sft_steps.sft_steps(rows, tiny.chat_tokenizer(TEMPLATE), **{**defaults, **settings})


def train() -> tiny.TrainingResult:
    from trl import SFTConfig

    names = {field.name for field in dataclasses.fields(SFTConfig)}
    if "completion_only_loss" not in names:
        return tiny.TrainingResult(absent("this release has no loss of completions alone"))
    kinds: list[tuple[list[dict[str, Any]], dict[str, Any]]] = [(PAIRS, {})]
    if "assistant_only_loss" in names:
        kinds.append((CONVERSATIONS, {"assistant_only_loss": True}))
    if trl_hotfix.status()[ID].state.value == "applied":
        kinds += [(PAIRS, {"dataset_num_proc": 2}), (PAIRS, {"streaming": True, "completion_only_loss": True})]
    runs = [run(rows, **settings) for rows, settings in kinds]
    outcomes = [sft_steps.judged_sft_steps(*each, {"right": of_answers, "wrong": of_all}) for each in runs]
    if len({outcome.verdict for outcome in outcomes}) != 1:
        raise AssertionError(f"expected the masks of all datasets, or of none: {outcomes}")
    first = runs[0][0].steps[0]
    return tiny.TrainingResult(outcomes[0], first.micro_batches[0].loss, first.gradients)


def unaffected() -> tiny.TrainingResult:
    """Train without packing, and with it on texts and on all tokens of completions."""
    texts = [{"text": row["prompt"] + row["completion"]} for row in PAIRS]
    runs = {
        "without packing": run(PAIRS, packing=False),
        "texts": run(texts),
        "all tokens": run(PAIRS, completion_only_loss=False),
    }
    trainers = {name: trainer for name, (trainer, _) in runs.items()}
    return tiny.result_of_runs(trainers, absent("nothing is packed, or there is no mask"))
