"""The proof: two processes train two steps of two micro-batches with the real SFTTrainer, on rows of unequal lengths.

The expected loss of a step is the cross-entropy of all tokens of both processes, divided by their number, one sequence
at a time and without TRL's code; the expected gradients are those of that loss. The wrong loss is the mean of what the
two give, each divided by its own number. This process is rank 0, so that what acts is seen; rank 1 is a fork of it.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Verdict

import tiny
from tiny import gkd_steps
from tiny.sft_steps import cross_entropy, labels_in, rows_of
from tiny.two_ranks import RANKS, on_two_ranks

ID = "sft-tokens-weighted-per-rank"
TARGET = "trl.trainer.sft_trainer:SFTTrainer.__init__"

OVERLAYS = ()
PARITY = True
EQUIVALENT = {
    'divide_by_the_mean_count: `if getattr(trainer.args, "world_size", 1) > 1 and _is_sft(trainer):` -> '
    '`if getattr(trainer.args, "world_size", 0) > 1 and _is_sft(trainer):`': "neither is more than one rank",
}
VARIANTS = "a count is changed before the model is called, whatever part of it is compiled or trained"

# The longest rows of all micro-batches are equally long: 0.15.0 gathers its predictions as they are, and fails if not.
LENGTHS = (2, 14, 13, 14, 3, 14, 12, 14, 14, 9, 14, 4, 14, 12, 14, 2)
ROWS = [
    {"text": " ".join(f"w{(7 * row + place) % 60}" for place in range(n)) + " <eos>"} for row, n in enumerate(LENGTHS)
]


def trained(*, counted: bool = True, **settings: Any) -> Any:
    """Return a trainer that has trained and evaluated on this rank. The model is given no count without ``counted``."""
    import torch
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    class InOrder(SFTTrainer):  # type: ignore[misc, valid-type]
        # Releases of accelerate shuffle differently.
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 2}
    # 0.15 makes the config a part of the fingerprint of the dataset, so folders must not have new names each time.
    sizes |= {name: str(Path(tempfile.gettempdir(), "sft")) for name in ("output_dir", "logging_dir")}
    sizes |= {"max_seq_length": 32, "max_length": 32}
    with tempfile.TemporaryDirectory() as folder:
        trainer = tiny.trainer(
            tiny.stepwise(InOrder),
            model=tiny.llama(folder, seed=0),
            args=tiny.config(
                SFTConfig, **{"dataset_text_field": "text", "optim": "sgd", "learning_rate": 0.5, **sizes, **settings}
            ),
            train_dataset=Dataset.from_list(ROWS),
            eval_dataset=Dataset.from_list(ROWS[1:5]),
            tokenizer=tiny.tokenizer(),
        )
        trainer.model_accepts_loss_kwargs &= counted
        trainer.train()
        trainer.evaluate()
    return trainer


def recorded(**settings: Any) -> dict[str, Any]:
    """Return the steps and the evaluations of this rank, and in how many calls of the constructor the patch acted."""
    trainer = trained(**settings)
    weights = {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}
    acted = tiny.acts(ID, TARGET, trainer)
    return {"steps": trainer.steps, "evaluations": trainer.evaluations, "weights": weights, "acted": acted}


def train() -> tiny.TrainingResult:
    from transformers import Trainer

    if "num_items_in_batch" not in inspect.signature(Trainer.training_step).parameters:
        return tiny.TrainingResult(absent("this transformers divides by no count"))
    ranks = on_two_ranks(recorded)
    with tempfile.TemporaryDirectory() as folder:
        model = tiny.llama(folder, seed=0)
    outcomes = [judged_step(model, steps) for steps in zip(*(rank["steps"] for rank in ranks), strict=True)]
    if len(outcomes) != 2 or len({outcome.verdict for outcome in outcomes}) != 1:
        raise AssertionError(f"expected two steps of one kind: {outcomes}")
    for rank in ranks:
        assert rank["acted"] in (None, int(outcomes[0].verdict is Verdict.FIXED)), rank["acted"]
        check_evaluation(model, rank)
    return result_of(ranks, outcomes[0])


def judged_step(model: Any, steps: tuple[tiny.Step, ...]) -> Any:
    """Judge the losses and the gradients of an optimizer step, in which each rank has two micro-batches."""
    import transformers
    from packaging.version import Version

    rows = [[rows_of(one.inputs) for one in step.micro_batches] for step in steps]
    assert [len(micro_batches) for micro_batches in rows] == [2, 2]
    # Up to transformers 5.10.0 the count has the first token of each row.
    first = int(Version(transformers.__version__) > Version("5.10.0"))
    counts = [sum(labels_in(part, first) for part in micro_batches) for micro_batches in rows]
    assert counts[0] != counts[1]

    def loss(divisors: Mapping[int, float], model: Any) -> Any:
        return sum(cross_entropy(model, part) / divisors[rank] for rank in divisors for part in rows[rank])

    divisors = {
        "right": dict.fromkeys(range(RANKS), sum(counts)),
        "wrong": {rank: RANKS * count for rank, count in enumerate(counts)},
    }
    model.load_state_dict(steps[0].weights)
    losses = {name: float(loss(chosen, model).detach()) for name, chosen in divisors.items()}
    outcome = judge(sum(one.loss for step in steps for one in step.micro_batches) / RANKS, **losses)
    chosen = divisors["right" if outcome.verdict is Verdict.FIXED else "wrong"]
    expected = tiny.expected_gradients(model, steps[0].weights, lambda model: loss(chosen, model))
    for rank, step in enumerate(steps):
        difference = step.difference(expected)
        assert difference < 1e-6, f"on rank {rank} the gradients differ by {difference}"
        for one, part in zip(step.micro_batches, rows[rank], strict=True):
            right = RANKS * float(cross_entropy(model, part).detach()) / chosen[rank]
            assert abs(one.loss - right) < 1e-5, f"on rank {rank} a micro-batch has the loss {one.loss}: not {right}"
    return outcome


def check_evaluation(model: Any, rank: Mapping[str, Any]) -> None:
    """Check that the loss of an evaluation is the mean of its batch, where no count is handed over."""
    model.load_state_dict(rank["weights"])
    assert rank["evaluations"]
    for one in rank["evaluations"]:
        if one.keywords.get("num_items_in_batch") is None:
            rows = rows_of(one.inputs)
            right = float(cross_entropy(model, rows).detach()) / labels_in(rows)
            assert abs(one.loss - right) < 1e-5, f"an evaluation has the loss {one.loss}: not {right}"


def result_of(ranks: list[dict[str, Any]], outcome: Any) -> tiny.TrainingResult:
    """Return the mean loss of the ranks, of all steps, and the gradients of all steps on rank 0."""
    losses = [one.loss for rank in ranks for step in rank["steps"] for one in step.micro_batches]
    return tiny.TrainingResult(outcome, sum(losses) / RANKS, named_gradients(ranks[0]["steps"]))


def named_gradients(steps: list[tiny.Step]) -> dict[str, Any]:
    return {f"{number} {name}": value for number, step in enumerate(steps) for name, value in step.gradients.items()}


def gkd() -> dict[str, Any]:
    """Return the losses and the gradients of GKD on this rank."""
    rows = [(f"w{row} w{row + 1}", gkd_steps.words(row, 2 + row % 5)) for row in range(16)]
    run = gkd_steps.gkd_steps(lambda batch, divergence, items: {"sum": divergence.sum()}, rows)
    return {"losses": [one.loss for one in run.micro_batches], "gradients": run.gradients}


def unaffected() -> tiny.TrainingResult:
    """Train on one rank, and on two: with the counts summed already, with a model that takes no count, and GKD."""
    outcome = absent("whom it does not hit")
    runs = {
        "one rank": result_of([recorded()], outcome),
        "summed": result_of(on_two_ranks(lambda: recorded(average_tokens_across_devices=True)), outcome),
        "no count": result_of(on_two_ranks(lambda: recorded(counted=False)), outcome),
    }
    of_gkd, _ = on_two_ranks(gkd)
    gradients = {f"{name} {key}": value for name, run in runs.items() for key, value in run.gradients.items()}
    for number, step in enumerate(of_gkd["gradients"]):
        gradients |= {f"GKD {number} {key}": value for key, value in step.items()}
    losses = [*(run.loss for run in runs.values()), *of_gkd["losses"]]
    return tiny.TrainingResult(outcome, sum(losses), gradients)
