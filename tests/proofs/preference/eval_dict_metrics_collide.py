"""Train two steps of size 0 with real trainers that evaluate two datasets: does each have its own metrics?

The right number of each dataset is that of an evaluation of it alone, of the same weights. With the bug there is one
number, that of the second. What ``evaluate`` returns, and callbacks are given, has the number that is logged.
"""

from __future__ import annotations

import dataclasses
import inspect
import tempfile
from dataclasses import dataclass, field
from typing import Any

from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Verdict

import tiny
from tiny.data import preferences_of_several_lengths
from tiny.grpo_runs import grpo

ID = "eval-dict-metrics-collide"
OVERLAYS = ()
PARITY = False
VARIANTS = {"lora": "the proof trains a classifier, which is made without an adapter"}

METRICS = {
    **dict.fromkeys(("DPO", "CPO"), "rewards/margins"),
    "Reward": "margin",
    "GRPO": "reward",
    "SFT": "mean_token_accuracy",
}


def train() -> tiny.TrainingResult:
    runs = [_run(name, apart=True) for name in METRICS if _logs(name)]
    outcomes = [outcome for run in runs for outcome in run.outcomes()]
    if len({outcome.verdict for outcome in outcomes}) != 1:
        raise AssertionError(f"expected outcomes of one kind: {outcomes}")
    return _result(runs, outcomes[0])


def unaffected() -> tiny.TrainingResult:
    """Evaluate one dataset."""
    runs = [_run(name, apart=False) for name in METRICS if _logs(name)]
    for run in runs:
        assert not run.acted, f"the wrapper acts: {run.name}"
        assert run.logged
    return _result(runs, absent("there is one evaluation dataset"))


@dataclass
class _Run:
    """What was logged of each evaluation, what callbacks got, and the metrics of each dataset alone."""

    name: str
    logged: list[dict[str, float]] = field(default_factory=list)
    handed: list[dict[str, float]] = field(default_factory=list)
    alone: dict[str, float] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    weights: dict[str, Any] = field(default_factory=dict)
    acted: int | None = None

    def outcomes(self) -> list[Any]:
        """Judge the number of the first dataset, in each step. The second one's is right either way."""
        metric = METRICS[self.name]
        assert abs(self.alone["easy"] - self.alone["hard"]) > 1e-3, (self.name, self.alone)
        assert len(self.logged) == len(self.handed) == 4, self.name
        found = []
        for first, second in zip(self.logged[::2], self.logged[1::2], strict=True):
            assert abs(second[f"eval_{metric}"] - self.alone["hard"]) < 1e-5, (self.name, second, self.alone)
            shown = first.get(f"eval_easy_{metric}", second[f"eval_{metric}"])
            found.append(judge(shown, right=self.alone["easy"], wrong=self.alone["hard"]))
        if found[0].verdict is Verdict.FIXED:
            for name, logs, handed in zip(("easy", "hard") * 2, self.logged, self.handed, strict=True):
                assert abs(logs[f"eval_{name}_{metric}"] - self.alone[name]) < 1e-5, (self.name, logs, self.alone)
                assert handed[f"eval_{name}_{metric}"] == logs[f"eval_{name}_{metric}"] == logs[f"eval_{metric}"]
        return found


def _logs(name: str) -> bool:
    """Return whether this release keeps lists of metrics, and those of training apart.

    Up to 0.17 SFT and GRPO take the second dataset for training.
    """
    trainer_class = tiny.classes(name)[0]
    if trainer_class is None or "log" not in vars(trainer_class):
        return False
    code = inspect.unwrap(trainer_class.log).__code__
    return "_stored_metrics" in code.co_names or ("mode" in code.co_varnames and "should_evaluate" not in code.co_names)


def _run(name: str, *, apart: bool) -> _Run:
    from transformers import TrainerCallback

    run = _Run(name)

    class Recorder(TrainerCallback):  # type: ignore[misc]
        def on_evaluate(self, *args: Any, metrics: dict[str, float], **kwargs: Any) -> None:
            run.handed.append(dict(metrics))

    trainer = _trainer(name)
    recorder = Recorder()
    trainer.add_callback(recorder)
    whole = trainer.eval_dataset
    halves = {"easy": whole.select(range(4)), "hard": whole.select(range(4, 8))}
    if apart:
        trainer.eval_dataset = halves
    trainer.train()
    trainer.remove_callback(recorder)
    history = trainer.state.log_history
    run.logged = [logs for logs in history if any(key.startswith("eval_") for key in logs)]
    run.losses = [logs["loss"] for logs in history if "loss" in logs]
    for half, dataset in halves.items():
        trainer.evaluate(dataset)
        logs = next(logs for logs in reversed(history) if "eval_loss" in logs)
        run.alone[half] = logs[f"eval_{METRICS[name]}"]
    run.weights = {f"{name} {key}": value for key, value in trainer.model.state_dict().items()}
    home = next(each for each in type(trainer).__mro__ if each.__module__.startswith("trl."))
    run.acted = tiny.acts(ID, f"{home.__module__}:{home.__name__}.log", trainer)
    return run


def _trainer(name: str) -> Any:
    from datasets import Dataset

    trainer_class, config_class = tiny.classes(name)

    class Silent(trainer_class):  # type: ignore[misc, valid-type]
        def visualize_samples(self, *args: Any) -> None:
            """Print nothing: it would compute some losses once more."""

    known = {each.name for each in dataclasses.fields(config_class)}
    strategy = "eval_strategy" if "eval_strategy" in known else "evaluation_strategy"
    settings: dict[str, Any] = {"max_steps": 2, "optim": "sgd", "learning_rate": 0.0, strategy: "steps"}
    settings |= {"eval_steps": 1, "max_length": 32, "max_prompt_length": 16}
    if name == "GRPO":
        prompts = [f"w{number} w{number + 1}" for number in range(8)]

        def reward(prompts: list[str], **kwargs: Any) -> list[float]:
            return [float(int(prompt.split()[0][1:]) > 3) + row % 2 for row, prompt in enumerate(prompts)]

        settings |= {"num_generations": 2, "beta": 0.0, "reward_funcs": reward, "prompts": prompts}
        settings |= {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, strategy: "no"}
        with tempfile.TemporaryDirectory() as folder:
            made = grpo(Silent, tiny.llama(folder, seed=0), config_class, (3, 5), **settings)
        made.eval_dataset = made.train_dataset
        setattr(made.args, strategy, "steps")
        return made
    pairs = list(preferences_of_several_lengths())
    data = [{"text": pair["prompt"] + pair["chosen"]} for pair in pairs] if name == "SFT" else pairs
    if name == "SFT":
        # The untrained model gets none of the others right.
        data[0] = {"text": "w1 w1 w1 w1 w1 w1"}
    with tempfile.TemporaryDirectory() as folder:
        model = _classifier() if name == "Reward" else tiny.llama(folder, seed=0)
        reference = {"ref_model": tiny.llama(folder, seed=1)} if name == "DPO" else {}
    vocabulary = tiny.tokenizer()
    vocabulary.bos_token = "<unk>"
    return tiny.trainer(
        Silent,
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


def _result(runs: list[_Run], outcome: Any) -> tiny.TrainingResult:
    weights = {key: value for run in runs for key, value in run.weights.items()}
    return tiny.TrainingResult(outcome, sum(loss for run in runs for loss in run.losses), weights)
