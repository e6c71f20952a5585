"""The proof: one step of the real DPOTrainer on conversations, without padding between prompt and completion.

What is right is the loss of the same models, by equation 7 of the paper (arXiv:2305.18290) and without TRL's code, on
the tokens that the chat template gives; what is wrong is that with one more end of sequence.
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


def rows(*, texts: bool = False) -> list[dict[str, Any]]:
    found = []
    for index in range(4):
        words = {
            "prompt": ("user", f"w{index} w{index + 1}"),
            "chosen": ("assistant", " ".join(f"w{(7 * index + 3 * place) % 60}" for place in range(2 + index % 2))),
            "rejected": ("assistant", " ".join(f"w{(5 * index + 11 * place) % 60}" for place in range(3))),
        }
        found.append(
            {
                name: content if texts else [{"role": role, "content": content}]
                for name, (role, content) in words.items()
            }
        )
    return found


def one_step(data: list[dict[str, Any]], *, words: Any = None, **settings: Any) -> tuple[Any, tiny.TrainingResult]:
    """The trainer after one step, and its loss and gradients."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    seen: list[float] = []

    class Measured(DPOTrainer):  # type: ignore[misc, valid-type]
        def compute_loss(self, model, inputs, *args, **kwargs):
            result = super().compute_loss(model, inputs, *args, **kwargs)
            seen.append(float((result[0] if isinstance(result, tuple) else result).detach()))
            return result

    usual = {"per_device_train_batch_size": len(data), "beta": BETA, "max_length": 48, "max_prompt_length": 24}
    usual |= {name: tempfile.gettempdir() + "/dpo" for name in ("output_dir", "logging_dir")}
    with tempfile.TemporaryDirectory() as folder:
        policy, reference = tiny.llama(folder, seed=0), tiny.llama(folder, seed=1)
        step = tiny.FirstStep(policy)
        made = tiny.trainer(
            Measured,
            model=policy,
            ref_model=reference,
            args=tiny.config(DPOConfig, **{**usual, **settings}),
            train_dataset=Dataset.from_list(data),
            eval_dataset=Dataset.from_list(data),
            tokenizer=words if words is not None else tiny.chat_tokenizer(),
        )
        made.train()
        return made, tiny.TrainingResult(None, seen[0], step.gradients)


def by_hand(ends: int) -> float:
    """The loss of the untrained models on tokens that the template gives, each completion with so many ends."""
    import torch

    words = tiny.tokenizer()
    batch: dict[str, Any] = {}
    for name in ("prompt", "chosen", "rejected"):
        contents = [row[name] for row in rows(texts=True)]
        around = ("w58 {} <eos> w59", "{}" + " <eos>" * ends)[name != "prompt"]
        ids = [torch.tensor(words(around.format(each))["input_ids"]) for each in contents]
        pad = torch.nn.utils.rnn.pad_sequence
        batch[f"{name}_input_ids"] = pad(ids, batch_first=True)
        batch[f"{name}_attention_mask"] = pad([torch.ones_like(each) for each in ids], batch_first=True)
    with tempfile.TemporaryDirectory() as folder:
        models = tiny.llama(folder, seed=0), tiny.llama(folder, seed=1)
        policy, reference = (tiny.preference_log_probs(model, batch) for model in models)
    return tiny.dpo_loss(BETA, policy, reference)


def train() -> tiny.TrainingResult:
    import trl.trainer.dpo_trainer as leaf

    tokenize_row = getattr(leaf.DPOTrainer, "tokenize_row", None)
    if tokenize_row is None or "processing_class" not in tokenize_row.__code__.co_varnames:
        return tiny.TrainingResult(absent("the data are prepared in another way"))
    patched = trl_hotfix.status()[ID].state.value == "applied"
    made, seen = one_step(rows())
    outcome = judge(seen.loss, right=by_hand(1), wrong=by_hand(2))
    ends = [row[f"{side}_input_ids"].count(1) for side in ("chosen", "rejected") for row in made.eval_dataset]
    assert set(ends) == {1 if outcome.verdict.value == "fixed" else 2}
    if patched:
        truncation_is_exact()
    return tiny.TrainingResult(outcome, seen.loss, seen.gradients)


def truncation_is_exact() -> None:
    """Completions of three to four tokens, cut to any length: what is left are the first tokens of the whole."""
    whole = one_step(rows())[0].train_dataset
    for longest in (2, 3, 4, 5):
        cut = one_step(rows(), max_completion_length=longest)[0].train_dataset
        for side in ("chosen_input_ids", "rejected_input_ids"):
            assert [row[side] for row in cut] == [row[side][:longest] for row in whole]


def unaffected() -> tiny.TrainingResult:
    """Texts, and a template that leaves the end to the trainer."""
    no_end = (
        "{% for message in messages %}{{ 'w58 ' if message['role'] == 'user' else 'w59 ' }}{{ message['content'] }} "
        "{% endfor %}{% if add_generation_prompt %}{{ 'w59 ' }}{% endif %}"
    )
    runs = {
        "texts": one_step(rows(texts=True))[1],
        "no end": one_step(rows(), words=tiny.chat_tokenizer(no_end))[1],
    }
    return tiny.TrainingResult(
        absent("whom it does not hit"),
        sum(run.loss for run in runs.values()),
        {f"{name} {each}": its for name, run in runs.items() for each, its in run.gradients.items()},
    )
