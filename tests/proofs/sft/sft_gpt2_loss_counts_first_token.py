"""Train GPT-2 two steps of two micro-batches with the real SFTTrainer, then evaluate; and the first GPT, with LoRA.

The expected loss of a step is the mean cross-entropy of all its tokens but the first of each row, one row at a time and
without TRL's code; the expected gradients are those of that loss. The wrong loss is divided by the number of all
tokens. A step and an evaluation of rows of one token predict nothing: loss and gradients are 0.
"""

from __future__ import annotations

import inspect
from typing import Any

from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Outcome, Verdict

import tiny

ID = "sft-gpt2-loss-counts-first-token"
TARGET = "trl.trainer.sft_trainer:SFTTrainer._get_num_items_in_batch"
OVERLAYS = ()
PARITY = False
VARIANTS = "it is for classes of a name, which the variants' models lack; the proof has an adapter"

LENGTHS = (5, 9, 3, 7, 4, 8, 6, 3)
ROWS = [
    {"input_ids": [3 + (7 * row + 3 * place) % 60 for place in range(length)]} for row, length in enumerate(LENGTHS)
]
SETTINGS = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 2, "max_length": 32}
SETTINGS |= {"completion_only_loss": False, "gradient_checkpointing": False}


def gpt2(*, soft: bool = False) -> Any:
    """Return a GPT-2 of two layers without dropout, or one with three virtual tokens."""
    import peft
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    ends = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    without_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(vocab_size=64, n_positions=64, n_embd=16, n_layer=2, n_head=2, **ends, **without_dropout)
    model = GPT2LMHeadModel(config)
    if not soft:
        return model
    return peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


def first_gpt_with_an_adapter() -> Any:
    import peft
    import torch
    from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel

    torch.manual_seed(0)
    without_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = OpenAIGPTConfig(vocab_size=64, n_positions=64, n_embd=16, n_layer=2, n_head=2, **without_dropout)
    lora = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    model = peft.get_peft_model(OpenAIGPTLMHeadModel(config), lora)
    tiny.set_adapters(model)
    return model


def two_steps(model: Any, rows: list[dict[str, list[int]]] = ROWS, **arguments: Any) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    dataset = Dataset.from_list(rows)
    settings = {**SETTINGS, "loss_type": "nll"} if "compute_loss_func" in arguments else SETTINGS
    trainer = tiny.trainer(
        tiny.stepwise(SFTTrainer),
        model=model,
        args=tiny.config(SFTConfig, **settings),
        train_dataset=dataset,
        eval_dataset=dataset.select(range(2)),
        tokenizer=tiny.tokenizer(),
        **arguments,
    )
    trainer.train()
    trainer.evaluate()
    return trainer


def sum_of(model: Any, batch: Any) -> Any:
    """Return the sum of the cross-entropy of every token but the first of each row, one row at a time."""
    import torch

    rows = [ids[mask.bool()] for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    return sum(
        torch.nn.functional.cross_entropy(model(row[None]).logits[0, :-1].float(), row[1:], reduction="sum")
        for row in rows
    )


def train() -> tiny.TrainingResult:
    from transformers import Trainer

    if "_loss_shifts_labels" not in inspect.unwrap(Trainer.__init__).__code__.co_names:
        return tiny.TrainingResult(absent("this transformers counts all first tokens"))
    models = {"GPT-2": gpt2, "the first GPT": first_gpt_with_an_adapter}
    runs = {name: two_steps(made()) for name, made in models.items()}
    outcomes = [judged(run, models[name]()) for name, run in runs.items()]
    assert len({outcome.verdict for outcome in outcomes}) == 1, outcomes
    nothing = two_steps(gpt2(), [{"input_ids": row["input_ids"][:1]} for row in ROWS])
    micro_batches = [part for step in nothing.steps for part in step.micro_batches] + nothing.evaluations
    assert not any(part.loss for part in micro_batches), "rows of one token have a loss"
    assert not any(gradient.any() for step in nothing.steps for gradient in step.gradients.values())
    return tiny.result_of_runs(runs, outcomes[0])


def judged(trainer: Any, model: Any) -> Outcome:
    assert [len(step.micro_batches) for step in trainer.steps] == [2, 2]
    outcomes = []
    for step in trainer.steps:
        tokens, rows = (sum(int(one.inputs["attention_mask"].sum()) for one in step.micro_batches), 4)
        model.load_state_dict(step.weights)
        total = sum(float(sum_of(model, one.inputs).detach()) for one in step.micro_batches)
        loss = sum(one.loss for one in step.micro_batches)
        outcomes.append(judge(loss, right=total / (tokens - rows), wrong=total / tokens))
        count = tokens - rows if outcomes[-1].verdict is Verdict.FIXED else tokens
        expected = tiny.expected_gradients(
            model,
            step.weights,
            lambda model, step=step, count=count: sum(sum_of(model, one.inputs) for one in step.micro_batches) / count,
        )
        assert step.difference(expected) < 1e-5, f"gradients differ by {step.difference(expected)}"
    assert len({outcome.verdict for outcome in outcomes}) == 1, outcomes
    if outcomes[0].verdict is Verdict.FIXED:
        model.load_state_dict(trainer.model.state_dict())
        (one,) = trainer.evaluations
        mask = one.inputs["attention_mask"]
        right = float(sum_of(model, one.inputs).detach()) / int(mask.sum() - len(mask))
        assert abs(one.loss - right) < 1e-5, f"an evaluation has the loss {one.loss}: expected {right}"
        acted = tiny.acts(ID, TARGET, trainer)
        # Of two steps, and of the evaluation where it is divided by a count.
        assert acted in (None, 2, 3), f"the wrapper acts in {acted} counts"
    return outcomes[0]


def unaffected() -> tiny.TrainingResult:
    """Train virtual tokens of GPT-2, which predict first tokens, and GPT-2 with a loss of the user's."""

    def total(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        return outputs.logits.logsumexp(-1).sum() / (1 if num_items_in_batch is None else num_items_in_batch)

    runs = {"virtual tokens": two_steps(gpt2(soft=True)), "own loss": two_steps(gpt2(), compute_loss_func=total)}
    for name, run in runs.items():
        assert not tiny.acts(ID, TARGET, run), f"the wrapper acts: {name}"
    return tiny.result_of_runs(runs, absent("the count is right, or it is for a loss of the user's"))
