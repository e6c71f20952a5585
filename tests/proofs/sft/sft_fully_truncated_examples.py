"""Train two steps of two micro-batches, and evaluate, with SFT on pairs of which some prompts fill max_length.

Losses and gradients are compared with the cross-entropy of the rows that have a label left (right) and of all rows
(wrong), each cut at ``max_length``. The rows are read in order. Their tokens are made without TRL.
"""

from __future__ import annotations

import tempfile
from typing import Any

import trl_hotfix
from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Verdict

import tiny
from tiny import sft_steps

ID, TARGET = "sft-fully-truncated-examples", "trl.trainer.sft_trainer:SFTTrainer._prepare_dataset"
OVERLAYS = ()
PARITY = True
DATA = True
MUTANTS_ON = ("1.3.0",)
EQUIVALENT = {"applied twice": "the outer wrapper finds no row to drop, and returns what it is given"}
VARIANTS = "the data are prepared before the model is compiled, and whatever part of it is trained"

LIMIT, BATCH, EOS = 6, 2, 1


def pairs(*, long: bool = True) -> list[dict[str, str]]:
    """Return twelve pairs. Of every third the prompt has six words or seven, and of others five or fewer."""
    made = []
    for index in range(12):
        words = 6 + index % 2 if long and index % 3 == 1 else 2 + index % 4
        prompt = " ".join(f"w{(11 * index + place) % 50}" for place in range(words))
        completion = " ".join(f"w{(7 * index + 3 * place) % 50}" for place in range(2 + index % 3))
        made.append({"prompt": prompt, "completion": f" {completion}"})
    return made


def labelled(rows: list[dict[str, str]], kept: slice) -> list[sft_steps.Row]:
    """Return token ids and labels of rows, cut, with an end of sequence."""
    words = tiny.tokenizer()
    made = []
    for row in rows:
        prompt, completion = (words(row[name])["input_ids"] for name in ("prompt", "completion"))
        completion = [*completion, EOS]
        made.append(((prompt + completion)[kept], ([-100] * len(prompt) + completion)[kept]))
    return made


def with_label(rows: list[sft_steps.Row]) -> list[sft_steps.Row]:
    return [(ids, labels) for ids, labels in rows if any(label != -100 for label in labels)]


def steps(rows: list[dict[str, str]], *, data_collator: Any = None, **settings: Any) -> tuple[Any, Any]:
    """Return a trainer that has trained two steps of two micro-batches and evaluated, and a model for the formulas."""
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from trl import SFTConfig, SFTTrainer

    class InOrder(tiny.stepwise(SFTTrainer)):  # type: ignore[misc]
        def _get_train_sampler(self, *args: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    defaults = {"gradient_accumulation_steps": 2, "max_steps": 2, "max_length": LIMIT, **folders()}
    defaults |= {"optim": "sgd", "learning_rate": 0.5}
    with tempfile.TemporaryDirectory() as folder:
        model, copy = (tiny.llama(folder, seed=0) for _ in range(2))
        trainer = tiny.trainer(
            InOrder,
            model=model,
            args=tiny.config(SFTConfig, **{**defaults, **settings}),
            data_collator=data_collator,
            train_dataset=Dataset.from_list(rows),
            eval_dataset=Dataset.from_list(rows[:6]),
            tokenizer=tiny.tokenizer(),
        )
        trainer.train()
        trainer.evaluate()
    return trainer, copy


def folders() -> dict[str, Any]:
    # The arguments go into the fingerprints of the data.
    return dict.fromkeys(("output_dir", "logging_dir"), f"{tempfile.gettempdir()}/truncated")


def judged(trainer: Any, model: Any, trained: dict[str, list[sft_steps.Row]], evaluated: dict[str, Any]) -> Any:
    """Judge the losses and gradients of all steps and the losses of the evaluation by the rows of each kind, in order.

    ``trained`` and ``evaluated`` are the rows that are right, and those that are wrong.
    """
    outcomes, number = [], 0
    assert len(trainer.steps) == 2
    for step in trainer.steps:
        batches = {name: batches_of(rows)[number : number + 2] for name, rows in trained.items()}
        counts = {name: sum(sft_steps.labels_in(rows) for rows in kind) for name, kind in batches.items()}
        model.load_state_dict(step.weights)
        for place, micro_batch in enumerate(step.micro_batches):
            losses = {name: loss_of([batches[name][place]], counts[name])(model).item() for name in counts}
            outcomes.append(judge(micro_batch.loss, **losses))
        differences = {
            name: step.difference(tiny.expected_gradients(model, step.weights, loss_of(batches[name], counts[name])))
            for name in counts
        }
        verdicts = {"right": Verdict.FIXED, "wrong": Verdict.REPRODUCED}
        assert [verdicts[name] for name in counts if differences[name] < 1e-5] == [outcomes[-1].verdict], differences
        number += 2
    model.load_state_dict(trainer.model.state_dict())
    for place, evaluation in enumerate(trainer.evaluations):
        losses = {}
        for name, rows in evaluated.items():
            batch = batches_of(rows)[place % len(batches_of(rows))]
            losses[name] = float(sft_steps.cross_entropy(model, batch) / sft_steps.labels_in(batch))
        outcomes.append(judge(evaluation.loss, **losses))
    assert {outcome.verdict for outcome in outcomes} == {outcomes[0].verdict}, outcomes
    expected = {Verdict.FIXED: "right", Verdict.REPRODUCED: "wrong"}[outcomes[0].verdict]
    assert len(trainer.evaluations) == len(batches_of(evaluated[expected]))
    return outcomes[0]


def loss_of(batches: list[list[sft_steps.Row]], count: int) -> Any:
    return lambda model: sum(sft_steps.cross_entropy(model, rows) for rows in batches) / count


def batches_of(rows: list[sft_steps.Row]) -> list[list[sft_steps.Row]]:
    return [rows[begin : begin + BATCH] for begin in range(0, len(rows), BATCH)]


def train() -> tiny.TrainingResult:
    from trl.trainer import sft_trainer

    fields = getattr(getattr(sft_trainer, "DataCollatorForLanguageModeling", None), "__dataclass_fields__", {})
    if "completion_only_loss" not in fields and "padding_free" not in fields:
        return tiny.TrainingResult(absent("there is no loss of the completion alone"))
    trainer, model = steps(pairs())
    rows = [labelled(given, slice(LIMIT)) for given in (pairs(), pairs()[:6])]
    trained, evaluated = ({"right": with_label(kind), "wrong": kind} for kind in rows)
    outcome = judged(trainer, model, trained, evaluated)
    assert len(trainer.train_dataset) == len(trained["right" if outcome.verdict is Verdict.FIXED else "wrong"])
    if trl_hotfix.status()[ID].state.value == "applied":
        check_other_data()
    return tiny.result_of_runs({"pairs": trainer}, outcome)


def check_other_data() -> None:
    """Check several datasets, worker processes, a stream, and the answers of conversations."""
    from trl import SFTConfig

    limit = {"max_length": LIMIT, "max_seq_length": LIMIT}
    expected = [ids for ids, _ in with_label(labelled(pairs(), slice(LIMIT)))]
    splits = {"eval_dataset": {"first": pairs(), "second": pairs()[3:]}}
    for options in ({"dataset_num_proc": 2}, {"streaming": True}):
        run = tiny.sft_step(pairs(), trainer_arguments=splits, **limit, **options)
        first, second = run.trainer.eval_dataset.values()
        for prepared, ids in ((run.trainer.train_dataset, expected), (first, expected), (second, expected[2:])):
            # The collator of some releases cuts.
            found = [row["input_ids"][:LIMIT] for row in prepared]
            assert found == ids, f"prepared are {found}, and not {ids}"
    if "assistant_only_loss" not in SFTConfig.__dataclass_fields__:
        return
    template = (
        "{% for message in messages %}{% if message['role'] == 'user' %}{{ 'w58 ' + message['content'] + ' ' }}"
        "{% else %}{% generation %}{{ 'w59 ' + message['content'] + ' ' }}{% endgeneration %}{% endif %}{% endfor %}"
    )
    chats = [
        {
            "messages": [
                {"role": "user", "content": pair["prompt"]},
                {"role": "assistant", "content": pair["completion"].strip()},
            ]
        }
        for pair in pairs()
    ]
    settings: dict[str, Any] = {"words": tiny.chat_tokenizer(template), "assistant_only_loss": True}
    run = tiny.sft_step(chats, **limit, **settings)
    # The role is a token more.
    questions = [pair["prompt"] for pair in pairs() if len(pair["prompt"].split()) < LIMIT - 1]
    assert len(run.trainer.train_dataset) == len(questions)


def unaffected() -> tiny.TrainingResult:
    """Train on short prompts, on all tokens, without a limit, on the ends of rows, packed, and with a collator."""
    from trl import SFTConfig
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    runs = {
        "short": steps(pairs(long=False))[0],
        "all tokens": steps(pairs(), completion_only_loss=False)[0],
        "no limit": steps(pairs(), max_length=None)[0],
        "packed": steps(pairs() * 4, packing=True, packing_strategy="wrapped", max_length=16)[0],
        "collator": steps(pairs(), data_collator=DataCollatorForLanguageModeling(pad_token_id=0))[0],
    }
    if "truncation_mode" in SFTConfig.__dataclass_fields__:
        runs["end"] = steps(pairs(), truncation_mode="keep_end")[0]
    for name, run in runs.items():
        assert not tiny.acts(ID, TARGET, run), f"the wrapper acts: {name}"
    return tiny.result_of_runs(runs, absent("each row has a label"))
