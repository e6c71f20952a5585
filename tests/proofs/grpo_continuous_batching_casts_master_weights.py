"""The proof: two steps of the real GRPO and RLOO trainers with bf16=True and continuous batching.

Continuous batching needs a GPU, so ``generate_batch`` is a stand-in with the answers that the padded ``generate`` has
in the same proof. What is right is that run: same loss, same gradients, same weights after two steps.
"""

from __future__ import annotations

import tempfile
from types import SimpleNamespace
from typing import Any

from trl_hotfix.authoring import absent, judge

import tiny

OVERLAYS = ()
PARITY = False

OPTIONS = ("use_transformers_paged", "use_transformers_continuous_batching")


def two_steps(method: str, *, batching: bool, bf16: bool = True, dtype: Any = None) -> dict[str, Any]:
    """Losses, first gradients and, after two steps, the trained weights; and in how many bits it generated."""
    import torch
    import trl

    seen: dict[str, Any] = {"losses": [], "bits": set()}

    class Measured(getattr(trl, f"{method}Trainer")):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            seen["losses"].append(float(loss.detach()))
            return loss

    with tempfile.TemporaryDirectory() as folder:
        policy = tiny.llama(folder, seed=0)
        if dtype is not None:
            policy.to(dtype)
        torch.manual_seed(0)
        settings = {"num_iterations": 1, "beta": 0.0, "max_steps": 2, "learning_rate": 1e-6, "bf16": bf16}
        trainer = tiny.grpo_of_one_length(Measured, policy, config_class=getattr(trl, f"{method}Config"), **settings)
        padded = policy.generate

        def generate_batch(inputs: Any, **kwargs: Any) -> dict[int, Any]:
            seen["bits"] |= {8 * each.element_size() for each in policy.parameters()}
            prompts = torch.tensor(inputs)
            rows = padded(prompts)[:, prompts.shape[1] :].tolist()
            return {row: SimpleNamespace(generated_tokens=each) for row, each in enumerate(rows)}

        policy.generate_batch = generate_batch
        if batching:
            # Not in the config: some releases ask for a newer transformers then, for its own generate_batch.
            trainer.continuous_batching_config = None
            for name in OPTIONS:
                setattr(trainer, name, True)
        step = tiny.FirstStep(trainer.model)
        trainer.train()
    weights = {name: each.detach() for name, each in trainer.model.named_parameters() if each.requires_grad}
    return {**seen, "gradients": step.gradients, "weights": weights}


def train() -> tiny.TrainingResult:
    import torch
    import trl

    methods = [
        method
        for method in ("GRPO", "RLOO")
        if any(
            name in getattr(trl, f"{method}Config", object).__dict__.get("__dataclass_fields__", {}) for name in OPTIONS
        )
    ]
    if not methods:
        return tiny.TrainingResult(absent("this release has no continuous batching"))
    kept = trained = 0
    gradients: dict[str, Any] = {}
    for method in methods:
        right, measured = two_steps(method, batching=False), two_steps(method, batching=True)
        if measured["bits"] != {16}:
            raise AssertionError(f"{method} generated with {measured['bits']} bits")
        trained += len(right["weights"])
        full = [name for name, weight in measured["weights"].items() if weight.dtype == torch.float32]
        kept += len(full)
        off = [name for name in full if not torch.equal(measured["weights"][name], right["weights"][name])]
        off += [name for name in full if not torch.equal(measured["gradients"][name], right["gradients"][name])]
        if off or (full and measured["losses"] != right["losses"]):
            raise AssertionError(f"{method}: not as with the padded generate: {off}, {measured['losses']}")
        gradients |= {f"{method}.{name}": its for name, its in measured["gradients"].items()}
    return tiny.TrainingResult(judge(kept, right=trained, wrong=0), measured["losses"][0], gradients)


def unaffected() -> tiny.TrainingResult:
    """The padded ``generate``, no mixed precision, and weights that are in bfloat16 from the beginning."""
    import torch

    runs = {
        "padded": two_steps("GRPO", batching=False),
        "float32": two_steps("GRPO", batching=True, bf16=False),
        "bfloat16": two_steps("GRPO", batching=True, dtype=torch.bfloat16),
    }
    gradients = {f"{run}.{name}": its for run, seen in runs.items() for name, its in seen["gradients"].items()}
    return tiny.TrainingResult(absent("nothing is cast"), sum(sum(seen["losses"]) for seen in runs.values()), gradients)
