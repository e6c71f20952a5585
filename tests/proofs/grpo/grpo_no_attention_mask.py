"""Train two steps of two micro-batches with the real GRPOTrainer, on prompts of unequal lengths: in full, and adapters.

Losses, accumulated gradients and the ``kl`` metric are compared with the paper (arXiv:2402.03300, equations 3 and 4).
The log-probs in it are those that the plain model gives each row without its padding, by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trl_hotfix.authoring import absent

import tiny
from tiny import grpo_log_probs, grpo_steps

OVERLAYS = ()
PARITY = True

ID, TARGET = "grpo-no-attention-mask", "trl.trainer.grpo_trainer:GRPOTrainer.compute_loss"
COMPLETIONS = ((5, 1), (3, 9, 7, 1), (11, 4, 6, 8), (12, 7, 1))
"""Their tokens in the first micro-batch: 1 is the end of a sequence, and 0 padding."""
PROMPTS = (
    ("w1 w2 w3 w4 w5", "w6 w7"),
    ("w8", "w3 w1 w4"),
    ("w2 w9", "w5 w6 w7 w8 w9 w1"),
    ("w4 w5 w6 w2", "w7"),
)
"""Those of each micro-batch, of which the longest are cut to four tokens in a run."""
OF_ONE_LENGTH = (("w1 w2", "w6 w7"), ("w8 w3", "w3 w1"), ("w2 w9", "w5 w6"), ("w4 w5", "w7 w3"))


def train() -> tiny.TrainingResult:
    import trl
    from packaging.version import Version

    if not Version("0.14") <= Version(trl.__version__) < Version("0.16"):
        return tiny.TrainingResult(absent("it has no GRPO, or passes the mask since 0.15.0"))
    runs = {"full": _run(PROMPTS), "cut": _run(PROMPTS, max_prompt_length=4), "adapter": _run(PROMPTS, tiny.lora())}
    for name, run in runs.items():
        if (acted := tiny.acts(ID, TARGET, run.trainer)) not in (None, len(PROMPTS)):
            raise AssertionError(f"{name}: the wrapper acts in {acted} micro-batches instead of {len(PROMPTS)}")
    return grpo_log_probs.judged_runs(runs)


def unaffected() -> tiny.TrainingResult:
    """Train on prompts of one length, on one prompt at a time, and on prompts whose padding is cut off."""
    alone = [(prompt,) for prompts in PROMPTS for prompt in prompts][:4]
    runs = {
        "one length": _run(OF_ONE_LENGTH),
        "one prompt": _run(alone),
        "cut": _run(PROMPTS, max_prompt_length=1),
        "an adapter": _run(OF_ONE_LENGTH, tiny.lora()),
    }
    for name, run in runs.items():
        if tiny.acts(ID, TARGET, run.trainer):
            raise AssertionError(f"the wrapper acts: {name}")
    return grpo_steps.several_runs(runs, absent("no prompt is padded"))


def _run(
    micro_batches: Sequence[Sequence[str]], peft_config: Any = None, *, max_prompt_length: int = 8
) -> tiny.FormulaSteps:
    """Train on these prompts."""
    import torch
    from torch.utils.data import DataLoader
    from trl import GRPOTrainer

    group = grpo_log_probs.GROUP
    rows_of_a_prompt = 1 if grpo_log_probs.generates_in_the_loss() else group
    rows = [{"prompt": prompt} for prompts in micro_batches for prompt in prompts for _ in range(rows_of_a_prompt)]

    class InOrder(GRPOTrainer):  # type: ignore[misc, valid-type]
        def get_train_dataloader(self) -> Any:
            """Return the micro-batches in their order, which differs between releases otherwise."""
            return DataLoader(rows, len(rows) // len(micro_batches), collate_fn=list)

    def drawn(sequences: Any, number: int) -> Any:
        completions = [
            [token if token == 1 else token + number + 20 * place for token in tokens] + [0] * (4 - len(tokens))
            for place in range(len(sequences) // group)
            for tokens in COMPLETIONS
        ]
        return torch.cat([sequences[:, : -grpo_log_probs.LENGTH], torch.tensor(completions)], dim=1)

    def log_probs(model: Any, sequences: Any, number: int) -> dict[str, list[Any]]:
        lengths = [min(len(prompt.split()), max_prompt_length) for prompt in micro_batches[number]]
        counted = {"right": lengths, "wrong": [max(lengths)] * len(lengths)}
        return {name: _log_probs(model, sequences, of_prompts) for name, of_prompts in counted.items()}

    return grpo_log_probs.recorded_steps(InOrder, drawn, log_probs, peft_config, max_prompt_length=max_prompt_length)


def _log_probs(model: Any, sequences: Any, lengths: Sequence[int]) -> list[Any]:
    """Return those of each completion by itself, if prompts have so many tokens."""
    log_probs = []
    for row, tokens in enumerate(sequences):
        place, kept = row // grpo_log_probs.GROUP, len(COMPLETIONS[row % grpo_log_probs.GROUP])
        start = len(tokens) - 4
        ids = tokens[start - lengths[place] : start + kept].unsqueeze(0)
        logits = model(input_ids=ids, use_cache=False).logits[0, -kept - 1 : -1]
        log_probs.append(logits.log_softmax(-1).gather(-1, ids[0, -kept:, None])[:, 0])
    return log_probs
