"""Train the real SFTTrainer with NEFTune two steps of two micro-batches, on padded rows and on flattened ones.

The same run without NEFTune, on a model that adds the paper's noise itself, has the right losses and gradients. With
the noise of the whole batch's length it has the wrong ones. All of them draw the same numbers.
"""

from __future__ import annotations

import dataclasses
import tempfile
from typing import Any

from trl_hotfix.authoring import absent, judge

import tiny

ID = "neftune-noise-by-padded-length"
TARGET = "trl.trainer.sft_trainer:SFTTrainer.compute_loss"
OVERLAYS = ()
PARITY = False
VARIANTS = "a compiled run is left alone, and a test has an adapter"

ALPHA = 100.0
LENGTHS = (5, 9, 3, 7, 4, 8, 6, 3)
SETTINGS: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 2}
SETTINGS |= {"per_device_eval_batch_size": 2, "learning_rate": 1e-2, "gradient_checkpointing": False}


def rows_of(lengths: tuple[int, ...]) -> list[dict[str, str]]:
    return [
        {"text": " ".join(f"w{1 + (7 * row + 3 * place) % 9}" for place in range(length))}
        for row, length in enumerate(lengths)
    ]


def adds_noise(model: Any, *, by_sequence: bool) -> None:
    """Have the model add the noise of each sequence, or of the whole batch, in training."""
    import torch

    lengths: list[Any] = []

    def note(module: Any, args: Any, inputs: dict[str, Any]) -> None:
        ids, mask, positions = (inputs.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
        if not by_sequence:
            lengths[:] = [torch.full_like(ids, ids.shape[1])]
        elif positions is None:
            lengths[:] = [mask.sum(1, keepdim=True).expand(ids.shape)]
        else:
            (begins,) = torch.where(positions[0] == 0)
            of_sequences = torch.cat([begins, torch.tensor([ids.shape[1]])]).diff()
            lengths[:] = [of_sequences.repeat_interleave(of_sequences)[None]]

    def add(embeddings: Any, args: Any, output: Any) -> Any:
        if not embeddings.training:
            return output
        drawn = torch.zeros_like(output).uniform_(-1, 1)
        return output + drawn * ALPHA / (lengths[0] * output.shape[2]).sqrt()[..., None]

    model.register_forward_pre_hook(note, with_kwargs=True)
    model.get_input_embeddings().register_forward_hook(add)


def two_steps(noise: str, lengths: tuple[int, ...] = LENGTHS, **settings: Any) -> Any:
    """Train with the noise of transformers, ``by sequence``, ``by batch``, or with none."""
    import torch
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    if noise == "transformers":
        settings["neftune_noise_alpha"] = ALPHA
    dataset = Dataset.from_list(rows_of(lengths))
    with tempfile.TemporaryDirectory() as folder:
        model = tiny.llama(folder, seed=0)
        if noise.startswith("by "):
            adds_noise(model, by_sequence=noise == "by sequence")
        torch.manual_seed(0)
        trainer = tiny.trainer(
            tiny.stepwise(SFTTrainer),
            model=model,
            args=tiny.config(SFTConfig, **{**SETTINGS, **settings}),
            train_dataset=dataset,
            eval_dataset=dataset.select(range(2)),
            tokenizer=tiny.tokenizer(),
        )
        trainer.train()
        trainer.evaluate()
    return trainer


def layouts() -> dict[str, dict[str, Any]]:
    """Return the settings of each layout of a batch that this release has."""
    from trl import SFTConfig

    names = {field.name for field in dataclasses.fields(SFTConfig)}
    flattened = {"padding_free": True} | dict.fromkeys({"max_length"} & names, None)
    return {"padded": {}} | ({"flattened": flattened} if "padding_free" in names else {})


def train() -> tiny.TrainingResult:
    import trl

    if "compute_loss" not in vars(trl.SFTTrainer):
        return tiny.TrainingResult(absent("transformers computes the loss of this release"))
    runs: dict[str, Any] = {}
    sums = dict.fromkeys(("transformers", "by sequence", "by batch"), 0.0)
    for layout, settings in layouts().items():
        of_layout = {noise: two_steps(noise, **settings) for noise in sums}
        for noise, run in of_layout.items():
            sums[noise] += tiny.result_of_runs({layout: run}, None).loss or 0.0
        runs[layout] = of_layout["transformers"]
        measured, right = (tiny.result_of_runs({layout: of_layout[noise]}, None).gradients for noise in list(sums)[:2])
        differ = max(float((gradient - right[name]).abs().max()) for name, gradient in measured.items())
        if tiny.acts(ID, TARGET, runs[layout]) and differ > 1e-4:
            raise AssertionError(f"{layout}: gradients are off by {differ}")
    outcome = judge(sums["transformers"], right=sums["by sequence"], wrong=sums["by batch"])
    return tiny.result_of_runs(runs, outcome)


def unaffected() -> tiny.TrainingResult:
    """Train rows of one length with noise, and rows of several lengths without."""
    runs = {"one length": two_steps("transformers", (6,) * 8), "no noise": two_steps("none")}
    assert not tiny.acts(ID, TARGET, runs["no noise"]), "the wrapper acts without noise"
    return tiny.result_of_runs(runs, absent("each row is as long as its batch, or has no noise"))
