"""Train two steps of two micro-batches, and evaluate, with the real DPOTrainer on conversations.

Losses and gradients are compared with the formula on the tokens that the chat template gives. Wrong are those with one
more end of sequence. All prompts have the same length: otherwise 0.12 cuts off the last token of some rows.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any

import trl_hotfix
from trl_hotfix.authoring import absent
from trl_hotfix.model import Verdict

import tiny
from tiny import dpo_steps
from tiny.grpo_steps import judged_steps, several_runs

ID = "dpo-extra-eos-conversational"

OVERLAYS = ()
PARITY = True
DATA = True
VARIANTS = "the data are prepared before the model is compiled, and whatever part of it is trained"

EOS = 1
SIDES = ("chosen", "rejected")


def preferences(*, texts: bool = False) -> Any:
    """Return rows of conversations, or of their texts alone."""
    from datasets import Dataset

    rows = []
    for index in range(8):
        messages = {
            "prompt": ("user", f"w{index} w{index + 1}"),
            "chosen": ("assistant", " ".join(f"w{(7 * index + 3 * place) % 58}" for place in range(2 + index % 2))),
            "rejected": ("assistant", " ".join(f"w{(5 * index + 11 * place) % 58}" for place in range(3 + index % 3))),
        }
        rows.append(
            {
                name: content if texts else [{"role": role, "content": content}]
                for name, (role, content) in messages.items()
            }
        )
    return Dataset.from_list(rows)


def steps(data: Any, words: Any = None) -> tiny.FormulaSteps:
    return dpo_steps.dpo_steps(
        one_end_or_two, reference=1, train_dataset=data, words=words or tiny.chat_tokenizer(), **folders()
    )


def folders() -> dict[str, Any]:
    # The arguments go into the fingerprints of the data.
    return dict.fromkeys(("output_dir", "logging_dir"), f"{tempfile.gettempdir()}/dpo")


def one_end_or_two(policy: Any, reference: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the loss where each completion of the batch has one end of sequence, and where it has two."""
    batches = {name: with_ends(batch, ends) for name, ends in {"right": 1, "wrong": 2}.items()}
    return {
        name: dpo_steps.reference_or_policy(policy, reference, sequences)["right"]
        for name, sequences in batches.items()
    }


def with_ends(batch: Mapping[str, Any], ends: int) -> dict[str, Any]:
    import torch

    changed = dict(batch)
    for side in SIDES:
        rows = [torch.cat([row[row > EOS], torch.full((ends,), EOS)]) for row in batch[f"{side}_input_ids"]]
        changed[f"{side}_input_ids"] = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        changed[f"{side}_attention_mask"] = (changed[f"{side}_input_ids"] > 0).long()
    return changed


def train() -> tiny.TrainingResult:
    from trl.trainer import dpo_trainer

    tokenize_row = getattr(dpo_trainer.DPOTrainer, "tokenize_row", None)
    if tokenize_row is None or "processing_class" not in tokenize_row.__code__.co_varnames:
        return tiny.TrainingResult(absent("the data are prepared in another way"))
    run = steps(preferences())
    # 0.27.2, with which this is compared, is not on the transformers of the first releases.
    result = run.first_step
    result.outcome = judged_steps(run)
    ends = 1 if result.outcome.verdict is Verdict.FIXED else 2
    for data in (run.trainer.train_dataset, run.trainer.eval_dataset):
        assert completions_of(data) == of_template(ends)[: len(SIDES) * len(data)]
    if trl_hotfix.status()[ID].state.value == "applied":
        check_truncation()
    return result


def completions_of(data: Any) -> list[list[int]]:
    return [row[f"{side}_input_ids"] for row in data for side in SIDES]


def of_template(ends: int) -> list[list[int]]:
    """Return the tokens of each completion with so many ends."""
    words = tiny.tokenizer()
    return [words(row[side])["input_ids"] + [EOS] * ends for row in preferences(texts=True) for side in SIDES]


def check_truncation() -> None:
    """Check that completions of three to six tokens, cut to any length, keep their first tokens."""
    from trl import DPOConfig, DPOTrainer

    for limit in (2, 3, 4, 5, 6):
        with tempfile.TemporaryDirectory() as folder:
            trainer = tiny.trainer(
                DPOTrainer,
                model=tiny.llama(folder, seed=0),
                ref_model=tiny.llama(folder, seed=1),
                args=tiny.config(DPOConfig, max_completion_length=limit, max_prompt_length=24, **folders()),
                train_dataset=preferences(),
                tokenizer=tiny.chat_tokenizer(),
            )
        assert completions_of(trainer.train_dataset) == [completion[:limit] for completion in of_template(1)]


def unaffected() -> tiny.TrainingResult:
    """Train on texts, and with a template that leaves the end of sequence to the trainer."""
    template_without_end = (
        "{% for message in messages %}{{ 'w58 ' if message['role'] == 'user' else 'w59 ' }}{{ message['content'] }} "
        "{% endfor %}{% if add_generation_prompt %}{{ 'w59 ' }}{% endif %}"
    )
    runs = {
        "texts": steps(preferences(texts=True)),
        "no end": steps(preferences(), tiny.chat_tokenizer(template_without_end)),
    }
    for run in runs.values():
        dpo_steps.assert_right(run)
    return several_runs(runs, absent("each completion has one end of sequence"))
