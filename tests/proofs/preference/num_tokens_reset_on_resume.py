"""Train three epochs with each real trainer that counts its tokens itself, and resume in the second and third epoch.

The steps have two micro-batches of unequal rows, and evaluations come at the beginning and between. The expected
numbers are the sums of the attention masks that the trainers were given, from the beginning of the whole run.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Verdict
from trl_hotfix.patches.preference.num_tokens_reset_on_resume import _counts_itself

import tiny
from tiny.data import preferences_of_several_lengths

OVERLAYS = ()
PARITY = False
VARIANTS = "The number of tokens does not depend on the model, nor on how it is trained."

STEPS_PER_EPOCH = 2
STEPS, STOPS = 3 * STEPS_PER_EPOCH, (3, 5)
METHODS = {
    **{
        method: f"trl.trainer.{method.lower()}_trainer:{method}Trainer.compute_loss" for method in ("SFT", "DPO", "KTO")
    },
    "Reward": "trl.trainer.reward_trainer:RewardTrainer.compute_loss",
    "TPO": "trl.experimental.tpo.tpo_trainer:TPOTrainer.compute_loss",
    "GRPO": "trl.trainer.grpo_trainer:GRPOTrainer._generate_and_score_completions",
}
"""The target of each method."""


@dataclass
class Run:
    """The numbers that are logged after each step and in evaluations, the tokens of each step, and the steps."""

    logged: list[float]
    tokens: list[int]
    evaluations: list[float]
    steps: list[tiny.Step]

    @property
    def result(self) -> tuple[float, dict[str, Any]]:
        """The losses of all steps together, and the gradients of the last one."""
        losses = [micro_batch.loss for step in self.steps for micro_batch in step.micro_batches]
        return sum(losses), self.steps[-1].gradients

    def check_numbers(self, before: int) -> bool:
        """Return whether the numbers go on from ``before`` tokens, and not from 0."""
        sums = [sum(self.tokens[: step + 1]) for step in range(len(self.tokens))]
        right = [before + count for count in sums]
        # There may be an evaluation before the first step.
        evaluations = [before, *right][-len(self.evaluations) :] if self.evaluations else []
        if self.logged == right and self.evaluations == evaluations:
            return True
        if self.logged == sums and self.evaluations == [number - before for number in evaluations]:
            return False
        raise AssertionError(f"logged {self.logged} and in evaluation {self.evaluations}, right {right}")


def train() -> tiny.TrainingResult:
    loss, gradients, outcomes = 0.0, {}, []
    for method in _methods():
        whole, resumed = _runs(method)
        assert whole.check_numbers(0), whole.logged
        # Every completion of GRPO's stand-in has its length.
        assert len(set(whole.tokens[:STEPS_PER_EPOCH])) > 1 or method == "GRPO", whole.tokens
        for stop, run in resumed.items():
            before, first = sum(whole.tokens[:stop]), run.tokens[0]
            is_right = run.check_numbers(before)
            outcomes.append(judge(run.logged[0], right=before + first, wrong=first))
            assert is_right == (outcomes[-1].verdict is Verdict.FIXED)
            loss += run.result[0]
            gradients |= {f"{method}.{stop}.{name}": gradient for name, gradient in run.result[1].items()}
    if not outcomes:
        return tiny.TrainingResult(absent("no trainer of this release counts tokens in an attribute"))
    verdicts = {outcome.verdict for outcome in outcomes}
    assert len(verdicts) == 1, outcomes
    return tiny.TrainingResult(outcomes[0], loss, gradients)


def unaffected() -> tiny.TrainingResult:
    """Train without a stop, and once more with the same trainer of SFT, which counts on by itself."""
    loss, gradients = 0.0, {}
    for method in _methods():
        with tempfile.TemporaryDirectory() as folder:
            trainer = _trainer(method, folder)
            runs = {"whole": _trained(trainer)}
            assert runs["whole"].check_numbers(0)
            if method == "SFT":
                runs["again"] = _trained(trainer)
                assert runs["again"].check_numbers(sum(runs["whole"].tokens))
        for name, run in runs.items():
            loss += run.result[0] + sum(run.logged)
            gradients |= {f"{method}.{name}.{key}": gradient for key, gradient in run.result[1].items()}
    return tiny.TrainingResult(absent("no run is resumed"), loss, gradients)


def _methods() -> list[str]:
    """Return the methods of this release whose trainers count the tokens themselves."""
    return [method for method in METHODS if (trainer := tiny.classes(method)[0]) and _counts_itself(trainer)]


class SaveAtStops(TrainerCallback):  # type: ignore[misc]
    """Save a checkpoint at each stop."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = state.global_step in STOPS


def _runs(method: str) -> tuple[Run, dict[int, Run]]:
    """Train a whole run, and from the checkpoint at each stop a run to the same end."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(method, folder)
        trainer.add_callback(SaveAtStops())
        whole, resumed = _trained(trainer), {}
        for stop in STOPS if method == "SFT" else STOPS[1:]:
            checkpoint = Path(folder, f"checkpoint-{stop}")
            # Old releases of transformers cannot read it with a torch as new as the bench's; nothing here is random.
            (checkpoint / "rng_state.pth").unlink()
            if stop == STOPS[0]:
                _as_without_the_patch(checkpoint / "trainer_state.json")
            # transformers has no such callback as the name of the number in the state.
            settings = {"restore_callback_states_from_checkpoint": stop == STOPS[1]}
            resumed[stop] = _trained(_trainer(method, folder, **settings), str(checkpoint))
    return whole, resumed


def _as_without_the_patch(trainer_state: Path) -> None:
    state = json.loads(trainer_state.read_text())
    state["stateful_callbacks"].pop("trl_hotfix.num_tokens", None)
    trainer_state.write_text(json.dumps(state))


def _trained(trainer: Any, checkpoint: str | None = None) -> Run:
    trainer.train(resume_from_checkpoint=checkpoint)
    (target,) = (target for method, target in METHODS.items() if isinstance(trainer, tiny.classes(method)[0] or ()))
    # The patch acts in the first call of a resumed run, if it is on.
    assert tiny.acts("num-tokens-reset-on-resume", target, trainer) in (None, int(checkpoint is not None))
    logs, count = trainer.state.log_history, len(trainer.steps)
    # The log of the checkpoint has the numbers before. An evaluation has two batches.
    logged, evaluations = ([log[name] for log in logs if name in log] for name in ("num_tokens", "eval_num_tokens"))
    return Run(
        logged[-count:],
        [sum(map(_tokens, step.micro_batches)) for step in trainer.steps],
        evaluations[len(evaluations) - len(trainer.evaluations) // 2 :],
        trainer.steps,
    )


def _tokens(micro_batch: tiny.MicroBatch) -> int:
    names = ("attention_mask", "prompt_mask", "completion_mask")
    masks = [micro_batch.inputs[name] for name in names if name in micro_batch.inputs]
    # DPO, KTO and TPO have a mask of the completions beside that of all tokens.
    return int(masks[0].sum() if "attention_mask" in micro_batch.inputs else sum(mask.sum() for mask in masks))


def _trainer(method: str, folder: str, **settings: Any) -> Any:
    """Return a trainer that evaluates before training and after each step, from 0.18.0 on."""
    from packaging.version import Version

    trainer_class, config_class = tiny.classes(method)
    settings |= {"output_dir": folder, "max_steps": STEPS, "gradient_accumulation_steps": 2}
    if method == "GRPO":
        settings |= {"num_iterations": 1, "per_device_train_batch_size": 8}
        return tiny.grpo(tiny.stepwise(trainer_class), tiny.llama(folder, seed=0), **settings)
    # Before 0.18 a step that is followed by an evaluation does not log the number.
    if Version(version("trl")) >= Version("0.18.0"):
        settings |= {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True}
    data = _data(method)
    return tiny.trainer(
        tiny.stepwise(trainer_class),
        model=_model(method, folder),
        args=tiny.config(config_class, max_length=16, **settings),
        train_dataset=data,
        eval_dataset=data.select(range(4)),
        tokenizer=tiny.tokenizer(),
        **({"ref_model": tiny.llama(folder, seed=1)} if method in ("DPO", "KTO") else {}),
    )


def _model(method: str, folder: str) -> Any:
    from transformers import AutoModelForSequenceClassification

    model = tiny.llama(folder, seed=0)
    if method != "Reward":
        return model
    import torch

    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_pretrained(f"{folder}/llama-0", num_labels=1)


def _data(method: str) -> Any:
    """Return eight rows of several lengths."""
    pairs = preferences_of_several_lengths()
    if method == "SFT":
        return pairs.map(lambda row: {"text": row["prompt"] + row["chosen"]}, remove_columns=pairs.column_names)
    if method == "KTO":
        return tiny.labelled(pairs.select(range(4)))
    if method == "TPO":
        return pairs.map(lambda row: {"reference": row["chosen"] + " w9"})
    return pairs
