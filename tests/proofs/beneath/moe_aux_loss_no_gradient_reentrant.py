"""Train two steps of two micro-batches of a Mixtral with SFT and gradient checkpointing, and evaluate.

The gradients are compared with those of the loss as the model computes it without checkpointing, with its auxiliary
loss and without. Reentrant checkpointing is transformers 4's default; where it is not, it is chosen, and a line warns.
"""

from __future__ import annotations

import tempfile
from typing import Any

import trl_hotfix
from trl_hotfix.authoring import absent, judge
from trl_hotfix.matching.versions import in_range
from trl_hotfix.model import Verdict

import tiny
from tiny.gkd_steps import words

ID = "moe-aux-loss-no-gradient-reentrant"
OVERLAYS = ()
PARITY = False
VARIANTS = "it is a matter of how the layers are run, and an adapter takes the same gradient"

COEFFICIENT = 0.5


def train() -> tiny.TrainingResult:
    import transformers

    if not in_range(transformers.__version__, ">=4.54"):
        return tiny.TrainingResult(absent("the layers return the logits of their routers"))
    patched = trl_hotfix.status()[ID].state.value == "applied"
    if not _is_reentrant_by_default():
        # A choice is left alone, and named.
        run, lines = sft({"use_reentrant": True})
        assert judged(run).verdict is Verdict.REPRODUCED
        assert _acts(run) in (None, 1)
        return tiny.result_of_runs({"chosen": run}, judge(len(lines), right=1, wrong=0))
    run, lines = sft(None)
    assert not lines
    assert _acts(run) == (1 if patched else None)
    if patched:
        assert run.args.gradient_checkpointing_kwargs == {"use_reentrant": False}
    run.evaluate()
    return tiny.result_of_runs({"default": run}, judged(run))


def unaffected() -> tiny.TrainingResult:
    """Train with checkpointing that is not reentrant, without checkpointing, and without an auxiliary loss."""
    runs = {
        "not reentrant": sft({"use_reentrant": False})[0],
        "no checkpointing": sft(None, gradient_checkpointing=False)[0],
        "no auxiliary loss": sft({"use_reentrant": True}, coefficient=0.0)[0],
    }
    for name, run in runs.items():
        assert not _acts(run), f"{name}: the wrapper acts"
        if name != "no auxiliary loss":
            assert judged(run).verdict is Verdict.FIXED, name
    return tiny.result_of_runs(runs, absent("the auxiliary loss has its gradient, or there is no such loss"))


def judged(run: Any) -> Any:
    """Judge the gradients of the routers in both steps: they are of one kind."""
    run.model.gradient_checkpointing_disable()
    outcomes = [judged_step(run.model, step) for step in run.steps]
    assert len(outcomes) == 2, outcomes
    assert len({outcome.verdict for outcome in outcomes}) == 1, outcomes
    return outcomes[0]


def judged_step(model: Any, step: Any) -> Any:
    assert len(step.micro_batches) == 2

    def gradient(share: float) -> float:
        def loss(model: Any) -> Any:
            parts = [tiny.loss_of_model(model, None, part) for part in step.micro_batches]
            return sum(whole - (1 - share) * COEFFICIENT * aux for whole, aux in parts)

        return _of_routers(tiny.expected_gradients(model, step.weights, loss))

    found, without = _of_routers(step.gradients), gradient(0.0)
    # The auxiliary loss is a sum over micro-batches, or their mean from 1.15.0 on (sft-moe-aux-loss-times-gas).
    # transformers 5.2 to 5.5 divide all by the micro-batches once more (transformers-divides-gradients-twice).
    factors = [(factor, share) for factor in (1.0, 0.5) for share in (1.0, 0.5)]
    rights = [factor * gradient(share) for factor, share in factors]
    right = min(rights, key=lambda value: abs(value - found))
    wrong = min((without, without / 2), key=lambda value: abs(value - found))
    return judge(found, right=right, wrong=wrong)


def _of_routers(gradients: dict[str, Any]) -> float:
    """Return one number for the gradients of the routers."""
    import torch

    flat = torch.cat([value.flatten() for name, value in sorted(gradients.items()) if name.endswith("gate.weight")])
    return float((flat * torch.cos(torch.arange(len(flat)))).sum())


def _is_reentrant_by_default() -> bool:
    """Return whether a run that chooses nothing is reentrant: TRL sets it to False from 0.27.0 on."""
    from importlib import metadata

    import transformers

    return in_range(transformers.__version__, "<5") and in_range(metadata.version("trl"), "<0.27.0")


def sft(
    settings: dict[str, Any] | None, *, coefficient: float = COEFFICIENT, gradient_checkpointing: bool = True
) -> tuple[Any, list[str]]:
    from datasets import Dataset

    trainer_class, config_class = tiny.classes("SFT")
    data = Dataset.from_list([{"text": words(number, 3 + number)} for number in range(8)])
    with tempfile.TemporaryDirectory() as folder:

        def train() -> Any:
            trainer = tiny.trainer(
                tiny.stepwise(trainer_class),
                model=tiny.mixtral(folder, seed=0, coefficient=coefficient),
                args=tiny.config(
                    config_class,
                    max_steps=2,
                    gradient_accumulation_steps=2,
                    optim="sgd",
                    learning_rate=0.1,
                    max_length=32,
                    gradient_checkpointing=gradient_checkpointing,
                    gradient_checkpointing_kwargs=settings,
                ),
                train_dataset=data,
                eval_dataset=data.select(range(4)),
                tokenizer=tiny.tokenizer(),
            )
            trainer.train()
            return trainer

        trainer, lines = tiny.warnings_of(train)
    return trainer, [line for line in lines if "auxiliary loss has no gradient" in line]


def _acts(trainer: Any) -> int | None:
    for base in type(trainer).__mro__:
        acted = tiny.acts(ID, f"{base.__module__}:{base.__name__}.get_train_dataloader", trainer)
        if acted is not None:
            return acted
    return None
