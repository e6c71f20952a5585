"""The proof: one step and one evaluation of the real SFTTrainer, the collator without padding and the same padded.

What is right is what the same trainer does with ``padding_free=False``: the loss, every gradient, the evaluation.
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import trl_hotfix
from trl_hotfix.authoring import absent, judge

import tiny

ID = "completion-only-collator-padding-free"

OVERLAYS = ()
PARITY = False

RESPONSE = "w59"
PROMPTS_AND_COMPLETIONS = ((2, 3), (3, 6), (1, 2), (4, 3))


def one_step(model: Any, *, padding_free: bool, **settings: Any) -> tuple[Any, Any, dict[str, Any]]:
    """The trainer after one step, the gradients of it, and the batch and the losses that it saw."""
    import torch
    from datasets import Dataset
    from trl import DataCollatorForCompletionOnlyLM, SFTConfig, SFTTrainer

    seen: dict[str, Any] = {}

    class Measured(SFTTrainer):  # type: ignore[misc, valid-type]
        def compute_loss(self, model, inputs, *args, **kwargs):
            batch = {key: value for key, value in inputs.items() if hasattr(value, "shape")}
            result = super().compute_loss(model, inputs, *args, **kwargs)
            loss = result[0] if isinstance(result, tuple) else result
            seen.setdefault("batch", batch)
            seen.setdefault("loss", float(loss.detach()))
            return result

    words = tiny.tokenizer()
    # Lengths and words are such that every sequence differs from every other.
    rows = [
        f"{' '.join(f'w{(7 * row + place) % 50}' for place in range(prompt))} {RESPONSE} "
        + " ".join(f"w{(11 * row + 3 * place) % 50}" for place in range(completion))
        for row, (prompt, completion) in enumerate(PROMPTS_AND_COMPLETIONS)
    ]
    dataset = Dataset.from_dict({"text": rows})
    collator = DataCollatorForCompletionOnlyLM(
        words.encode(RESPONSE, add_special_tokens=False), tokenizer=words, padding_free=padding_free
    )
    # LoRA starts with random weights.
    torch.manual_seed(0)
    step = tiny.FirstStep(model)
    usual = {
        "per_device_train_batch_size": len(rows),
        "per_device_eval_batch_size": len(rows),
        "max_seq_length": 32,
        "dataset_text_field": "text",
        "learning_rate": 0.0,
    }
    trainer = tiny.trainer(
        Measured,
        model=model,
        args=tiny.config(SFTConfig, **{**usual, **settings}),
        train_dataset=dataset,
        eval_dataset=dataset,
        data_collator=collator,
        tokenizer=words,
    )
    trainer.train()
    seen["eval"] = trainer.evaluate()["eval_loss"]
    seen["counted"] = [log["num_tokens"] for log in trainer.state.log_history if "num_tokens" in log]
    return trainer, step, seen


def difference(one: tuple[Any, Any, dict[str, Any]], other: tuple[Any, Any, dict[str, Any]]) -> float:
    """The largest of loss, gradients and evaluation."""
    (_, step, seen), (_, its_step, its_seen) = one, other
    assert seen["counted"] == its_seen["counted"]
    assert step.gradients
    assert step.gradients.keys() == its_step.gradients.keys()
    gradients = (float((its_step.gradients[name] - value).abs().max()) for name, value in step.gradients.items())
    return max(abs(seen["loss"] - its_seen["loss"]), abs(seen["eval"] - its_seen["eval"]), *gradients)


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
        (_, _, right), (_, step, seen) = padded, flattened
        wrong = loss_of_one_sequence(tiny.llama(folder, seed=0), right["batch"])
        outcome = judge(seen["loss"], right=right["loss"], wrong=wrong, differs_by=difference(padded, flattened))
        patched = trl_hotfix.status()[ID].state.value == "applied"
        assert outcome.verdict.value == ("fixed" if patched else "reproduced")
        assert patched == (outcome.numbers["differs_by"] < 1e-5), outcome
        assert len(seen["batch"]["input_ids"]) == (len(PROMPTS_AND_COMPLETIONS) if patched else 1)
        if patched and not tiny.variant:
            assert torch.equal(seen["batch"]["labels"], right["batch"]["labels"])
            padding_is_what_all_of_them_give(folder)
            it_is_said_once(folder)
            what_is_kept_apart_stays_flattened(folder)
    return tiny.TrainingResult(outcome, seen["loss"], step.gradients)


def loss_of_one_sequence(model: Any, batch: dict[str, Any]) -> float:
    """The mean over the labels of a padded batch, if its rows stand in one and each token sees all before it."""
    import torch

    kept = batch["attention_mask"].bool()
    ids, labels = batch["input_ids"][kept][None], batch["labels"][kept]
    positions = torch.cat([torch.arange(int(row.sum())) for row in kept])[None]
    length = ids.shape[1]
    causal = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]
    with torch.no_grad():
        logits = model(ids, position_ids=positions, attention_mask=causal, use_cache=False).logits[0, :-1]
    return float(torch.nn.functional.cross_entropy(logits, labels[1:]))


def llama(folder: str, attention: str = "sdpa", *, use_cache: bool = True) -> Any:
    from transformers import AutoModelForCausalLM

    path = Path(folder, "llama-0")
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation=attention, use_cache=use_cache)


def padding_is_what_all_of_them_give(folder: str) -> None:
    how = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    for attention, use_cache, settings in itertools.product(("sdpa", "eager"), (True, False), ({}, how)):
        runs = [
            one_step(llama(folder, attention, use_cache=use_cache), padding_free=padding_free, **settings)
            for padding_free in (False, True)
        ]
        found = difference(*runs)
        assert found < 1e-5, (attention, use_cache, settings, found)


def it_is_said_once(folder: str) -> None:
    _, said = tiny.warnings_of(lambda: one_step(llama(folder), padding_free=True, max_steps=2))
    assert len(said) == 1
    assert "padding_free is switched off" in said[0]
    _, said = tiny.warnings_of(lambda: one_step(llama(folder), padding_free=False))
    assert said == []


def what_is_kept_apart_stays_flattened(folder: str) -> None:
    """FlashAttention needs a GPU: a trainer is made whose model says that it has it, and its batch is looked at."""
    from datasets import Dataset
    from trl import DataCollatorForCompletionOnlyLM, SFTConfig, SFTTrainer

    words = tiny.tokenizer()
    dataset = Dataset.from_dict({"text": [f"w1 {RESPONSE} w2", f"w3 w4 {RESPONSE} w5 w6"]})
    model = llama(folder)
    for attention, rows in (("flash_attention_2", 1), ("sdpa", 2)):
        # transformers 4.53 has a setter that would ask for the package.
        vars(model.config).update({"_attn_implementation_internal": attention})
        collator = DataCollatorForCompletionOnlyLM(
            words.encode(RESPONSE, add_special_tokens=False), tokenizer=words, padding_free=True
        )
        made, said = tiny.warnings_of(
            lambda collator=collator: tiny.trainer(
                SFTTrainer,
                model=model,
                args=tiny.config(SFTConfig, max_seq_length=32, dataset_text_field="text"),
                train_dataset=dataset,
                data_collator=collator,
                tokenizer=words,
            )
        )
        batch = next(iter(made.get_train_dataloader()))
        assert (len(batch["input_ids"]), len(said)) == (rows, rows - 1)
