"""Train two steps of two micro-batches with CPO, CPO's SimPO and ORPO on pairs of several lengths, and evaluate.

The logged means of the logits are compared with those of each row, computed alone, without padding and without TRL.
The right one has the positions that predict the response, the wrong one all of the padded batch. Another padding token
changes the wrong one only.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Outcome, Verdict

import tiny

OVERLAYS = ()
PARITY = False
EQUIVALENT = {
    "_mean: `logits.detach()` -> `logits`": "TRL detaches what it logs",
    "change detached": "TRL detaches what it logs",
    "applied twice": "the mean of a mean is that mean",
}

SIDES = ("chosen", "rejected")
PADDINGS = ("<pad>", "w59")
KINDS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "CPO": ("CPO", {"loss_type": "sigmoid"}),
    "SimPO": ("CPO", {"loss_type": "simpo"}),
    "ORPO": ("ORPO", {}),
}


def train() -> tiny.TrainingResult:
    outcomes: list[Outcome] = []
    gradients: dict[str, Any] = {}
    losses = []
    for kind in KINDS:
        runs = {padding: trained(kind, padding=padding) for padding in PADDINGS}
        logged = {padding: metrics(run) for padding, run in runs.items()}
        for padding, run in runs.items():
            outcomes += judged(run, logged[padding])
        is_fixed = outcomes[-1].verdict is Verdict.FIXED
        distance = max(
            abs(one - other) for one, other in zip(*(flat(logged[padding]) for padding in runs), strict=True)
        )
        assert (distance < 1e-5) is is_fixed, f"{kind}: another padding token moves the metric by {distance}"
        losses += runs[PADDINGS[0]].losses
        gradients |= {f"{kind} {name}": gradient for name, gradient in runs[PADDINGS[0]].step.gradients.items()}
    assert len({outcome.verdict for outcome in outcomes}) == 1, outcomes
    return tiny.TrainingResult(outcomes[0], sum(losses), gradients)


def unaffected() -> tiny.TrainingResult:
    """Train a T5 on responses of one length: its decoder has neither prompt nor padding."""
    run = trained("CPO", encoder_decoder=True)
    assert len(metrics(run)) == 3
    return tiny.TrainingResult(absent("there is no prompt, and no padding"), run.losses[0], run.step.gradients)


def metrics(run: Any) -> list[dict[str, float]]:
    """Return the logged means of both steps and of the evaluation."""
    return [
        {side: entry[f"{prefix}logits/{side}"] for side in SIDES}
        for prefix in ("", "eval_")
        for entry in run.state.log_history
        if f"{prefix}logits/chosen" in entry
    ]


def flat(logged: list[dict[str, float]]) -> list[float]:
    return [value for entry in logged for value in entry.values()]


def judged(run: Any, logged: list[dict[str, float]]) -> list[Outcome]:
    """Judge each logged mean by those of its two micro-batches."""
    assert len(logged) == 3
    assert len(run.expected) == 6
    outcomes = []
    for number, entry in enumerate(logged):
        both = run.expected[2 * number : 2 * number + 2]
        for side in SIDES:
            right, wrong = (math.fsum(each[kind][side] for each in both) / 2 for kind in ("right", "wrong"))
            # TRL may round what it logs.
            is_right = abs(entry[side] - right) < abs(entry[side] - wrong)
            close = abs(entry[side] - (right if is_right else wrong))
            assert close < 2e-5 < abs(right - wrong) / 4, f"{entry[side]}: neither {right} nor {wrong}"
            outcomes.append(judge(right if is_right else wrong, right=right, wrong=wrong))
    return outcomes


def pair(index: int, *, equal: bool) -> dict[str, str]:
    prompt, chosen, rejected = (3, 4, 4) if equal else (2 + index % 4, 3 + 5 * index % 6, 2 + 7 * index % 6)
    return {
        "prompt": " ".join(f"w{(11 * index + place) % 50}" for place in range(prompt)),
        "chosen": "".join(f" w{(7 * index + 3 * place) % 50}" for place in range(chosen)),
        "rejected": "".join(f" w{(5 * index + 13 * place + 1) % 50}" for place in range(rejected)),
    }


def trained(kind: str, *, padding: str = PADDINGS[0], encoder_decoder: bool = False) -> Any:
    """Return a trainer that has taken two steps and evaluated. Its ``expected`` has the means of each micro-batch."""
    from datasets import Dataset
    from packaging.version import Version

    method, of_kind = KINDS[kind]
    trainer_class, config_class = tiny.classes(method)

    # From 0.14.0 on ORPO leaves out the last position.
    cut = method == "ORPO" and Version(version("trl")) >= Version("0.14.0")

    class Recorder(tiny.measured(trainer_class)):  # type: ignore[misc]
        def get_batch_loss_metrics(self, model: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            if not encoder_decoder:
                self.expected.append(means(self.model, batch, words.pad_token_id, of_all_but_the_last=cut))
            return super().get_batch_loss_metrics(model, batch, *args, **kwargs)

    Recorder.expected = []
    words = tiny.tokenizer()
    # Old releases need a beginning-of-sequence token and prepend it.
    words.bos_token = words.eos_token
    words.pad_token = padding
    settings = {"max_steps": 2, "gradient_accumulation_steps": 2, "optim": "sgd", "learning_rate": 0.5}
    settings |= {"max_length": 32, "max_prompt_length": 16, **of_kind}
    if encoder_decoder:
        settings |= {"is_encoder_decoder": True, "max_completion_length": 16}
    with tempfile.TemporaryDirectory() as folder:
        trainer = tiny.trainer(
            Recorder,
            model=t5() if encoder_decoder else llama(folder),
            args=tiny.config(config_class, remove_unused_columns=False, **settings),
            train_dataset=Dataset.from_list([pair(index, equal=encoder_decoder) for index in range(8)]),
            eval_dataset=Dataset.from_list([pair(index, equal=encoder_decoder) for index in range(9, 13)]),
            tokenizer=words,
        )
        trainer.train()
        trainer.evaluate()
    return trainer


def means(model: Any, batch: Any, padding: int, *, of_all_but_the_last: bool) -> dict[str, dict[str, float]]:
    """Return the mean logit of the positions that predict a response, and of the positions of the padded batch."""
    import torch

    right, wrong = {}, {}
    length = max(batch[f"{side}_input_ids"].shape[1] for side in SIDES)
    with torch.no_grad():
        for side in SIDES:
            ids, mask, labels = (batch[f"{side}_{name}"] for name in ("input_ids", "attention_mask", "labels"))
            found = []
            for row, kept, label in zip(ids, mask.bool(), labels, strict=True):
                tokens = row[kept]
                response = int((label != -100).sum())
                logits = model(input_ids=tokens[None], use_cache=False).logits[0].double()
                found.append(logits[len(tokens) - response - 1 : -1].mean(-1))
            right[side] = float(torch.cat(found).mean())
            ids, mask = (
                torch.nn.functional.pad(rows, (0, length - rows.shape[1]), value=value)
                for rows, value in ((ids, padding), (mask, 0))
            )
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits.double()
            wrong[side] = float((logits[:, :-1] if of_all_but_the_last else logits).mean())
    return {"right": right, "wrong": wrong}


def llama(folder: str) -> Any:
    """Return a Llama whose logits have another mean at each position. What is common to all words moves no loss."""
    import torch

    model = tiny.llama(folder, seed=0)
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head.add_(torch.cos(torch.arange(head.shape[1])))
    return model


def t5() -> Any:
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    ids = {"vocab_size": 64, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(**sizes, **ids, dropout_rate=0.0))
