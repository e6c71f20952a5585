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

from ...authoring import Call, absent, judge, wrapper
from ...model import Outcome
from ...testing import SftMoeStep, dpo_stub, metrics_by_mode, scored_completions, stub_that_scores, tiny_causal_lm

_NAME = "trl_hotfix.num_tokens"
"""The name of the number among the states of callbacks."""


@wrapper
def go_on_from_the_tokens_of_the_state(call: Call) -> Any:
    """Let the trainer count on from the number in its state, and keep the new number there."""
    from transformers import TrainerState

    trainer = call.trainer
    state = getattr(trainer, "state", None)
    if not isinstance(state, TrainerState):
        return call()
    before = _counted_before(state, trainer._total_train_tokens)
    if before != trainer._total_train_tokens:
        call.act()
        trainer._total_train_tokens = before
    result = call()
    state.stateful_callbacks[_NAME] = {"args": {}, "attributes": {"num_tokens": trainer._total_train_tokens}}
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
    """Take a step, resume from the state that it saves, take another one, and read the number that is logged."""
    from transformers import TrainerState

    method = next(name for name in ("SFT", "DPO", "KTO", "Reward", "TPO", "GRPO") if hasattr(module, f"{name}Trainer"))
    if not _counts_itself(getattr(module, f"{method}Trainer")):
        return absent("this trainer has no count of its own")
    trainer, take_step, tokens = _stub(module, method)
    trainer.state = TrainerState()
    take_step()
    trainer.state = TrainerState(**json.loads(json.dumps(asdict(trainer.state))))
    trainer._total_train_tokens = 0
    take_step()
    (logged,) = trainer._metrics["train"]["num_tokens"]
    return judge(logged, right=2 * tokens, wrong=tokens)


def _counts_itself(trainer_class: type) -> bool:
    """Return whether a method other than the constructor has the count."""
    methods = (inspect.unwrap(method) for name, method in vars(trainer_class).items() if name != "__init__")
    return any("_total_train_tokens" in method.__code__.co_names for method in methods if inspect.isfunction(method))


def _stub(module: ModuleType, method: str) -> tuple[Any, Callable[[], Any], int]:
    """Return a trainer, its computation of a micro-batch, and how many tokens that has."""
    import torch

    if method == "GRPO":
        trainer = stub_that_scores(module, [[5, 6, 1], [7, 1]], [1.0, 2.0])
        # The prompt has two tokens.
        return trainer, lambda: scored_completions(trainer), 9
    if method == "SFT":
        step = SftMoeStep(module, 0.0, aux_loss_enabled=False)
        return step.trainer, step.weights, 4
    config = SimpleNamespace()
    config.get_text_config = lambda: config
    settings: dict[str, Any] = {"loss_types": ["sigmoid"], "loss_weights": [1.0], "precompute_ref_logps": False}
    settings |= {"loss_type": "apo_zero_unpaired"} if method == "KTO" else {}
    settings |= {"calculate_KL": False, "tpo_alpha": 0.0, "_total_train_tokens": 0, "_tp_size": 1}
    model, reference, metrics = tiny_causal_lm(config), tiny_causal_lm(), metrics_by_mode()
    trainer = dpo_stub(module, method, model=model, ref_model=reference, _metrics=metrics, **settings)
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": (ids % 4 != 1).long()}
    return trainer, lambda: trainer.compute_loss(model, {**batch, "label": torch.tensor([True, False])}), 8
