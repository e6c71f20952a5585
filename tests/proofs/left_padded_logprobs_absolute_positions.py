"""The proof: a GPT-Neo under the real GRPO and RLOO trainers, on a batch of a short prompt and a long one.

The expected log-probs are those that the plain model gives each row without its padding.
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
"""The number of tokens of the longest completion, to which the others are padded."""


@contextmanager
def accepting_logits_to_keep(model_class: type, trainer_class: type) -> Iterator[None]:
    """Let the model's ``forward`` take ``logits_to_keep``, which TRL passes to every model up to 0.19.

    GPT-2 takes it in later transformers, GPT-Neo in none.
    """
    original = model_class.forward

    def forward(self: Any, *args: Any, logits_to_keep: int = 0, **kwargs: Any) -> Any:
        outputs = original(self, *args, **kwargs)
        outputs.logits = outputs.logits[:, -logits_to_keep:]
        return outputs

    if "logits_to_keep" in inspect.signature(original).parameters or NAMES[0] not in vars(trainer_class):
        yield
    else:
        with shadowed(model_class, "forward", forward):
            yield


def one_step(method: str, model: Any, prompts: list[str]) -> dict[str, Any]:
    """Return loss, gradients and the summed log-probs of one step: TRL's, and those of the plain model."""
    import torch
    import trl

    trainer_class = getattr(trl, f"{method}Trainer")
    sums: dict[str, float] = {}

    def log_probs(logits: Any, ids: Any, mask: Any) -> float:
        per_token = logits[:, -LENGTH - 1 : -1].log_softmax(-1).gather(2, ids[:, -LENGTH:, None])[..., 0]
        return float((per_token * mask[:, -LENGTH:]).sum())

    def row_by_row(ids: Any, mask: Any, *, padded: bool) -> float:
        total = 0.0
        for row, row_mask in zip(ids, mask, strict=True):
            begin = 0 if padded else int(row_mask.argmax())
            tokens, attention = row[None, begin:], row_mask[None, begin:]
            with torch.no_grad():
                total += log_probs(model(input_ids=tokens, attention_mask=attention).logits, tokens, attention)
        return total

    def record_sums(model: Any, args: Any, kwargs: dict[str, Any], outputs: Any) -> None:
        if not torch.is_grad_enabled() or "measured" in sums:
            return
        ids, mask = kwargs["input_ids"], kwargs["attention_mask"]
        if getattr(outputs, "log_probs", None) is not None:
            sums["measured"] = float((outputs.log_probs[:, -LENGTH:] * mask[:, -LENGTH:]).sum())
        else:
            sums["measured"] = log_probs(outputs.logits, ids, mask)
        sums["right"], sums["wrong"] = (row_by_row(ids, mask, padded=padded) for padded in (False, True))

    model.register_forward_hook(record_sums, with_kwargs=True)
    settings = {"per_device_train_batch_size": 8, "num_iterations": 1, "beta": 0.04}
    torch.manual_seed(0)
    config_class = getattr(trl, f"{method}Config")
    trainer = tiny.grpo(tiny.measured(trainer_class), model, config_class, prompts=prompts, **settings)
    with accepting_logits_to_keep(type(model), trainer_class):
        trainer.train()
    return {**sums, "loss": trainer.losses[0], "gradients": trainer.step.gradients}


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
            run = one_step(method, tiny.gpt_neo(folder, seed=0), ["w1 w2", "w3 w4 w5 w6 w7 w8"])
        sums = {key: value + run[key] for key, value in sums.items()}
        gradients |= {f"{method}.{name}": gradient for name, gradient in run["gradients"].items()}
    outcome = judge(sums["measured"], right=sums["right"], wrong=sums["wrong"], trainers=len(methods))
    return tiny.TrainingResult(outcome, run["loss"], gradients)


def unaffected() -> tiny.TrainingResult:
    """Train on prompts of one length, without padding, and a Llama, whose positions are rotary, on padded ones."""
    gradients: dict[str, Any] = {}
    loss = 0.0
    for kind, prompts in (("gpt_neo", ["w1 w2 w3", "w4 w5 w6"]), ("llama", ["w1 w2", "w3 w4 w5 w6 w7 w8"])):
        with tempfile.TemporaryDirectory() as folder:
            run = one_step("GRPO", getattr(tiny, kind)(folder, seed=0), prompts)
        loss += run["loss"]
        gradients |= {f"{kind}.{name}": gradient for name, gradient in run["gradients"].items()}
    return tiny.TrainingResult(absent("no padding, or no table of positions"), loss, gradients)
