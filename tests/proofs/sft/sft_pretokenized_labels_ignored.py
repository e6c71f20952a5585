"""Train two steps of two micro-batches, and evaluate, with the real SFTTrainer on rows of tokens and labels.

Losses and gradients are compared with the cross-entropy of the labels, and with that of all tokens.
"""

from __future__ import annotations

from typing import Any

from packaging.version import Version

from trl_hotfix.authoring import absent
from trl_hotfix.model import Verdict

import tiny
from tiny import sft_steps

ID = "sft-pretokenized-labels-ignored"
COLLATOR = "trl.trainer.sft_trainer:DataCollatorForLanguageModeling.torch_call"
COLUMNS = "trl.trainer.sft_trainer:SFTTrainer._set_signature_columns_if_needed"

OVERLAYS = ()
PARITY = True
DATA = False
VARIANTS = "the labels are put into the batch before the model is compiled, and whatever part of it is trained"

IGNORED = -100


def rows() -> list[dict[str, Any]]:
    """Return eight rows of four to seven tokens. The first ones have no label, nor has one in the middle of some."""
    made = []
    for row in range(8):
        ids = [3 + (7 * row + 3 * place) % 60 for place in range(4 + row % 4)]
        labels = [IGNORED] * (1 + row % 3) + ids[1 + row % 3 :]
        if row % 4 == 3:
            labels[-2] = IGNORED
        made.append({"input_ids": ids, "labels": labels})
    return made


def labels_of(row: sft_steps.Row) -> sft_steps.Row:
    """Return the row with its labels in the dataset. It may have been cut."""
    ids, _ = row
    (labels,) = (some["labels"] for some in rows() if some["input_ids"][: len(ids)] == ids)
    return ids, labels[: len(ids)]


def all_tokens(row: sft_steps.Row) -> sft_steps.Row:
    ids, _ = row
    return ids, ids


def train() -> tiny.TrainingResult:
    import trl

    release = Version(trl.__version__)
    if release < Version("0.16.1"):
        return tiny.TrainingResult(absent("this release takes the collator of transformers"))
    kinds = {"right": labels_of, "wrong": all_tokens}
    with tiny.counted(ID, COLLATOR) as counts:
        trainer, model = sft_steps.sft_steps(rows())
        acted = counts().acted
    outcome = sft_steps.judged_sft_steps(trainer, model, kinds)
    if outcome.verdict is Verdict.FIXED and release < Version("0.19"):
        # In two steps of two micro-batches, and in an evaluation. 0.16.1 keeps the labels.
        assert acted == 5
        assert tiny.acts(ID, COLUMNS, trainer) == (1 if release >= Version("0.17") else None)
        check_other_runs(model, kinds)
        check_without_padding()
        check_labels_that_are_tokens()
    return tiny.result_of_runs({"labels": trainer}, outcome)


def check_other_runs(model: Any, kinds: Any) -> None:
    """Check rows that are cut, a stream, all columns, and a completion mask, which leaves out more."""
    settings: dict[str, dict[str, Any]] = {
        "cut": {"max_length": 5},
        "stream": {"streaming": True},
        "all columns": {"remove_unused_columns": False},
    }
    initial = {name: value.clone() for name, value in model.state_dict().items()}
    for name, setting in settings.items():
        trainer, _ = sft_steps.sft_steps(rows(), **setting)
        model.load_state_dict(initial)
        assert sft_steps.judged_sft_steps(trainer, model, kinds).verdict is Verdict.FIXED, name


def check_without_padding() -> None:
    """Check the labels of a batch without padding, where another collator reads them."""
    batch = tiny.sft_step(rows(), padding_free=True).batch
    trained = sum(label != IGNORED for row in rows() for label in row["labels"])
    assert int((batch["labels"] != IGNORED).sum()) == trained
    assert len(batch["labels"]) == 1


def check_labels_that_are_tokens() -> None:
    """Train alike with labels that are the tokens, and without labels. The collator's wrapper does not act then."""
    same = [{**row, "labels": row["input_ids"]} for row in rows()]
    with tiny.counted(ID, COLLATOR) as counts:
        runs = [tiny.sft_step(some) for some in (same, [{"input_ids": row["input_ids"]} for row in rows()])]
        assert not counts().acted
    assert runs[0].difference(runs[1]) == 0.0


def unaffected() -> tiny.TrainingResult:
    """Train on tokens without labels, on texts, on packed rows, and with a collator of the user's."""
    from trl.trainer import sft_trainer

    def collate(examples: list[dict[str, Any]]) -> Any:
        assert not reads_columns or all("labels" not in example for example in examples)
        return own([{"input_ids": example["input_ids"]} for example in examples])

    reads_columns = "_set_signature_columns_if_needed" in vars(sft_trainer.SFTTrainer)
    own = sft_trainer.DataCollatorForLanguageModeling(pad_token_id=0)
    tokens = [{"input_ids": row["input_ids"]} for row in rows()]
    texts = [{"text": " ".join(f"w{token - 3}" for token in row["input_ids"])} for row in rows()]
    with tiny.counted(ID) as counts:
        runs = {
            "tokens": tiny.sft_step(tokens),
            "texts": tiny.sft_step(texts),
            "packed": tiny.sft_step(rows(), packing=True, max_length=16, max_seq_length=16),
            "the user's": tiny.sft_step(rows(), trainer_arguments={"data_collator": collate}),
        }
        assert not counts().acted, "a wrapper acts"
    return tiny.TrainingResult(absent("there are no labels, or another collator reads them"), *tiny.several(runs))
