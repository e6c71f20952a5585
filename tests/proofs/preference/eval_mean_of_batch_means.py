"""Evaluate nine rows in batches of one, two and eight with real trainers that keep one mean for each batch.

A batch of one row has that row's metrics, so the right number is their mean, in double precision. With the bug it is
the mean of the batch means. GRPO evaluates nine groups of two completions. The token accuracy of SFT is the
mean over the labels. Two processes evaluate the nine pairs of DPO in batches of two, where the last
batch has one pair and three that are there twice.
"""

from __future__ import annotations

import inspect
import tempfile
from dataclasses import dataclass, field
from typing import Any

from trl_hotfix.authoring import absent, judge

import tiny
from tiny.data import preferences_of_several_lengths
from tiny.two_ranks import on_two_ranks

ID = "eval-mean-of-batch-means"
OVERLAYS = ()
PARITY = False

METRICS = {
    **dict.fromkeys(
        ("DPO", "CPO", "TPO"),
        ("rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected"),
    ),
    "Reward": ("mean_reward", "margin"),
    "GRPO": ("reward",),
    "SFT": ("mean_token_accuracy",),
}
ROWS, SIZES = 9, (1, 2, 8)


def train() -> tiny.TrainingResult:
    runs = {name: _run(name) for name in _methods()}
    outcomes = [outcome for run in runs.values() for outcome in run.outcomes()]
    for name in runs:
        if name == "DPO" and _gathers(name):
            outcomes += _of_two_ranks(name)
    if len({outcome.verdict for outcome in outcomes}) != 1:
        raise AssertionError(f"expected outcomes of one kind: {outcomes}")
    return _result(runs, outcomes[0])


def unaffected() -> tiny.TrainingResult:
    """Evaluate eight rows in whole batches."""
    runs = {name: _run(name, rows=8) for name in _methods() if name in ("DPO", "Reward", "GRPO")}
    for name, run in runs.items():
        assert not run.acted, f"the wrapper acts: {name}"
    return _result(runs, absent("all batches have as many rows"))


@dataclass
class _Run:
    """What was logged of each size of a batch, and the metrics of the rows with their labels."""

    name: str
    logged: dict[int, dict[str, float]] = field(default_factory=dict)
    of_rows: dict[str, list[float]] = field(default_factory=dict)
    labels: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Any] = field(default_factory=dict)
    acted: int | None = None

    def right(self, metric: str) -> float:
        weights = self.labels or [1] * len(self.of_rows[metric])
        return sum(w * v for w, v in zip(weights, self.of_rows[metric], strict=True)) / sum(weights)

    def wrong(self, metric: str, size: int) -> float:
        values = self.of_rows[metric]
        weights = self.labels or [1] * len(values)
        means = []
        for start in range(0, len(values), size):
            part = slice(start, start + size)
            means.append(sum(w * v for w, v in zip(weights[part], values[part], strict=True)) / sum(weights[part]))
        return sum(means) / len(means)

    def outcomes(self) -> list[Any]:
        found = []
        for size in SIZES:
            for metric in METRICS[self.name]:
                right, wrong = self.right(metric), self.wrong(metric, size)
                if abs(right - wrong) > 1e-4:
                    found.append(judge(_named(self.logged[size], metric), right=right, wrong=wrong))
                else:
                    assert abs(_named(self.logged[size], metric) - right) < 1e-5, (self.name, size, metric)
        assert found, self.name
        return found


def _named(logs: dict[str, float], metric: str) -> float:
    """Return a metric of an evaluation. Up to 0.17 one apart from training has the names of training."""
    return logs.get(f"eval_{metric}", logs.get(metric))  # type: ignore[return-value]


def _methods() -> list[str]:
    return [name for name in METRICS if _logs(name)]


def _logs(name: str) -> bool:
    """Return whether this release keeps lists of metrics, and those of training apart."""
    trainer_class = tiny.classes(name)[0]
    if trainer_class is None or "log" not in vars(trainer_class):
        return False
    return _stores(name) or "mode" in inspect.unwrap(trainer_class.log).__code__.co_varnames


def _stores(name: str) -> bool:
    return "_stored_metrics" in inspect.unwrap(tiny.classes(name)[0].log).__code__.co_names


def _gathers(name: str) -> bool:
    """Return whether this release has the metrics of all ranks."""
    trainer_class = tiny.classes(name)[0]
    methods = (
        getattr(trainer_class, each, None) for each in ("get_batch_loss_metrics", "_compute_loss", "compute_loss")
    )
    return any("gather" in str(inspect.unwrap(each).__code__.co_names) for each in methods if each)


def _run(name: str, rows: int = ROWS) -> _Run:
    """Train a step, and evaluate so many rows in batches of each size."""
    import torch

    run = _Run(name)
    trainer = _trainer(name, rows, run)
    with torch.random.fork_rng():
        trainer.train()
    run.losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    run.gradients = {f"{name} {key}": value for key, value in trainer.model.state_dict().items()}
    per_row = 2 if name == "GRPO" else 1
    for size in SIZES:
        run.logged[size] = _evaluate(trainer, size * per_row, run if size == 1 else None)
    run.acted = tiny.acts(ID, f"{_home(trainer)}.log", trainer)
    return run


def _home(trainer: Any) -> str:
    trainer_class = next(each for each in type(trainer).__mro__ if each.__module__.startswith("trl."))
    return f"{trainer_class.__module__}:{trainer_class.__name__}"


def _trainer(name: str, rows: int, run: _Run) -> Any:
    from datasets import Dataset

    trainer_class, config_class = tiny.classes(name)

    class Noting(trainer_class):  # type: ignore[misc,valid-type]
        noted: Any = None

        def visualize_samples(self, *args: Any) -> None:
            """Print nothing: it would compute some losses once more."""

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if self.noted and name == "SFT":
                self.noted.labels.append(int((inputs["labels"][:, 1:] != -100).sum()))
            return super().compute_loss(model, inputs, *args, **kwargs)

        def log(self, logs: Any, *args: Any, **kwargs: Any) -> None:
            if self.noted and "eval_loss" in logs:
                lists = [self._stored_metrics["eval"]] if hasattr(self, "_stored_metrics") else self._metrics.values()
                for metrics in lists:
                    for key, values in metrics.items():
                        if len(values) == rows:
                            self.noted.of_rows[key.removeprefix("eval_")] = [float(value) for value in values]
            super().log(logs, *args, **kwargs)

    settings: dict[str, Any] = {
        "max_steps": 1,
        "optim": "sgd",
        "learning_rate": 0.1,
        "max_length": 32,
        "max_prompt_length": 16,
    }
    if name == "GRPO":
        from tiny.grpo_runs import grpo

        prompts = [f"w{number} w{number + 1}" for number in range(rows)]
        settings |= {
            "num_generations": 2,
            "beta": 0.0,
            "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 2,
        }

        def reward(prompts: list[str], **kwargs: Any) -> list[float]:
            return [float(int(prompt.split()[0][1:]) ** 2 % 7 + row % 2) for row, prompt in enumerate(prompts)]

        settings |= {"reward_funcs": reward, "prompts": prompts}
        with tempfile.TemporaryDirectory() as folder:
            made = grpo(Noting, tiny.llama(folder, seed=0), config_class, (3, 5), **settings)
        made.eval_dataset = made.train_dataset
        return made
    pairs = list(preferences_of_several_lengths())
    pairs = [*pairs, {"prompt": "w9 w3", "chosen": " w7 w8 w1", "rejected": " w5"}][:rows]
    if name == "TPO":
        pairs = [{**pair, "reference": pair["chosen"] + " w2"} for pair in pairs]
    vocabulary = tiny.tokenizer()
    vocabulary.bos_token = "<unk>"
    data = [{"text": pair["prompt"] + pair["chosen"]} for pair in pairs] if name == "SFT" else pairs
    with tempfile.TemporaryDirectory() as folder:
        model = _classifier() if name == "Reward" else tiny.llama(folder, seed=0)
        reference = {"ref_model": tiny.llama(folder, seed=1)} if name == "DPO" else {}
    return tiny.trainer(
        Noting,
        model=model,
        args=tiny.config(config_class, **{"dataset_text_field": "text", "max_seq_length": 32, **settings}),
        train_dataset=Dataset.from_list(data),
        eval_dataset=Dataset.from_list(data),
        tokenizer=vocabulary,
        **reference,
    )


def _classifier() -> Any:
    import torch
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=64, pad_token_id=0, num_labels=1, **sizes)
    return transformers.LlamaForSequenceClassification(config)


def _of_two_ranks(name: str) -> list[Any]:
    """Judge the metrics of two ranks with batches of two, by those of the rows in one process."""
    alone = _Run(name)
    _evaluate(_trainer(name, ROWS, alone), 1, alone)
    logged, _ = on_two_ranks(lambda: _evaluate(_trainer(name, ROWS, _Run(name)), 2, None))
    found = []
    for metric in METRICS[name]:
        values = alone.of_rows[metric]
        # What stores metrics has left out the rows that are there twice.
        last = values[8:] if _stores(name) else [values[8], *values[:3]]
        means = [sum(part) / len(part) for part in (values[:4], values[4:8], last)]
        found.append(judge(_named(logged, metric), right=alone.right(metric), wrong=sum(means) / 3))
    return found


def _evaluate(trainer: Any, size: int, noted: _Run | None) -> dict[str, float]:
    """Return what is logged of an evaluation in batches of this size."""
    trainer.args.per_device_eval_batch_size, trainer.noted = size, noted
    trainer.evaluate()
    logs: dict[str, float] = next(each for each in reversed(trainer.state.log_history) if "eval_loss" in each)
    return logs


def _result(runs: dict[str, _Run], outcome: Any) -> tiny.TrainingResult:
    gradients = {key: value for run in runs.values() for key, value in run.gradients.items()}
    return tiny.TrainingResult(outcome, sum(loss for run in runs.values() for loss in run.losses), gradients)
