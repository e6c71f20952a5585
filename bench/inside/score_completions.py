"""Run inside one release: GRPO's and RLOO's real scoring of fixed completions with fixed rewards.

python -m bench.inside.score_completions OUT.json
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from trl_hotfix.testing import scored_completions, stub_that_scores, tiny_attention_model

COMPLETIONS = [[5, 6, 1], [7, 8, 9, 2], [5, 1], [6, 6, 6, 1]]
REWARDS = [1.0, 0.0, 0.5, 0.25]


def with_reference(module: Any) -> dict[str, Any]:
    """Score with a reference, after more than one iteration, so that every log-prob of the step is computed."""
    import torch

    trainer = stub_that_scores(module, COMPLETIONS, REWARDS, beta=0.1, num_iterations=2, temperature=1.0)
    output = scored_completions(trainer)
    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
    mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
    with torch.no_grad():
        logits = tiny_attention_model()(input_ids=ids, attention_mask=mask).logits
    log_probs = logits.log_softmax(-1)[:, 1:-1].gather(-1, output["completion_ids"][..., None])[..., 0]
    names = [name for name in ("ref_per_token_logps", "old_per_token_logps") if name in output]
    return {name: float(((output[name] - log_probs) * output["completion_mask"]).abs().max()) for name in names}


def scored(module: Any, **settings: Any) -> dict[str, Any]:
    trainer = stub_that_scores(module, COMPLETIONS, REWARDS, **settings)
    output = scored_completions(trainer)
    metrics = trainer._metrics
    by_mode = metrics["train" if settings.get("training", True) else "eval"]
    return {
        "completion_ids": output["completion_ids"].tolist(),
        "completion_mask": output["completion_mask"].tolist(),
        "prompt_ids": output["prompt_ids"].tolist(),
        "advantages": output["advantages"].tolist(),
        "reward": (by_mode or metrics)["reward"],
    }


def main(out: str) -> None:
    from accelerate.state import PartialState

    outputs: dict[str, Any] = {}
    for method in ("GRPO", "RLOO"):
        try:
            module = import_module(f"trl.trainer.{method.lower()}_trainer")
            outputs[method] = {
                "training": scored(module),
                "evaluation": scored(module, training=False),
                "of two prompts": scored(module, num_generations=2, num_generations_eval=2),
            }
            if method == "GRPO":
                outputs[method]["log-probs differ by"] = with_reference(module)
        except NotImplementedError as error:
            outputs[method] = str(error)
    # A self-test leaves no trace: nobody has asked for the ranks of this run.
    outputs["asked for the ranks"] = bool(PartialState._shared_state)
    Path(out).write_text(json.dumps(outputs))


if __name__ == "__main__":
    main(sys.argv[1])
