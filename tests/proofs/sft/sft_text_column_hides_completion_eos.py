"""Train two steps of two micro-batches, and evaluate, with the real SFTTrainer on prompts, completions and texts.

Losses and gradients are compared with the cross-entropy of the completions, with their end of sequence and without.
"""

from __future__ import annotations

from typing import Any

import trl_hotfix
from trl_hotfix.authoring import absent
from trl_hotfix.model import Verdict

import tiny
from tiny import sft_steps

ID = "sft-text-column-hides-completion-eos"

OVERLAYS = ()
PARITY = False
DATA = True
EQUIVALENT = {"applied twice": "the completions end when the second sees them, and stay as they are"}
VARIANTS = "the data are prepared before the model is compiled, and whatever part of it is trained"

EOS = 1


def pairs(**others: str) -> list[dict[str, Any]]:
    """Return prompts and completions of several lengths, with other columns."""
    return [
        {
            "prompt": " ".join(f"w{index + place}" for place in range(2 + index % 3)) + " ",
            "completion": " ".join(f"w{(7 * index + 3 * place) % 60}" for place in range(2 + index % 4)),
            **others,
        }
        for index in range(8)
    ]


def with_end(row: sft_steps.Row) -> sft_steps.Row:
    ids, labels = without_end(row)
    return [*ids, EOS], [*labels, EOS]


def without_end(row: sft_steps.Row) -> sft_steps.Row:
    ids, labels = row
    return (ids[:-1], labels[:-1]) if ids[-1] == EOS else row


def ids_of(rows: Any) -> list[list[int]]:
    return [row["input_ids"] for row in rows]


def train() -> tiny.TrainingResult:
    trainer, model = sft_steps.sft_steps(pairs(text="w1 w2"))
    patched = trl_hotfix.status()[ID].state.value == "applied"
    words = tiny.tokenizer()
    ended = [words(f"{row['prompt']}{row['completion']} <eos>")["input_ids"] for row in pairs()]
    if not patched and ids_of(trainer.train_dataset) == ended:
        return tiny.TrainingResult(absent("this release ends what it tokenises"))
    outcome = sft_steps.judged_sft_steps(trainer, model, {"right": with_end, "wrong": without_end})
    if outcome.verdict is Verdict.FIXED:
        assert ids_of(trainer.train_dataset) == ended
        assert ids_of(trainer.eval_dataset) == ended[:2]
        assert trainer.train_dataset["text"]
        for field, is_streamed in (("text", True), ("content", False)):
            rows = pairs(**{field: "w1 w2"})
            other, _ = sft_steps.sft_steps(rows, streaming=is_streamed, dataset_text_field=field)
            assert ids_of(other.train_dataset) == ended
    return tiny.TrainingResult(outcome, trainer.steps[0].micro_batches[0].loss, trainer.steps[0].gradients)


def unaffected() -> tiny.TrainingResult:
    """Train on pairs without a text, on texts, on conversations, and with a tokenizer that ends the texts itself."""
    from tokenizers.processors import TemplateProcessing

    ending = tiny.tokenizer()
    ending.backend_tokenizer.post_processor = TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", EOS)])
    conversations = [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "completion": [{"role": "assistant", "content": row["completion"]}],
            "text": "w1 w2",
        }
        for row in pairs()
    ]
    runs = {
        "pairs": sft_steps.sft_steps(pairs()),
        "texts": sft_steps.sft_steps([{"text": row["prompt"] + row["completion"]} for row in pairs()]),
        "conversations": sft_steps.sft_steps(conversations, tiny.chat_tokenizer()),
        "ended": sft_steps.sft_steps(pairs(text="w1 w2"), ending),
    }
    steps = {f"{name}.{index}": step for name, (run, _) in runs.items() for index, step in enumerate(run.steps)}
    gradients = {f"{name}.{key}": value for name, step in steps.items() for key, value in step.gradients.items()}
    losses = [micro_batch.loss for step in steps.values() for micro_batch in step.micro_batches]
    return tiny.TrainingResult(absent("the end is not hidden"), sum(losses), gradients)
