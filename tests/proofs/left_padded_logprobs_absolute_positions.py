"""The proof: a GPT-Neo under the real GRPO and RLOO trainers, on a batch of a short prompt and a long one.

What is right are the log-probs that the plain model gives each row without its padding.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trl_hotfix.authoring import absent, judge, shadowed

import tiny

OVERLAYS = ()
PARITY = False

NAMES = ("_get_per_token_logps", "_get_per_token_logps_and_entropies")


LENGTH = 8
"""Tokens of the longest completion, to which the others are padded."""


@contextmanager
def that_keeps_logits(model_class: type, trainer_class: type) -> Iterator[None]:
    """Up to 0.19 every model is given ``logits_to_keep``. GPT-2 takes it in later transformers, GPT-Neo in none."""
    plain = model_class.forward

    def forward(self: Any, *args: Any, logits_to_keep: int = 0, **kwargs: Any) -> Any:
        outputs = plain(self, *args, **kwargs)
        outputs.logits = outputs.logits[:, -logits_to_keep:]
        return outputs

    if "logits_to_keep" in inspect.signature(plain).parameters or NAMES[0] not in vars(trainer_class):
        yield
    else:
        with shadowed(model_class, "forward", forward):
            yield


def one_step(method: str, model: Any, prompts: list[str]) -> dict[str, Any]:
    """Loss, gradients and the sums of the log-probs of one step: as TRL has them, and by the plain model."""
    import torch
    import trl
    from datasets import Dataset

    trainer_class = getattr(trl, f"{method}Trainer")
    seen: dict[str, Any] = {}

    def log_probs(logits: Any, ids: Any, mask: Any) -> Any:
        every = logits[:, -LENGTH - 1 : -1].log_softmax(-1).gather(2, ids[:, -LENGTH:, None])[..., 0]
        return float((every * mask[:, -LENGTH:]).sum())

    def by_hand(ids: Any, mask: Any, *, padded: bool) -> float:
        found = 0.0
        for row, its in zip(ids, mask, strict=True):
            begin = 0 if padded else int(its.argmax())
            alone, its = row[None, begin:], its[None, begin:]
            with torch.no_grad():
                found += log_probs(model(input_ids=alone, attention_mask=its).logits, alone, its)
        return found

    def look(model: Any, args: Any, kwargs: dict[str, Any], outputs: Any) -> None:
        if not torch.is_grad_enabled() or "measured" in seen:
            return
        ids, mask = kwargs["input_ids"], kwargs["attention_mask"]
        if getattr(outputs, "log_probs", None) is not None:
            seen["measured"] = float((outputs.log_probs[:, -LENGTH:] * mask[:, -LENGTH:]).sum())
        else:
            seen["measured"] = log_probs(outputs.logits, ids, mask)
        seen["right"], seen["wrong"] = (by_hand(ids, mask, padded=padded) for padded in (False, True))

    class Measured(trainer_class):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            seen.setdefault("loss", float(loss.detach()))
            return loss

    model.register_forward_hook(look, with_kwargs=True)
    settings = {"per_device_train_batch_size": 8, "num_iterations": 1, "beta": 0.04}
    torch.manual_seed(0)
    trainer = tiny.grpo(Measured, model, getattr(trl, f"{method}Config"), **settings)
    trainer.train_dataset = Dataset.from_list([{"prompt": each} for each in prompts])
    step = tiny.FirstStep(trainer.model)
    with that_keeps_logits(type(model), trainer_class):
        trainer.train()
    return {**seen, "gradients": step.gradients}


def train() -> tiny.TrainingResult:
    import trl

    methods = [
        method
        for method in ("GRPO", "RLOO")
        if any(name in vars(getattr(trl, f"{method}Trainer", object)) for name in NAMES)
    ]
    if not methods:
        return tiny.TrainingResult(absent("this release computes the log-probs elsewhere"))
    gradients: dict[str, Any] = {}
    sums = dict.fromkeys(("measured", "right", "wrong"), 0.0)
    for method in methods:
        with tempfile.TemporaryDirectory() as folder:
            seen = one_step(method, tiny.gpt_neo(folder, seed=0), ["w1 w2", "w3 w4 w5 w6 w7 w8"])
        sums = {key: value + seen[key] for key, value in sums.items()}
        gradients |= {f"{method}.{name}": its for name, its in seen["gradients"].items()}
    outcome = judge(sums["measured"], right=sums["right"], wrong=sums["wrong"], trainers=len(methods))
    return tiny.TrainingResult(outcome, seen["loss"], gradients)


def unaffected() -> tiny.TrainingResult:
    """Prompts of one length, which need no padding; and a Llama, whose positions are rotary, on padded ones."""
    gradients: dict[str, Any] = {}
    loss = 0.0
    for kind, prompts in (("gpt_neo", ["w1 w2 w3", "w4 w5 w6"]), ("llama", ["w1 w2", "w3 w4 w5 w6 w7 w8"])):
        with tempfile.TemporaryDirectory() as folder:
            seen = one_step("GRPO", getattr(tiny, kind)(folder, seed=0), prompts)
        loss += seen["loss"]
        gradients |= {f"{kind}.{name}": its for name, its in seen["gradients"].items()}
    return tiny.TrainingResult(absent("no padding, or no table of positions"), loss, gradients)
