"""Train two steps of two micro-batches with SFTTrainer on packed rows, some of which are too long, and evaluate.

A micro-batch is one packed row of one sequence. The trainer sees the packed rows with the largest first tokens. Losses
and gradients are compared with those of the beginnings of the rows, and with those of what lies behind ``max_length``.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from trl_hotfix.authoring import absent
from trl_hotfix.model import Verdict

import tiny
from tiny.backward import measure_factors
from tiny.sft_steps import judged_sft_steps

ID = "sft-bfd-packing-splits-conversations"
OVERLAYS = ()
PARITY = True
DATA = True
VARIANTS = "the data are packed before the model is compiled, and whatever part of it is trained"

LENGTH, SEEN = 6, 8


def rows() -> list[list[int]]:
    """Return twelve rows. No two of them, or of their pieces, fit into one packed row; eight have a rest."""
    made = []
    for row in range(12):
        beginning = [3 + 2 * row + place for place in range(LENGTH if row % 3 else 4 + row // 6)]
        rest = [40 + row + place for place in range(4 + row % 2)] if row % 3 else []
        # This rest is cut once more.
        made.append(beginning + rest + ([55, 56, 57, 58, 59] if row == 8 else []))
    return made


def largest(some: list[list[int]]) -> list[list[int]]:
    return sorted(some, reverse=True)[:SEEN]


def beginnings() -> list[list[int]]:
    return [row[:LENGTH] for row in rows()]


def pieces() -> list[list[int]]:
    return [row[begin : begin + LENGTH] for row in rows() for begin in range(0, len(row), LENGTH)]


def sft_steps(token_ids: list[list[int]], **settings: Any) -> tuple[Any, Any]:
    """Return a trainer that has trained and evaluated on some of what it packs, and a model for the formulas."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    defaults = {"packing": True, "eval_packing": True, "max_length": LENGTH, "optim": "sgd", "learning_rate": 0.5}
    defaults |= {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, "gradient_accumulation_steps": 2}
    # Some releases have the config in the fingerprint of the dataset.
    defaults |= {name: str(Path(tempfile.gettempdir(), "sft")) for name in ("output_dir", "logging_dir")}
    data = Dataset.from_dict({"input_ids": token_ids})
    with tempfile.TemporaryDirectory() as folder:
        model, copy = (tiny.llama(folder, seed=0) for _ in range(2))
        trainer = tiny.trainer(
            tiny.stepwise(SFTTrainer),
            model=model,
            args=tiny.config(SFTConfig, **{**defaults, "max_steps": 2, **settings}),
            train_dataset=data,
            eval_dataset=data,
            tokenizer=tiny.tokenizer(),
        )
        packed = {}
        for name in ("train_dataset", "eval_dataset"):
            packed[name] = getattr(trainer, name)
            order = sorted(range(len(packed[name])), key=packed[name]["input_ids"].__getitem__, reverse=True)
            setattr(trainer, name, packed[name].select(order[:SEEN]))
        factors = measure_factors(trainer)
        trainer.train()
        trainer.evaluate()
    (factor,) = factors
    for step in trainer.steps:
        step.gradients = {name: gradient / factor for name, gradient in step.gradients.items()}
    trainer.packed = packed
    return trainer, copy


def train() -> tiny.TrainingResult:
    import trl
    from packaging.version import Version

    # Before 0.24 the trainer packs in other ways too, and has no rest in any of them.
    if Version(trl.__version__) < Version("0.24"):
        return tiny.TrainingResult(absent("what is too long is cut off, or rows are not packed as such"))
    right, wrong = largest(beginnings()), largest(pieces())
    places = {tuple(row): place for some in (right, wrong) for place, row in enumerate(some)}
    assert len(places) == 2 * SEEN

    def kind(expected: list[list[int]]) -> Any:
        def row_at_its_place(row: Any) -> Any:
            of_place = expected[places[tuple(row[0])]]
            return of_place, of_place

        return row_at_its_place

    trainer, model = sft_steps(rows())
    outcome = judged_sft_steps(trainer, model, {"right": kind(right), "wrong": kind(wrong)})
    expected = sorted(beginnings() if outcome.verdict is Verdict.FIXED else pieces())
    for name, packed in trainer.packed.items():
        assert sorted(packed["input_ids"]) == expected, f"the {name} has {packed['input_ids']}"
    if outcome.verdict is Verdict.FIXED:
        check_other_data()
    # The second step is another one where the gradient of the first is halved.
    first = trainer.steps[0]
    return tiny.TrainingResult(outcome, sum(part.loss for part in first.micro_batches), first.gradients)


def check_other_data() -> None:
    """Check ``trl.pack_dataset`` with other columns, several rows in one, other processes, and a stream."""
    from datasets import Dataset
    from trl import pack_dataset

    labels = [[-token for token in row] for row in rows()]
    data = Dataset.from_dict({"input_ids": rows(), "labels": labels})
    for name, packed in {
        "one process": pack_dataset(data, 10),
        "two processes": pack_dataset(data, 10, map_kwargs={"num_proc": 2}),
        "a part": pack_dataset(data.select(range(1, 12)), 10),
        "a stream": pack_dataset(data.to_iterable_dataset(), 10),
    }.items():
        found = list(packed)
        tokens = sorted(token for row in found for token in row["input_ids"])
        given = rows()[1:] if name == "a part" else rows()
        assert tokens == sorted(token for row in given for token in row[:10]), f"{name}: {found}"
        assert all([-token for token in row["labels"]] == row["input_ids"] for row in found), name


def unaffected() -> tiny.TrainingResult:
    """Train on rows that fit, with the other strategy, and without packing."""
    with tiny.counted(ID) as counts:
        runs = {
            "rows that fit": sft_steps(beginnings())[0],
            "wrapped": sft_steps(rows(), packing_strategy="wrapped")[0],
            "no packing": sft_steps(rows(), packing=False, eval_packing=False)[0],
        }
        assert not counts().acted, "the wrapper acts"
    return tiny.result_of_runs(runs, absent("no row is too long, or it is cut in another way"))
