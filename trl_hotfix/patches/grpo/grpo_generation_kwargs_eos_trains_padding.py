"""GRPO and RLOO look for the tokenizer's ends only, and ``generation_kwargs`` may have ended a completion elsewhere.

The constructor writes ``generation_kwargs`` over its own ``eos_token_id`` in the ``generation_config``. The mask of the
completions, and ``clipped_ratio`` and ``mask_truncated_completions`` behind it, go on comparing with the tokenizer's
id; from 1.14.2 on with ``eos_token_ids``, which also has those of the model. So the wrapper adds the ids of
``generation_kwargs`` to what TRL compares with, for the time of the call. It adds: what ended a completion before still
does.
"""

from __future__ import annotations

from contextlib import ExitStack
from types import ModuleType
from typing import Any

from ...authoring import Call, absent, judge, shadowed, wrapper
from ...authoring.ends import _AnyOf, _with_eos_id
from ...model import Outcome
from ...testing import scored_completions, stub_that_scores, trainer_and_config


def _asked_for(trainer: Any) -> set[int]:
    """Return the ends of a completion that ``generation_kwargs`` names."""
    ends = (trainer.args.generation_kwargs or {}).get("eos_token_id")
    return {ends} if isinstance(ends, int) else set(ends or ())


@wrapper
def score_by_all_ends(call: Call) -> Any:
    """Add the ends of ``generation_kwargs`` to the trainer's list."""
    trainer = call.trainer
    more = _asked_for(trainer) - set(trainer.eos_token_ids)
    if not more:
        return call()
    with shadowed(trainer, "eos_token_ids", [*trainer.eos_token_ids, *sorted(more)]):
        return call()


@wrapper
def score_as_if_one_end(call: Call) -> Any:
    """Have the trainer's one id equal the ends of ``generation_kwargs`` too."""
    trainer = call.trainer
    # With tools the trainer also looks for that id in the prompts of a conversation.
    more = set() if getattr(trainer, "tools", None) else _asked_for(trainer)
    with ExitStack() as stack:
        # The trainer compares with an id of its own from 0.20 to 1.2, and with that of its tokenizer before and after.
        for name in ("eos_token_id", "_tokenizer", "processing_class"):
            owner = vars(trainer).get(name)
            first = owner if name == "eos_token_id" else getattr(owner, "eos_token_id", None)
            if first is None or more <= {first}:
                continue
            end = _AnyOf(first, [first, *sorted(more)])
            stack.enter_context(shadowed(trainer, name, end if owner is first else _with_eos_id(owner, end)))
        return call()


def a_completion_ends_where_it_was_ended(module: ModuleType) -> Outcome:
    """Count the tokens that are trained on of completions of two and four tokens; the end of the first is asked for."""
    _, config_class = trainer_and_config(module, "GRPO", "RLOO")
    if "generation_kwargs" not in config_class.__dataclass_fields__:
        return absent("the trainer of this release takes no generation_kwargs")
    # 2 ends a text of the tiny model.
    completions, rewards = [[3, 5], [3, 4, 6, 1]], [1.0, 2.0]
    trainer = stub_that_scores(module, completions, rewards, beta=0.0, generation_kwargs={"eos_token_id": [1, 5]})
    return judge(float(scored_completions(trainer)["completion_mask"].sum()), right=6.0, wrong=8.0)
