"""The trainers count their tokens in ``_total_train_tokens``, an attribute that no checkpoint has.

From 0.17.0 on GRPO, and later RLOO and distillation, count in ``state.num_input_tokens_seen``, which is in
``trainer_state.json``. The others cannot be moved there from outside: transformers counts in the same place if
``include_num_input_tokens_seen`` is set. The number is kept among the states of callbacks of the trainer's state
instead, in the form that transformers gives them, so that it is saved and loaded with the state on every rank. A state
that has no such number, but logs of the metric, is of a checkpoint without this patch: its last log is gone on from.

The state is asked before every call and not only before the first one. So a trainer that goes back to an earlier
checkpoint of its own counts from there.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import asdict
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import absent, act, judge
from ...model import Outcome, Verdict
from ...testing import SftMoeStep, dpo_stub, metrics_by_mode, scored_completions, stub_that_scores, tiny_causal_lm

_NAME = "trl_hotfix.num_tokens"
"""The name of the number among the states of callbacks."""


def go_on_from_the_tokens_of_the_state(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Let the trainer count on from the number in its state, and keep the new number there."""
    from transformers import TrainerState

    state = getattr(instance, "state", None)
    if not isinstance(state, TrainerState):
        return wrapped(*args, **kwargs)
    before = _counted_before(state, instance._total_train_tokens)
    if before != instance._total_train_tokens:
        act()
        instance._total_train_tokens = before
    result = wrapped(*args, **kwargs)
    state.stateful_callbacks[_NAME] = {"args": {}, "attributes": {"num_tokens": instance._total_train_tokens}}
    return result


def _counted_before(state: Any, count: Any) -> Any:
    """Return the tokens that the run of this state has trained on, where the trainer has counted ``count``."""
    kept = state.stateful_callbacks.get(_NAME)
    if kept is not None:
        return kept["attributes"]["num_tokens"]
    logged = [logs["num_tokens"] for logs in state.log_history if "num_tokens" in logs]
    # A trainer that has counted tokens itself does not begin a resumed run.
    return logged[-1] if logged and not count else count


def count_goes_on_in_a_resumed_run(module: ModuleType) -> Outcome:
    """Resume runs from the states that they save, and compare the logged numbers with the sums of the tokens."""
    from transformers import TrainerState

    trainers = ("SFT", "DPO", "KTO", "Reward", "TPO", "GRPO")
    method = next(name for name in trainers if hasattr(module, f"{name}Trainer"))
    if not _counts_itself(getattr(module, f"{method}Trainer")):
        return absent("this trainer has no count of its own")
    run = _Run(module, method, TrainerState())
    one, two = run.tokens
    run.expect([0, one, one + two], by=["evaluation", 0, 1])
    saved = run.saved()
    resumed = _Run(module, method, TrainerState(**json.loads(saved)))
    counted = one + two
    resumed.expect(
        [counted, counted + one, 2 * counted, 2 * counted], by=["evaluation", 0, 1, "evaluation"], lost=counted
    )
    again = _Run(module, method, TrainerState(**json.loads(resumed.saved())))
    again.expect([2 * counted + two], by=[1], lost=2 * counted)
    # A checkpoint that was written without the patch, the last one 70 tokens after the beginning.
    logs = [
        {"num_tokens": 30.0},
        {"num_tokens": 50.0},
        {"num_tokens": 70.0},
        {"eval_num_tokens": 70.0},
        {"train_runtime": 1.0},
    ]
    unpatched = _Run(module, method, TrainerState(log_history=logs))
    unpatched.expect([70 + two, 70 + two + one], by=[1, 0], lost=70)
    # The trainer goes back to its own checkpoint, and then trains anew, which TRL counts on.
    run.expect([counted + two], by=[1])
    run.trainer.state = TrainerState(**json.loads(saved))
    run.expect([counted + one], by=[0], lost=-two)
    run.trainer.state = TrainerState(log_history=logs)
    run.expect([counted + one + two], by=[1], lost=-two)
    # A stand-in for a trainer.
    stub = _Run(module, method, SimpleNamespace(global_step=3, log_history=logs))
    stub.expect([one, counted], by=[0, 1])
    runs = (run, resumed, again, unpatched, stub)
    outcome = judge(resumed.logged[1], right=counted + one, wrong=one)
    is_fixed = outcome.verdict is Verdict.FIXED
    for logged, right, wrong in ((run.logged, run.right, run.wrong) for run in runs):
        if logged != (right if is_fixed else wrong):
            raise AssertionError(f"logged {logged}, right {right}, and without the patch {wrong}")
    kept = {"trl_hotfix.num_tokens": {"args": {}, "attributes": {"num_tokens": counted}}}
    states = json.loads(saved)["stateful_callbacks"]
    if states != (kept if is_fixed else {}):
        raise AssertionError(f"the states of callbacks are saved as {states}")
    for results in (run.results for run in runs):
        if len(set(map(id, results))) < len(results) or not all(
            getattr(loss, "requires_grad", True) for loss in results
        ):
            raise AssertionError(f"the losses are others than those of the trainer: {results}")
    return outcome


def _counts_itself(trainer_class: type) -> bool:
    """Return whether a method other than the constructor has the count."""
    methods = (inspect.unwrap(method) for name, method in vars(trainer_class).items() if name != "__init__")
    return any("_total_train_tokens" in method.__code__.co_names for method in methods if inspect.isfunction(method))


class _Run:
    """A run of a stub: the numbers that it logs, the right ones, and those without the patch."""

    def __init__(self, module: ModuleType, method: str, state: Any) -> None:
        self.trainer, self.compute_loss, self.tokens = _stub(module, method)
        self.trainer.state = state
        self.results: list[Any] = []
        self.logged: list[float] = []
        self.right: list[float] = []
        self.wrong: list[float] = []

    def expect(self, right: list[int], *, by: list[Any], lost: int = 0) -> None:
        """Compute the micro-batches ``by`` these numbers. ``lost``: what the numbers lack without the patch."""
        for micro_batch in by:
            is_training = micro_batch != "evaluation"
            self.trainer.model.train(is_training)
            self.trainer.control.should_evaluate = not is_training
            self.results.append(self.compute_loss(micro_batch if is_training else 0))
            self.logged += self.trainer._metrics["train" if is_training else "eval"]["num_tokens"]
        self.right += right
        self.wrong += [number - lost for number in right]

    def saved(self) -> str:
        """Return the state as a checkpoint has it."""
        return json.dumps(asdict(self.trainer.state))


def _stub(module: ModuleType, method: str) -> tuple[Any, Callable[[int], Any], tuple[int, int]]:
    """Return a trainer, its computation of micro-batch 0 or 1, and how many tokens the two have."""
    import torch

    attributes: dict[str, Any] = {"control": SimpleNamespace(), "_total_train_tokens": 0, "_tp_size": 1}
    if method == "GRPO":
        scoring = stub_that_scores(module, [[5, 6, 1], [7, 1]], [1.0, 2.0])
        # The prompt has two tokens.
        return scoring, lambda micro_batch: scored_completions(scoring), (9, 9)
    if method == "SFT":
        step = SftMoeStep(module, 0.0, aux_loss_enabled=False, **attributes)
        trainer, model = step.trainer, step.model
    else:
        config = SimpleNamespace()
        config.get_text_config = lambda: config
        model = tiny_causal_lm(config)
        trainer = dpo_stub(
            module,
            method,
            model=model,
            ref_model=tiny_causal_lm(),
            loss_types=["sigmoid"],
            loss_weights=[1.0],
            precompute_ref_logps=False,
            calculate_KL=False,
            tpo_alpha=0.0,
            _metrics=metrics_by_mode(),
            **({"loss_type": "apo_zero_unpaired"} if method == "KTO" else {}),
            **attributes,
        )
    if method == "Reward":
        model.forward = lambda input_ids, **kwargs: SimpleNamespace(
            logits=model.weight[input_ids].mean((1, 2))[:, None]
        )
    micro_batches = [_micro_batch(lengths, method) for lengths in ((4, 3), (2, 5, 3, 5))]

    def compute_loss(number: int) -> Any:
        with torch.enable_grad():
            return trainer.compute_loss(model, dict(micro_batches[number]))

    return trainer, compute_loss, (7, 15)


def _micro_batch(lengths: tuple[int, ...], method: str) -> dict[str, Any]:
    import torch

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
