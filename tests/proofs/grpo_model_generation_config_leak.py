"""The proof: one step of the real GRPO and RLOO trainers on a checkpoint that ships a temperature of 0.0001.

The trainers ask for 1.0, at which four completions of a prompt differ; at 0.0001 they are one. What is right are the
completions that a checkpoint without a temperature of its own gives from the same random numbers.
"""

from __future__ import annotations

import tempfile
from typing import Any

from trl_hotfix.authoring import absent, judge

import tiny

OVERLAYS = ()
PARITY = True

SEED = 9
"""With these random numbers no completion comes to an end: all have eight tokens, so every release has one loss."""


def one_step(method: str, *, temperature: float | None, asked_for: float = 1.0) -> dict[str, Any]:
    """The completions of one step, its loss and its gradients. ``temperature`` is the checkpoint's."""
    import torch
    import trl

    seen: dict[str, Any] = {}

    class Measured(getattr(trl, f"{method}Trainer")):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            seen.setdefault("loss", float(loss.detach()))
            return loss

    with tempfile.TemporaryDirectory() as folder:
        policy, plain = (tiny.llama(folder, seed=0) for _ in range(2))
        # Probabilities that are neither all alike nor all on one token.
        for model in (policy, plain):
            model.get_output_embeddings().weight.data *= 10
        trainer = tiny.grpo_of_one_length(
            Measured,
            policy,
            config_class=getattr(trl, f"{method}Config"),
            num_iterations=1,
            beta=0.0,
            temperature=asked_for,
        )
        # The model's own, from the same numbers each time.
        del policy.generate
        generate = policy.generate

        def seeded(input_ids: Any = None, **others: Any) -> Any:
            torch.manual_seed(SEED)
            answer = generate(input_ids=input_ids, **others)
            seen["completions"] = answer[:, input_ids.shape[1] :].tolist()
            torch.manual_seed(SEED)
            # Up to 0.17 the trainer asks for 50.
            top_k = getattr(trainer.generation_config, "top_k", None)
            its = {"do_sample": True, "max_new_tokens": 8, "pad_token_id": 0, "eos_token_id": 1, "top_k": top_k}
            mask = others["attention_mask"]
            by_itself = plain.generate(input_ids=input_ids, attention_mask=mask, temperature=asked_for, **its)
            seen["right"] = by_itself[:, input_ids.shape[1] :].tolist()
            return answer

        policy.generate = seeded
        if temperature is not None:
            policy.generation_config.temperature = temperature
        step = tiny.FirstStep(trainer.model)
        trainer.train()
        if getattr(policy.generation_config, "temperature", None) != (temperature or 1.0):
            raise AssertionError(f"the checkpoint's temperature is {policy.generation_config.temperature} afterwards")
    if {len(each) for each in seen["right"]} != {8} or any(1 in each for each in seen["right"]):
        raise AssertionError(f"a completion comes to an end: {seen['right']}")
    return {**seen, "gradients": step.gradients}


def train() -> tiny.TrainingResult:
    import trl

    methods = [
        method
        for method in ("GRPO", "RLOO")
        if hasattr(getattr(trl, f"{method}Trainer", None), "_generate_and_score_completions")
    ]
    if not methods:
        return tiny.TrainingResult(absent("this release generates elsewhere"))
    runs = {method: one_step(method, temperature=1e-4) for method in methods}
    distinct = sum(len({tuple(each) for each in run["completions"]}) for run in runs.values())
    outcome = judge(distinct, right=4 * len(runs), wrong=len(runs))
    off = [method for method, run in runs.items() if run["completions"] != run["right"]]
    if outcome.verdict.value == "fixed" and off:
        raise AssertionError(f"{off}: the completions are not those of a checkpoint without a temperature: {runs}")
    return tiny.TrainingResult(outcome, runs["GRPO"]["loss"], runs["GRPO"]["gradients"])


def unaffected() -> tiny.TrainingResult:
    """A checkpoint that says nothing, and a trainer that asks for another temperature than the default."""
    runs = {
        "says nothing": one_step("GRPO", temperature=None),
        "0.9": one_step("GRPO", temperature=0.5, asked_for=0.9),
    }
    gradients = {f"{run}.{name}": its for run, seen in runs.items() for name, its in seen["gradients"].items()}
    return tiny.TrainingResult(absent("nothing is merged"), sum(run["loss"] for run in runs.values()), gradients)
