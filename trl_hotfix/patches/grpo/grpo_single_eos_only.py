"""GRPO and RLOO end a completion at the tokenizer's end-of-sequence token only, and not at the model's other ones.

In TRL 1.14.2 every token that ``generation_config.eos_token_id`` lists ends a completion. The wrapper changes only the
two values that ``_generate_and_score_completions`` (0.15: ``_prepare_inputs``) reads, the ``generation_config`` and the
id that it compares completions with: the mask, the lengths, the metrics and ``mask_truncated_completions`` are then
TRL's own. For the time of the call the id is set on the trainer, or on a view of its tokenizer.
"""

from __future__ import annotations

from contextlib import ExitStack
from types import ModuleType
from typing import Any

from ...authoring import Call, absent_on, judge, shadowed, wrapper
from ...authoring.ends import _AnyOf, _with_eos_id
from ...model import Outcome
from ...testing import scored_completions, stub_that_scores, tiny_causal_lm


@wrapper
def end_at_every_end(call: Call) -> Any:
    """Generate and score with all end-of-sequence tokens that the model lists."""
    trainer = call.trainer
    configs = (vars(module).get("generation_config") for module in trainer.model.modules())
    listed = next((config.eos_token_id for config in configs if config is not None), None)
    ids = set(listed if isinstance(listed, (list, tuple)) else [] if listed is None else [listed])
    owners = [trainer, *(vars(trainer).get(name) for name in ("_tokenizer", "processing_class"))]
    first = next((eos for owner in owners if (eos := getattr(owner, "eos_token_id", None)) is not None), None)
    if first is None or ids <= {first} or getattr(trainer, "tools", None):
        return call()
    eos_ids = [first, *sorted(ids - {first})]
    with ExitStack() as stack:
        # The trainer compares with an id of its own from 0.20 to 1.2, and with that of its tokenizer before and after.
        stack.enter_context(shadowed(trainer, "eos_token_id", _AnyOf(first, eos_ids)))
        for name in ("_tokenizer", "processing_class"):
            if getattr(vars(trainer).get(name), "eos_token_id", None) is not None:
                view = _with_eos_id(vars(trainer)[name], _AnyOf(first, eos_ids))
                stack.enter_context(shadowed(trainer, name, view))
        config = getattr(trainer, "generation_config", None)
        if config is not None and "eos_token_id" not in (getattr(trainer.args, "generation_kwargs", None) or {}):
            stack.enter_context(shadowed(config, "eos_token_id", eos_ids))
        return call()


@absent_on(NotImplementedError, "in no method", "this release scores its completions in no method of its own")
def a_completion_ends_at_each_end_of_the_model(module: ModuleType) -> Outcome:
    """Count the tokens that are trained on of two completions, of four tokens each.

    The first one has an end of the model as its second token, the other one the tokenizer's as its last.
    """
    from transformers import GenerationConfig

    model = tiny_causal_lm()
    model.generation_config = GenerationConfig(eos_token_id=[1, 5])
    completions, rewards = [[2, 5, 6, 7], [2, 3, 6, 1]], [1.0, 2.0]
    trainer = stub_that_scores(module, completions, rewards, model=model, reference=model, beta=0.0)
    # From 1.14.2 on the constructor lists all ends.
    trainer.eos_token_ids = [1, 5]
    return judge(float(scored_completions(trainer)["completion_mask"].sum()), right=6.0, wrong=8.0)
