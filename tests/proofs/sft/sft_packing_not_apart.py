"""Train the real SFTTrainer two steps of two micro-batches on flattened and packed batches, then evaluate.

The models mix the sequences of a row: an OPT, whose mask does not look at positions, an LFM2, whose convolution runs
on, and a Llama with prompt tuning and with prefix tuning. The expected loss and gradients are those of the mean
cross-entropy of all predictions, one sequence at a time and without TRL's code; the wrong ones those of the row.
"""

from __future__ import annotations

import tempfile
from importlib.metadata import version
from typing import Any

from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Verdict

import tiny
from tiny import flattened_runs
from tiny.flattened_runs import check, count_of, rows, sum_of

ID = "sft-packing-not-apart"
TARGET = "trl.trainer.sft_trainer:SFTTrainer.compute_loss"
OVERLAYS = ()
PARITY = False
EQUIVALENT = {"applied twice": "the second time no batch is flattened"}

FLATTENED = {"padding_free": True}
PACKED = {"packing": True, "eval_packing": False, "packing_strategy": "bfd"}


def with_soft_prompt(folder: str, *, prefix: bool) -> Any:
    """Return a Llama with virtual tokens, as embeddings or as a prefix of keys and values."""
    import torch
    from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model

    config = (PrefixTuningConfig if prefix else PromptTuningConfig)(task_type="CAUSAL_LM", num_virtual_tokens=3)
    torch.manual_seed(1)
    return get_peft_model(tiny.llama(folder, seed=0), config)


def needs_kernels(folder: str) -> bool:
    """Return whether transformers refuses to train the LFM2 on a packed row here, as its kernels are not installed."""
    import torch
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    batch = DataCollatorForLanguageModeling(0, padding_free=True)(rows()[:2])
    try:
        with torch.no_grad():
            tiny.lfm2(folder, seed=0)(**{name: value for name, value in batch.items() if name != "labels"})
    except ValueError as error:
        if "keep packed sequences apart" not in str(error):
            raise
        return True
    return False


MODELS: dict[str, Any] = {
    "OPT": lambda folder: tiny.opt(folder, seed=0),
    "LFM2": lambda folder: tiny.lfm2(folder, seed=0),
    "prompt tuning": lambda folder: with_soft_prompt(folder, prefix=False),
    "prefix tuning": lambda folder: with_soft_prompt(folder, prefix=True),
}


def train() -> tiny.TrainingResult:
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    flattened = getattr(DataCollatorForLanguageModeling, "padding_free", None)
    if flattened is None or "attention_mask" in DataCollatorForLanguageModeling(0, padding_free=True)(rows()[:2]):
        return tiny.TrainingResult(absent("this release tells no model where sequences begin"))
    with tempfile.TemporaryDirectory() as folder:
        # A variant compiles each of them, for some minutes.
        names, ways = (["OPT"], [FLATTENED]) if tiny.state.variant else (list(MODELS), [FLATTENED, PACKED])
        if "LFM2" in names and needs_kernels(folder):
            names.remove("LFM2")
        if version("trl") == "0.23.1":
            # Its count of right predictions fails with the logits of virtual tokens.
            names = [name for name in names if "tuning" not in name]
        results = [result_of(name, settings, folder) for name in names for settings in ways]
    assert len({result.outcome.verdict for result in results}) == 1, [result.outcome for result in results]
    return results[0]


def result_of(name: str, settings: dict[str, Any], folder: str) -> tiny.TrainingResult:
    # The cache of a prefix and gradient checkpointing exclude one another.
    made = flattened_runs.two_steps(MODELS[name](folder), tiny.tokenizer(), gradient_checkpointing=False, **settings)
    model, first = MODELS[name](folder), made.steps[0]
    assert [len(step.micro_batches) for step in made.steps] == [2, 2]
    model.load_state_dict(first.weights)
    loss = sum(one.loss for one in first.micro_batches)
    right, wrong = (
        sum(float(sum_in(model, one.inputs)) for one in first.micro_batches) / count_of(first)
        for sum_in in (sum_of, sum_of_the_row)
    )
    outcome = judge(loss, right=right, wrong=wrong, model=name)
    if outcome.verdict is Verdict.FIXED:
        check(made, model)
        acted = tiny.acts(ID, TARGET, made)
        calls = sum(len(step.micro_batches) for step in made.steps) + len(made.evaluations)
        assert acted in (None, calls), f"the wrapper acts in {acted} of {calls} calls"
    return tiny.TrainingResult(outcome, loss, first.gradients)


def sum_of_the_row(model: Any, batch: Any) -> Any:
    """Return the sum of the cross-entropy of all labels as the model computes the row by itself."""
    import torch

    with torch.no_grad():
        logits = model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits[0]
    labels = batch["labels"][0, 1:]
    return torch.nn.functional.cross_entropy(logits[-len(labels) - 1 : -1], labels, reduction="sum")


def unaffected() -> tiny.TrainingResult:
    """Train a model that keeps sequences apart on flattened rows, and one that does not on padded ones."""
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            "apart": flattened_runs.two_steps(tiny.llama(folder, seed=0), tiny.tokenizer(), **FLATTENED),
            "padded": flattened_runs.two_steps(tiny.opt(folder, seed=0), tiny.tokenizer()),
        }
    for name, run in runs.items():
        assert not tiny.acts(ID, TARGET, run), f"the wrapper acts: {name}"
    return tiny.result_of_runs(runs, absent("the model keeps the sequences apart, or each has its row"))
