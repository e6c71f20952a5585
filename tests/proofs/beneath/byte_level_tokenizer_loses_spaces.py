"""Train two steps of two micro-batches of texts with spaces and line breaks, with a byte-level ``LlamaTokenizer``.

SFT's losses and gradients are compared with the cross-entropy of the characters, with spaces and line breaks and
without. DPO and GRPO train bit by bit as with the tokenizer of ``tokenizer.json``.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import trl_hotfix
from trl_hotfix.authoring import absent, judge
from trl_hotfix.matching.versions import in_range

import tiny
from tiny import grpo_runs, sft_steps

ID = "byte-level-tokenizer-loses-spaces"
OVERLAYS = ()
PARITY = False
DATA = True
VARIANTS = "the data are prepared before the model is compiled, and whatever part of it is trained"

PAD, END = 0, 1
CHARACTERS = [*"w0123456789ĠĊabcdefghijklmnopqrstuvxyzABCDEFGHIJKLMNOP"]
VOCABULARY = {token: number for number, token in enumerate(["<pad>", "<eos>", *CHARACTERS, "Ġw"])}
TEXTS = [f"w{number} w{number + 1}" + f"\nw{number} w7" * (number % 3) for number in range(8)]


def train() -> tiny.TrainingResult:
    from importlib import metadata

    import transformers

    if in_range(metadata.version("trl"), "<0.23.0") or in_range(transformers.__version__, "<5.0"):
        return tiny.TrainingResult(absent("transformers 4 reads tokenizer.json, and older releases are out of range"))
    runs = {method: trained(method, "LlamaTokenizer") for method in ("DPO", "GRPO")}
    outcome = None
    # transformers 5.2 to 5.5 divides SFT's gradient twice, so it is not that of the formula.
    if not in_range(transformers.__version__, ">=5.2,<5.5.4"):
        rows = [{"text": text} for text in TEXTS]
        runs["SFT"], model = sft_steps.sft_steps(rows, tokenizer("LlamaTokenizer"))
        kinds = {"right": lambda row: row_of(row, right_ids), "wrong": wrong_row}
        outcome = sft_steps.judged_sft_steps(runs["SFT"], model, kinds)
    patched = trl_hotfix.status()[ID].state.value == "applied"
    for method, run in runs.items():
        acts = tiny.acts(ID, f"trl.trainer.{method.lower()}_trainer:{method}Trainer.__init__", run)
        assert acts == (1 if patched else None), (method, acts)
    equal = {method: same(runs[method], trained(method, "PreTrainedTokenizerFast")) for method in ("DPO", "GRPO")}
    assert set(equal.values()) == {patched}, (equal, patched)
    return tiny.result_of_runs(runs, outcome or judge(float(equal["DPO"]), right=1.0, wrong=0.0))


def unaffected() -> tiny.TrainingResult:
    """Train with the tokenizer of ``tokenizer.json``."""
    rows = [{"text": text} for text in TEXTS]
    sft, _ = sft_steps.sft_steps(rows, tokenizer("PreTrainedTokenizerFast"))
    runs = {"SFT": sft, **{method: trained(method, "PreTrainedTokenizerFast") for method in ("DPO", "GRPO")}}
    for method, run in runs.items():
        assert not tiny.acts(ID, f"trl.trainer.{method.lower()}_trainer:{method}Trainer.__init__", run), method
    return tiny.result_of_runs(runs, absent("the tokenizer is that of tokenizer.json"))


def tokenizer(class_name: str, **settings: Any) -> Any:
    """Return a tokenizer of this class of a byte-level ``tokenizer.json``."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    shipped = Tokenizer(models.BPE(VOCABULARY, [("Ġ", "w")]))
    shipped.pre_tokenizer, shipped.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    # One folder for all, which stays: the patch reads tokenizer.json when a trainer is made.
    folder = Path(tempfile.gettempdir(), ID)
    folder.mkdir(exist_ok=True)
    shipped.save(str(folder / "tokenizer.json"))
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return getattr(transformers, class_name).from_pretrained(str(folder), **settings)


def right_ids(text: str) -> list[int]:
    characters = text.replace("\n", "Ċ").replace(" w", "#")
    return [VOCABULARY["Ġw" if character == "#" else character] for character in characters]


def row_of(row: sft_steps.Row, ids_of: Any) -> sft_steps.Row:
    """Return the row of the text that ``row`` is of, as ``ids_of`` reads it."""
    ids = row[0]
    (text,) = (text for text in TEXTS if ids[:-1] in (right_ids(text), wrong_ids(text)))
    assert ids[-1] == END
    found = [*ids_of(text), END]
    return found, found


def wrong_ids(text: str) -> list[int]:
    return [VOCABULARY[character] for character in text if character not in " \n"]


def wrong_row(row: sft_steps.Row) -> sft_steps.Row:
    return row_of(row, wrong_ids)


def same(one: Any, other: Any) -> bool:
    """Return whether the weights before each step and in the end, the gradients and all losses are equal."""
    steps = zip(one.steps, other.steps, strict=True)
    pairs = [(getattr(left, name), getattr(right, name)) for left, right in steps for name in ("weights", "gradients")]
    pairs.append((one.model.state_dict(), other.model.state_dict()))
    losses = [
        [part.loss for step in run.steps for part in step.micro_batches] + [part.loss for part in run.evaluations]
        for run in (one, other)
    ]
    return losses[0] == losses[1] and all(
        left.keys() == right.keys() and all(left[name].equal(right[name]) for name in left) for left, right in pairs
    )


def trained(method: str, class_name: str) -> Any:
    """Train two steps, and evaluate, and return the trainer."""
    import torch
    from datasets import Dataset

    trainer_class, config_class = tiny.classes(method)
    recorder = tiny.stepwise(trainer_class)
    settings: dict[str, Any] = {"max_steps": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-2}
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        model = tiny.llama(folder, seed=0)
        if method == "GRPO":
            words = tokenizer(class_name, padding_side="left")
            with mock.patch.object(grpo_runs, "left_padding_tokenizer", return_value=words):
                trainer = tiny.grpo(
                    recorder, model, config_class, prompts=TEXTS, reward_funcs=lengths_of, beta=0.1, **settings
                )
            trainer.train()
            return trainer
        pairs = [{"prompt": text, "chosen": " w3 w4", "rejected": "\nw5"} for text in TEXTS]
        data = Dataset.from_list(pairs)
        # The fingerprint of a dataset has the config in it, so folders must not have new names each time.
        settings |= {name: str(Path(tempfile.gettempdir(), "dpo")) for name in ("output_dir", "logging_dir")}
        trainer = tiny.trainer(
            recorder,
            model=model,
            ref_model=tiny.llama(folder, seed=1),
            args=tiny.config(config_class, max_length=32, per_device_train_batch_size=2, **settings),
            train_dataset=data,
            eval_dataset=data.select(range(2)),
            tokenizer=tokenizer(class_name),
        )
        trainer.train()
        trainer.evaluate()
        return trainer


def lengths_of(completions: list[str], **_: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]
