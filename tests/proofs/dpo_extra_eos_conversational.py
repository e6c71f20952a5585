"""Train one step with the real DPOTrainer on conversations, without padding between prompt and completion.

The expected loss is that of the same models, by equation 7 of the paper (arXiv:2305.18290) and without TRL's code, on
the tokens that the chat template gives. The wrong loss is that with one more end of sequence.
"""

from __future__ import annotations

import tempfile
from typing import Any

import trl_hotfix
from trl_hotfix.authoring import absent, judge

import tiny

ID = "dpo-extra-eos-conversational"

OVERLAYS = ()
PARITY = True
DATA = True
VARIANTS = "the data are prepared before the model is compiled, and whatever part of it is trained"

BETA = 0.5


def preferences(*, texts: bool = False) -> list[dict[str, Any]]:
    """Return rows of conversations, or of their texts alone."""
    rows = []
    for index in range(4):
        messages = {
            "prompt": ("user", f"w{index} w{index + 1}"),
            "chosen": ("assistant", " ".join(f"w{(7 * index + 3 * place) % 60}" for place in range(2 + index % 2))),
            "rejected": ("assistant", " ".join(f"w{(5 * index + 11 * place) % 60}" for place in range(3))),
        }
        rows.append(
            {
                name: content if texts else [{"role": role, "content": content}]
                for name, (role, content) in messages.items()
            }
        )
    return rows


def one_step(rows: list[dict[str, Any]], *, tokenizer: Any = None, **settings: Any) -> Any:
    """Return the trainer after one step."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    defaults = {"per_device_train_batch_size": len(rows), "beta": BETA, "max_length": 48, "max_prompt_length": 24}
    defaults |= {name: tempfile.gettempdir() + "/dpo" for name in ("output_dir", "logging_dir")}
    with tempfile.TemporaryDirectory() as folder:
        trainer = tiny.trainer(
            tiny.measured(DPOTrainer),
            model=tiny.llama(folder, seed=0),
            ref_model=tiny.llama(folder, seed=1),
            args=tiny.config(DPOConfig, **{**defaults, **settings}),
            train_dataset=Dataset.from_list(rows),
            eval_dataset=Dataset.from_list(rows),
            tokenizer=tokenizer if tokenizer is not None else tiny.chat_tokenizer(),
        )
        trainer.train()
        return trainer


def loss_by_formula(ends: int) -> float:
    """Return the loss of the untrained models on the template's tokens, with ``ends`` end tokens per completion."""
    import torch

    tokenizer = tiny.tokenizer()
    batch: dict[str, Any] = {}
    for name in ("prompt", "chosen", "rejected"):
        contents = [row[name] for row in preferences(texts=True)]
        template = "w58 {} <eos> w59" if name == "prompt" else "{}" + " <eos>" * ends
        token_ids = [torch.tensor(tokenizer(template.format(content))["input_ids"]) for content in contents]
        masks = [torch.ones_like(sequence) for sequence in token_ids]
        batch[f"{name}_input_ids"] = torch.nn.utils.rnn.pad_sequence(token_ids, batch_first=True)
        batch[f"{name}_attention_mask"] = torch.nn.utils.rnn.pad_sequence(masks, batch_first=True)
    with tempfile.TemporaryDirectory() as folder:
        models = tiny.llama(folder, seed=0), tiny.llama(folder, seed=1)
        policy, reference = (tiny.preference_log_probs(model, batch) for model in models)
    return tiny.dpo_loss(BETA, policy, reference)


def train() -> tiny.TrainingResult:
    from trl.trainer import dpo_trainer

    tokenize_row = getattr(dpo_trainer.DPOTrainer, "tokenize_row", None)
    if tokenize_row is None or "processing_class" not in tokenize_row.__code__.co_varnames:
        return tiny.TrainingResult(absent("the data are prepared in another way"))
    patched = trl_hotfix.status()[ID].state.value == "applied"
    trainer = one_step(preferences())
    outcome = judge(trainer.losses[0], right=loss_by_formula(1), wrong=loss_by_formula(2))
    ends = [row[f"{side}_input_ids"].count(1) for side in ("chosen", "rejected") for row in trainer.eval_dataset]
    assert set(ends) == {1 if outcome.verdict.value == "fixed" else 2}
    if patched:
        check_truncation()
    return tiny.TrainingResult(outcome, trainer.losses[0], trainer.step.gradients)


def check_truncation() -> None:
    """Check that completions of three to four tokens, cut to any length, keep their first tokens."""
    complete = one_step(preferences()).train_dataset
    for max_length in (2, 3, 4, 5):
        truncated = one_step(preferences(), max_completion_length=max_length).train_dataset
        for side in ("chosen_input_ids", "rejected_input_ids"):
            assert [row[side] for row in truncated] == [row[side][:max_length] for row in complete]


def unaffected() -> tiny.TrainingResult:
    """Train on texts, and with a template that leaves the end of sequence to the trainer."""
    template_without_end = (
        "{% for message in messages %}{{ 'w58 ' if message['role'] == 'user' else 'w59 ' }}{{ message['content'] }} "
        "{% endfor %}{% if add_generation_prompt %}{{ 'w59 ' }}{% endif %}"
    )
    trainers = {
        "texts": one_step(preferences(texts=True)),
        "no end": one_step(preferences(), tokenizer=tiny.chat_tokenizer(template_without_end)),
    }
    gradients = {
        f"{run} {name}": gradient
        for run, trainer in trainers.items()
        for name, gradient in trainer.step.gradients.items()
    }
    loss = sum(trainer.losses[0] for trainer in trainers.values())
    return tiny.TrainingResult(absent("whom it does not hit"), loss, gradients)
