"""Train a stage of SFT whose padding token is the end of sequence, save it, and train on with SFT and DPO.

The second stage has two steps of two micro-batches of unequal length, with ends in the middle of its texts. Expected
are losses and gradients of the same model whose embedding has no ``padding_idx``, bit by bit, and for SFT those of
the formula.
"""

from __future__ import annotations

import tempfile
from importlib import metadata
from typing import Any

import trl_hotfix
from trl_hotfix.authoring import absent, judge
from trl_hotfix.matching.versions import in_range

import tiny
from tiny.data import preferences_of_several_lengths
from tiny.gkd_steps import words
from tiny.measuring import gradient_differences

ID = "eos-row-frozen-in-second-stage"
OVERLAYS = ()
PARITY = False
VARIANTS = {"lora": "with an adapter the embedding is frozen"}

METHODS = ("SFT", "DPO")
END, ROW = "<eos>", 1


def train() -> tiny.TrainingResult:
    if not in_range(metadata.version("trl"), ">=0.24.0"):
        return tiny.TrainingResult(absent("the trainers have no base in TRL"))
    patched = trl_hotfix.status()[ID].state.value == "applied"
    measured, right, runs = 0.0, 0.0, {}
    with tempfile.TemporaryDirectory() as folder:
        first = trained("SFT", tiny.llama(folder, seed=0), pads_with_end=True)
        assert first.steps[0].gradients[_embedding(first)][ROW].any(), "the first stage has the bug"
        first.save_model(f"{folder}/first")
        for method in METHODS:
            runs[method] = run = trained(method, loaded(f"{folder}/first"), pads_with_end=True)
            expected = trained(method, loaded(f"{folder}/first", freezes=False), pads_with_end=True)
            assert _acts(expected) in (None, 0)
            assert _acts(run) in (None, 1)
            if patched:
                assert same(run, expected), method
                if method == "SFT":
                    assert difference_from_formula(run, loaded(f"{folder}/first", freezes=False)) < 1e-5
            measured, right = measured + _length(run), right + _length(expected)
    return tiny.result_of_runs(runs, judge(measured, right=right, wrong=0.0))


def unaffected() -> tiny.TrainingResult:
    """Train with a padding token of its own, and an adapter of a model whose padding token is the end."""
    runs = {}
    with tempfile.TemporaryDirectory() as folder:
        for method in METHODS:
            runs[method] = trained(method, tiny.llama(folder, seed=0))
        model = tiny.llama(folder, seed=0)
        model.get_input_embeddings().padding_idx = ROW
        runs["LoRA"] = trained("SFT", model, pads_with_end=True, peft_config=tiny.lora())
    assert not any(_acts(run) for run in runs.values())
    return tiny.result_of_runs(runs, absent("no row of an end that is trained lacks its gradient"))


def loaded(folder: str, *, freezes: bool = True) -> Any:
    """Load the first stage. ``freezes``: as transformers makes its embedding."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.get_input_embeddings().padding_idx == ROW
    if not freezes:
        model.get_input_embeddings().padding_idx = None
    return model


def same(one: Any, other: Any) -> bool:
    """Return whether losses and gradients of all steps, and the losses of the evaluation, are equal."""
    losses = [
        [part.loss for part in (*(part for step in run.steps for part in step.micro_batches), *run.evaluations)]
        for run in (one, other)
    ]
    pairs = [(left.gradients, right.gradients) for left, right in zip(one.steps, other.steps, strict=True)]
    return losses[0] == losses[1] and all(
        left.keys() == right.keys() and all(left[name].equal(right[name]) for name in left) for left, right in pairs
    )


def difference_from_formula(run: Any, model: Any) -> float:
    """Return by how much a gradient of SFT, as a share of all gradients, differs from that of its tokens' sum.

    What a release divides by is the business of other patches.
    """
    import torch

    differences = []
    for step in run.steps:
        batches = [part.inputs for part in step.micro_batches]

        def loss(model: Any, batches: Any = batches) -> Any:
            losses = []
            for batch in batches:
                logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
                scores, labels = logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
                losses.append(torch.nn.functional.cross_entropy(scores, labels, reduction="sum"))
            return torch.stack(losses).sum()

        gradients = tiny.expected_gradients(model, step.weights, loss)
        differences += gradient_differences(shares(step.gradients), shares(gradients))
    return max(differences)


def shares(gradients: dict[str, Any]) -> dict[str, Any]:
    length = sum(float(value.square().sum()) for value in gradients.values()) ** 0.5
    return {name: value / length for name, value in gradients.items()}


def trained(method: str, model: Any, *, pads_with_end: bool = False, **arguments: Any) -> Any:
    import torch
    from datasets import Dataset

    trainer_class, config_class = tiny.classes(method)
    tokenizer = tiny.tokenizer()
    if pads_with_end:
        tokenizer.pad_token = END
    # An adapter begins at random.
    torch.manual_seed(0)
    if method == "SFT":
        data = Dataset.from_list([{"text": f"{words(n, 3 + n)} {END} {words(n, 3)}"} for n in range(8)])
    else:
        data = preferences_of_several_lengths().map(lambda row: {"prompt": f"{row['prompt']} {END} w9"})
    trainer = tiny.trainer(
        tiny.stepwise(trainer_class),
        model=model,
        args=tiny.config(config_class, max_steps=2, gradient_accumulation_steps=2, max_length=32),
        train_dataset=data,
        eval_dataset=data.select(range(4)),
        tokenizer=tokenizer,
        **arguments,
    )
    trainer.train()
    trainer.evaluate()
    return trainer


def _embedding(run: Any) -> str:
    (name,) = (name for name in run.steps[0].gradients if name.endswith("embed_tokens.weight"))
    return name


def _length(run: Any) -> float:
    """Return the length of the gradients of the end's row in all steps."""
    return sum(float(step.gradients[_embedding(run)][ROW].norm()) for step in run.steps)


def _acts(trainer: Any) -> int | None:
    for base in type(trainer).__mro__:
        acted = tiny.acts(ID, f"{base.__module__}:{base.__name__}.create_optimizer", trainer)
        if acted is not None:
            return acted
    return None
