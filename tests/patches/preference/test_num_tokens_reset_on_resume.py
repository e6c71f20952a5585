"""A resumed run logs the tokens of the whole run, and a run that is not resumed its own, whichever trainer counts."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainerState

from trl_hotfix.testing import (
    SftMoeStep,
    dpo_stub,
    metrics_by_mode,
    scored_completions,
    stub_that_scores,
    tiny_causal_lm,
)

import tiny

ID, NAME = "num-tokens-reset-on-resume", "trl_hotfix.num_tokens"

TARGETS = {
    **{name: f"trl.trainer.{name.lower()}_trainer:{name}Trainer.compute_loss" for name in ("SFT", "DPO", "KTO")},
    "Reward": "trl.trainer.reward_trainer:RewardTrainer.compute_loss",
    "TPO": "trl.experimental.tpo.tpo_trainer:TPOTrainer.compute_loss",
    "GRPO": "trl.trainer.grpo_trainer:GRPOTrainer._generate_and_score_completions",
}

LENGTHS = ((4, 3), (2, 5, 3, 5))
"""Of the rows of two micro-batches."""

LOGS = [
    {"num_tokens": 30.0},
    {"num_tokens": 50.0},
    {"num_tokens": 70.0},
    {"eval_num_tokens": 70.0},
    {"train_runtime": 1.0},
]
"""Of a checkpoint that was written without the patch, 70 tokens after the beginning."""


class Run:
    """A trainer with the state of its run. ``tokens``: how many its micro-batches 0 and 1 have."""

    def __init__(self, method: str, state: Any) -> None:
        self.module = importlib.import_module(TARGETS[method].partition(":")[0])
        self.method, self.tokens = method, (9, 9) if method == "GRPO" else tuple(map(sum, LENGTHS))
        self.trainer, self.compute = self._stub()
        self.trainer.state = state

    def logged(self, number: int, training: bool = True) -> float:
        """Compute a micro-batch, and return the ``num_tokens`` that is logged."""
        self.computed(number, training)
        (logged,) = self.trainer._metrics["train" if training else "eval"]["num_tokens"]
        return float(logged)

    def computed(self, number: int, training: bool = True) -> Any:
        """Compute a micro-batch, and return what the trainer returns."""
        self.trainer.model.train(training)
        self.trainer.control.should_evaluate = not training
        return self.compute(number)

    def saved(self) -> str:
        """Return the state as a checkpoint has it."""
        return json.dumps(asdict(self.trainer.state))

    @property
    def acts(self) -> int | None:
        return tiny.acts(ID, TARGETS[self.method], self.trainer)

    def _stub(self) -> tuple[Any, Callable[[int], Any]]:
        if self.method == "GRPO":
            # The prompt of each completion has two tokens.
            scoring = stub_that_scores(self.module, [[5, 6, 1], [7, 1]], [1.0, 2.0])
            return scoring, lambda number: scored_completions(scoring)
        attributes: dict[str, Any] = {"control": SimpleNamespace(), "_total_train_tokens": 0, "_tp_size": 1}
        if self.method == "SFT":
            step = SftMoeStep(self.module, 0.0, aux_loss_enabled=False, **attributes)
            trainer, model = step.trainer, step.model
        else:
            config = SimpleNamespace()
            config.get_text_config = lambda: config
            model = tiny_causal_lm(config)
            attributes |= {"loss_types": ["sigmoid"], "loss_weights": [1.0], "precompute_ref_logps": False}
            attributes |= {"calculate_KL": False, "tpo_alpha": 0.0, "_metrics": metrics_by_mode()}
            attributes |= {"loss_type": "apo_zero_unpaired"} if self.method == "KTO" else {}
            trainer = dpo_stub(self.module, self.method, model=model, ref_model=tiny_causal_lm(), **attributes)
        if self.method == "Reward":
            model.forward = lambda input_ids, **kwargs: SimpleNamespace(
                logits=model.weight[input_ids].mean((1, 2))[:, None]
            )
        batches = [micro_batch(lengths, self.method) for lengths in LENGTHS]
        return trainer, lambda number: trainer.compute_loss(model, dict(batches[number]))


def micro_batch(lengths: Sequence[int], method: str) -> dict[str, Any]:
    places = torch.arange(max(lengths)).expand(len(lengths), -1)
    attention_mask = (places < torch.tensor(lengths)[:, None]).long()
    batch = {"input_ids": (places + 1) * attention_mask, "attention_mask": attention_mask}
    if method == "SFT":
        batch["labels"] = batch["input_ids"].masked_fill(attention_mask == 0, -100)
    elif method != "Reward":
        batch["completion_mask"] = attention_mask * (places > 0)
    if method == "KTO":
        batch["label"] = torch.arange(len(lengths)) % 2 == 0
    return batch


def resumed(run: Run) -> Run:
    """Return a new run from the checkpoint of another one."""
    return Run(run.method, TrainerState(**json.loads(run.saved())))


@pytest.fixture(params=TARGETS, scope="module")
def method(request: pytest.FixtureRequest) -> Any:
    module, _, attribute = TARGETS[request.param].partition(":")
    try:
        trainer_class = getattr(importlib.import_module(module), attribute.partition(".")[0])
    except (ImportError, AttributeError):
        pytest.skip("this release has no such trainer there")
    if "_total_train_tokens +=" not in inspect.getsource(trainer_class):
        pytest.skip("this trainer has no count of its own")
    return request.param


def test_a_run_from_the_beginning_logs_its_own_tokens(method: str) -> None:
    run = Run(method, TrainerState())
    one, two = run.tokens
    assert run.logged(0, training=False) == 0
    assert run.logged(0) == one
    assert run.logged(1) == one + two
    assert run.logged(1, training=False) == one + two
    assert run.acts == 0


def test_a_resumed_run_counts_on(method: str) -> None:
    run = Run(method, TrainerState())
    one, two = run.tokens
    run.logged(0)
    run.logged(1)
    other = resumed(run)
    assert other.logged(0) == 2 * one + two
    assert other.logged(1) == 2 * (one + two)
    assert other.logged(0, training=False) == 2 * (one + two)
    assert other.acts == 1


def test_an_evaluation_before_the_first_step_logs_the_tokens_so_far(method: str) -> None:
    run = Run(method, TrainerState())
    one, _ = run.tokens
    run.logged(0)
    other = resumed(run)
    assert other.logged(1, training=False) == one
    assert other.logged(0) == 2 * one


def test_a_run_that_is_resumed_twice_counts_on(method: str) -> None:
    run = Run(method, TrainerState())
    one, two = run.tokens
    run.logged(0)
    second = resumed(run)
    second.logged(1)
    assert resumed(second).logged(1) == one + 2 * two


def test_the_number_is_kept_among_the_states_of_callbacks(method: str, switch: Any) -> None:
    run = Run(method, TrainerState())
    run.logged(0)
    run.logged(1)
    kept = {NAME: {"args": {}, "attributes": {"num_tokens": sum(run.tokens)}}}
    assert json.loads(run.saved())["stateful_callbacks"] == kept
    with switch.off():
        run = Run(method, TrainerState())
        run.logged(0)
        assert json.loads(run.saved())["stateful_callbacks"] == {}


def test_a_checkpoint_without_the_number_is_gone_on_from_its_last_log(method: str) -> None:
    run = Run(method, TrainerState(log_history=LOGS))
    one, two = run.tokens
    assert run.logged(1) == 70 + two
    assert run.logged(0) == 70 + two + one
    assert run.acts == 1


def test_the_number_is_taken_before_the_last_log(method: str) -> None:
    run = Run(method, TrainerState())
    one, two = run.tokens
    run.logged(0)
    run.trainer.state.log_history = LOGS
    assert resumed(run).logged(1) == one + two


def test_a_trainer_that_goes_back_to_its_own_checkpoint_counts_from_there(method: str) -> None:
    run = Run(method, TrainerState())
    one, _ = run.tokens
    run.logged(0)
    saved = run.saved()
    run.logged(1)
    run.trainer.state = TrainerState(**json.loads(saved))
    assert run.logged(0) == 2 * one


def test_a_trainer_that_has_counted_itself_does_not_go_on_from_logs(method: str) -> None:
    run = Run(method, TrainerState())
    one, two = run.tokens
    run.logged(0)
    # It trains once more, and TRL counts on.
    run.trainer.state = TrainerState(log_history=LOGS)
    assert run.logged(1) == one + two


def test_the_state_of_a_stand_in_is_left_alone(method: str) -> None:
    state = SimpleNamespace(global_step=3, log_history=LOGS)
    run = Run(method, state)
    one, two = run.tokens
    assert run.logged(0) == one
    assert run.logged(1) == one + two
    assert vars(state) == {"global_step": 3, "log_history": LOGS}


def test_each_of_two_trainers_has_its_own_count(method: str) -> None:
    first, second = Run(method, TrainerState()), Run(method, TrainerState(log_history=LOGS))
    one, two = first.tokens
    assert [first.logged(0), second.logged(0)] == [one, 70 + one]
    assert [first.logged(1), second.logged(1)] == [one + two, 70 + one + two]


@pytest.mark.parametrize("state_class", [TrainerState, SimpleNamespace], ids=["state", "stand-in"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_the_result_is_that_of_trl(method: str, training: bool, state_class: Any, switch: Any) -> None:
    states = [state_class(global_step=3, log_history=LOGS) for _ in range(2)]
    patched = [result(Run(method, state), number, training) for number, state in enumerate(states)]
    with switch.off():
        unpatched = [result(Run(method, TrainerState()), number, training) for number in (0, 1)]
    for found, right in zip(patched, unpatched, strict=True):
        assert all(map(torch.equal, found, right))


def result(run: Run, number: int, training: bool) -> list[Any]:
    """Return the loss of a micro-batch and its gradients, or the completions that GRPO has scored."""
    computed = run.computed(number, training)
    if run.method == "GRPO":
        return [computed["completion_ids"], computed["advantages"]]
    gradients = torch.autograd.grad(computed, list(run.trainer.model.parameters()), allow_unused=True)
    return [computed.detach(), *(gradient for gradient in gradients if gradient is not None)]


def test_trl_begins_at_0_in_a_resumed_run(method: str, switch: Any) -> None:
    with switch.off():
        run = Run(method, TrainerState())
        run.logged(0)
        assert resumed(run).logged(1) == run.tokens[1]
        assert Run(method, TrainerState(log_history=LOGS)).logged(0) == run.tokens[0]
