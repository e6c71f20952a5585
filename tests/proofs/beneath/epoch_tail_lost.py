"""Train two epochs of 15 micro-batches with SFT and DPO, four a step: 30 micro-batches in eight steps.

Each step has its own micro-batches, and its gradient is the sum of theirs as the trainer computes them. transformers
reads 14 in the first epoch, adds two of them to the first step of the second one, and ends after six steps.
"""

from __future__ import annotations

import tempfile
from typing import Any

from trl_hotfix.authoring import absent, judge
from trl_hotfix.matching.versions import in_range

import tiny
from tiny.gkd_steps import words

ID = "epoch-tail-lost"
OVERLAYS = ()
PARITY = False
VARIANTS = "The micro-batches do not depend on the model, nor on how it is trained."

METHODS = ("SFT", "DPO")
RIGHT, WRONG = [4, 4, 4, 3] * 2, [4, 4, 4, 6, 4, 4]


def train() -> tiny.TrainingResult:
    import transformers

    if not in_range(transformers.__version__, ">=4.49,<4.52"):
        return tiny.TrainingResult(absent("this transformers counts right, or within its loop"))
    runs, trained = {}, 0
    for method in METHODS:
        run = run_of(method)
        of_steps = [len(step.micro_batches) for step in run.steps]
        assert of_steps in (RIGHT, WRONG), of_steps
        is_right = of_steps == RIGHT
        assert run.state.global_step == run.state.max_steps == (8 if is_right else 6)
        # The learning rate falls by the number of steps.
        rates = [entry["learning_rate"] for entry in run.state.log_history if "learning_rate" in entry]
        assert all(abs(rates[0] - rate) > 0 for rate in rates[1:])
        if is_right:
            seen = [part.inputs for step in run.steps for part in step.micro_batches]
            first, second = (sorted(map(_rows, half)) for half in (seen[:15], seen[15:]))
            assert first == second, "the epochs have other rows"
        acts = [tiny.acts(ID, f"trl.trainer.{method.lower()}_trainer:{method}Trainer.{name}", run) for name in NAMES]
        assert acts in ([None, None], [2, 1]), f"{method}: it acts {acts} times"
        trained += sum(of_steps)
        runs[method] = run
    return tiny.result_of_runs(runs, judge(trained, right=2 * sum(RIGHT), wrong=2 * sum(WRONG)))


NAMES = ("get_batch_samples", "set_initial_training_values")


def unaffected() -> tiny.TrainingResult:
    """Train an epoch whose steps are full, one without accumulation, and a number of steps within an epoch."""
    runs = {}
    for method in METHODS:
        for name, settings in {
            "full": {"gradient_accumulation_steps": 5},
            "alone": {"gradient_accumulation_steps": 1},
        }.items():
            run = run_of(method, **settings)
            for target in NAMES:
                assert not tiny.acts(ID, f"trl.trainer.{method.lower()}_trainer:{method}Trainer.{target}", run), name
            runs[f"{method} {name}"] = run
    return tiny.result_of_runs(runs, absent("the micro-batches of an epoch fill its steps"))


def _rows(inputs: dict[str, Any]) -> list[Any]:
    """Return the tokens of a micro-batch, without its padding, which depends on the other row."""
    return sorted(
        [token for token in row if token]
        for name in inputs
        if name.endswith("input_ids")
        for row in inputs[name].tolist()
    )


def run_of(method: str, **settings: Any) -> Any:
    from datasets import Dataset
    from torch.utils.data import SequentialSampler

    trainer_class, config_class = tiny.classes(method)

    class InOrder(tiny.stepwise(trainer_class)):  # type: ignore[misc]
        def _get_train_sampler(self, *args: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    rows = [{"text": words(number, 3 + number % 6)} for number in range(30)]
    if method == "DPO":
        rows = [
            {"prompt": words(number, 2), "chosen": f" {words(number, 3)}", "rejected": f" {words(number + 9, 2)}"}
            for number in range(30)
        ]
    with tempfile.TemporaryDirectory() as folder:
        trainer = tiny.trainer(
            InOrder,
            model=tiny.llama(folder, seed=0),
            args=tiny.config(
                config_class,
                **{
                    "max_steps": -1,
                    "num_train_epochs": 2,
                    "gradient_accumulation_steps": 4,
                    "lr_scheduler_type": "linear",
                    "learning_rate": 0.1,
                    "optim": "sgd",
                    "max_length": 32,
                    **settings,
                },
            ),
            train_dataset=Dataset.from_list(rows),
            tokenizer=tiny.tokenizer(),
            **({"ref_model": tiny.llama(folder, seed=1)} if method == "DPO" else {}),
        )
        trainer.train()
    return trainer
