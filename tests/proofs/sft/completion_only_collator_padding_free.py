"""Train and evaluate the real SFTTrainer with the padding-free collator, and compare with the padded one.

The expected result is that of the same trainer with ``padding_free=False``: the loss, every gradient, the evaluation.
"""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trl_hotfix
from trl_hotfix.authoring import absent, judge

import tiny

ID = "completion-only-collator-padding-free"

OVERLAYS = ()
PARITY = False

RESPONSE = "w59"
PROMPT_AND_COMPLETION_LENGTHS = ((2, 3), (3, 6), (1, 2), (4, 3))


@dataclass
class EvaluatedRun(tiny.SftRun):
    """The first step and the evaluation of an SFT trainer."""

    eval_loss: float
    token_counts: list[Any]

    def difference(self, other: EvaluatedRun) -> float:
        """Return the largest difference of loss, gradients and evaluation loss."""
        assert self.token_counts == other.token_counts
        return max(super().difference(other), abs(self.eval_loss - other.eval_loss))


def one_step(model: Any, *, padding_free: bool, **settings: Any) -> EvaluatedRun:
    """Train one step on all rows at once, then evaluate."""
    import torch
    from datasets import Dataset
    from trl import DataCollatorForCompletionOnlyLM, SFTConfig, SFTTrainer

    tokenizer = tiny.tokenizer()
    # Lengths and words are chosen so that all sequences differ.
    texts = [
        f"{' '.join(f'w{(7 * row + place) % 50}' for place in range(prompt))} {RESPONSE} "
        + " ".join(f"w{(11 * row + 3 * place) % 50}" for place in range(completion))
        for row, (prompt, completion) in enumerate(PROMPT_AND_COMPLETION_LENGTHS)
    ]
    dataset = Dataset.from_dict({"text": texts})
    collator = DataCollatorForCompletionOnlyLM(
        tokenizer.encode(RESPONSE, add_special_tokens=False), tokenizer=tokenizer, padding_free=padding_free
    )
    # LoRA starts with random weights.
    torch.manual_seed(0)
    defaults = {
        "per_device_train_batch_size": len(texts),
        "per_device_eval_batch_size": len(texts),
        "max_seq_length": 32,
        "dataset_text_field": "text",
        "learning_rate": 0.0,
    }
    trainer = tiny.trainer(
        tiny.measured(SFTTrainer),
        model=model,
        args=tiny.config(SFTConfig, **{**defaults, **settings}),
        train_dataset=dataset,
        eval_dataset=dataset,
        data_collator=collator,
        tokenizer=tokenizer,
    )
    trainer.train()
    eval_loss = trainer.evaluate()["eval_loss"]
    token_counts = [entry["num_tokens"] for entry in trainer.state.log_history if "num_tokens" in entry]
    loss, gradients, batch = trainer.losses[0], trainer.step.gradients, trainer.batches[0]
    return EvaluatedRun(trainer, loss, gradients, batch, eval_loss, token_counts)


def train() -> tiny.TrainingResult:
    import torch
    import trl.trainer.utils

    collator_class = getattr(trl.trainer.utils, "DataCollatorForCompletionOnlyLM", None)
    if collator_class is None:
        return tiny.TrainingResult(absent("there is no DataCollatorForCompletionOnlyLM"))
    if "padding_free" not in collator_class.__init__.__code__.co_varnames:
        return tiny.TrainingResult(absent("DataCollatorForCompletionOnlyLM has no padding_free"))
    with tempfile.TemporaryDirectory() as folder:
        padded = one_step(tiny.llama(folder, seed=0), padding_free=False)
        flattened = one_step(tiny.llama(folder, seed=0), padding_free=True)
        wrong = loss_of_one_sequence(tiny.llama(folder, seed=0), padded.batch)
        difference = padded.difference(flattened)
        outcome = judge(flattened.loss, right=padded.loss, wrong=wrong, differs_by=difference)
        patched = trl_hotfix.status()[ID].state.value == "applied"
        assert outcome.verdict.value == ("fixed" if patched else "reproduced")
        assert patched == (difference < 1e-5), outcome
        assert len(flattened.batch["input_ids"]) == (len(PROMPT_AND_COMPLETION_LENGTHS) if patched else 1)
        if patched and not tiny.variant:
            assert torch.equal(flattened.batch["labels"], padded.batch["labels"])
            check_all_settings_equal_padding(folder)
            check_warning_is_logged_once(folder)
            check_separated_sequences_stay_flattened(folder)
    return tiny.TrainingResult(outcome, flattened.loss, flattened.gradients)


def loss_of_one_sequence(model: Any, batch: dict[str, Any]) -> float:
    """Return the mean loss of a padded batch if its rows form one sequence and each token attends to all before it."""
    import torch

    mask = batch["attention_mask"].bool()
    token_ids, labels = batch["input_ids"][mask][None], batch["labels"][mask]
    positions = torch.cat([torch.arange(int(row.sum())) for row in mask])[None]
    length = token_ids.shape[1]
    causal = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]
    with torch.no_grad():
        logits = model(token_ids, position_ids=positions, attention_mask=causal, use_cache=False).logits[0, :-1]
    return float(torch.nn.functional.cross_entropy(logits, labels[1:]))


def llama(folder: str, attention: str = "sdpa", *, use_cache: bool = True) -> Any:
    from transformers import AutoModelForCausalLM

    path = Path(folder, "llama-0")
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation=attention, use_cache=use_cache)


def check_all_settings_equal_padding(folder: str) -> None:
    checkpointing = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    for attention, use_cache, settings in itertools.product(("sdpa", "eager"), (True, False), ({}, checkpointing)):
        padded, flattened = (
            one_step(llama(folder, attention, use_cache=use_cache), padding_free=padding_free, **settings)
            for padding_free in (False, True)
        )
        difference = padded.difference(flattened)
        assert difference < 1e-5, (attention, use_cache, settings, difference)


def check_warning_is_logged_once(folder: str) -> None:
    _, messages = tiny.warnings_of(lambda: one_step(llama(folder), padding_free=True, max_steps=2))
    assert len(messages) == 1
    assert "padding_free is switched off" in messages[0]
    _, messages = tiny.warnings_of(lambda: one_step(llama(folder), padding_free=False))
    assert messages == []


def check_separated_sequences_stay_flattened(folder: str) -> None:
    """Check the batches of a trainer whose model claims to have FlashAttention, which itself needs a GPU."""
    from datasets import Dataset
    from trl import DataCollatorForCompletionOnlyLM, SFTConfig, SFTTrainer

    tokenizer = tiny.tokenizer()
    dataset = Dataset.from_dict({"text": [f"w1 {RESPONSE} w2", f"w3 w4 {RESPONSE} w5 w6"]})
    model = llama(folder)
    for attention, rows in (("flash_attention_2", 1), ("sdpa", 2)):
        # The setter of transformers 4.53 would ask for the package.
        vars(model.config).update({"_attn_implementation_internal": attention})
        collator = DataCollatorForCompletionOnlyLM(
            tokenizer.encode(RESPONSE, add_special_tokens=False), tokenizer=tokenizer, padding_free=True
        )
        trainer, messages = tiny.warnings_of(
            lambda collator=collator: tiny.trainer(
                SFTTrainer,
                model=model,
                args=tiny.config(SFTConfig, max_seq_length=32, dataset_text_field="text"),
                train_dataset=dataset,
                data_collator=collator,
                tokenizer=tokenizer,
            )
        )
        batch = next(iter(trainer.get_train_dataloader()))
        assert (len(batch["input_ids"]), len(messages)) == (rows, rows - 1)


def unaffected() -> tiny.TrainingResult:
    """Train with the collator as it pads, and with the default collator."""
    rows = [{"text": f"w{index} w{index + 1}" + " w9" * index} for index in range(4)]
    with tempfile.TemporaryDirectory() as folder:
        runs: dict[str, tiny.SftRun] = {"padded": one_step(tiny.llama(folder, seed=0), padding_free=False)}
    runs["default collator"] = tiny.sft_step(rows)
    return tiny.TrainingResult(absent("whom it does not hit"), *tiny.several(runs))
