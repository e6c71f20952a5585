"""Train two steps of two micro-batches with the trainers of GRPO, online DPO, XPO and Nash-MD, LoRA and checkpointing.

The norm behind the last layer is trained too (modules_to_save), so that the unpatched run does not fail: it trains that
norm alone. The expected gradients are those of the same run without checkpointing: eight adapter matrices and the norm.
XPO and Nash-MD sample, by a seed.
"""

from __future__ import annotations

import copy
import functools
import inspect
import tempfile
from importlib.metadata import version
from typing import Any

from packaging.version import Version

from trl_hotfix.authoring import absent, judge

import tiny

OVERLAYS = ()
PARITY = False
VARIANTS = {
    "compiled": "A compiled model traces through the checkpoints, so that nothing is missing.",
    "full": "In full fine-tuning the embeddings are trained, and what they put out needs a gradient anyway.",
    "lora": "The proof puts its own adapter on the model.",
}

ID = "grpo-peft-no-input-grads"
TARGETS = (
    "trl.trainer.grpo_trainer:GRPOTrainer.__init__",
    "trl.trainer.online_dpo_trainer:OnlineDPOTrainer.__init__",
)
NAMES = ("GRPO", "OnlineDPO", "XPO", "NashMD")
MUTANTS_ON = ("0.15.2",)
STEPS, MICRO_BATCHES = 2, 2
REENTRANT = {"use_reentrant": True}


class _Run:
    """A run of a real trainer: its first loss, its gradients after each micro-batch, and whether the wrapper acted."""

    def __init__(self, name: str, checkpointing: dict[str, Any] | None, *, adapter: bool = True) -> None:
        import torch

        accumulated: list[dict[str, Any]] = []
        losses: list[float] = []
        trainer_class, config_class = tiny.classes(name)

        class RecordGradients(trainer_class):  # type: ignore[misc, valid-type]
            @functools.wraps(trainer_class.__init__)
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                if name != "GRPO" and _is_before("0.12.0"):
                    # Before 0.12.0 the preference is always that of a reward model.
                    kwargs = {key: value for key, value in kwargs.items() if key not in ("judge", "reward_funcs")}
                    kwargs["reward_model"] = _reward_model(kwargs["model"])
                super().__init__(*args, **kwargs)

            def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
                if name != "GRPO":
                    torch.manual_seed(len(losses))  # With and without checkpoints the same is sampled.
                loss = super().training_step(model, *args, **kwargs)
                losses.append(float(loss))
                accumulated.append(tiny.gradients_of(self.model))
                return loss

        settings = {
            "gradient_checkpointing": checkpointing is not None,
            "gradient_checkpointing_kwargs": checkpointing,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "max_steps": STEPS,
            "optim": "sgd",
            "learning_rate": 0.1,
        }
        make = _grpo if name == "GRPO" else _online_dpo
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            trainer = make(RecordGradients, config_class, tiny.llama(folder, seed=0), settings, adapter=adapter)
            self.trainable = sum(parameter.requires_grad for parameter in trainer.model.parameters())
            trainer.train()
        if len(losses) != STEPS * MICRO_BATCHES:
            raise AssertionError(f"expected two steps of two micro-batches: {losses}")
        acts = [acted for target in TARGETS if (acted := tiny.acts(ID, target, trainer)) is not None]
        self.loss, self.acted = losses[0], sum(acts) if acts else None
        self.gradients = {
            f"{number}.{name}": value for number, values in enumerate(accumulated) for name, value in values.items()
        }


def _lora() -> Any:
    lora = tiny.lora()
    lora.modules_to_save = ["model.norm"]
    return lora


def _grpo(trainer_class: Any, config_class: Any, model: Any, settings: dict[str, Any], *, adapter: bool) -> Any:
    trainer = tiny.grpo_of_one_length(trainer_class, model, _lora() if adapter else None, **settings)
    tiny.set_adapters(trainer.model)
    return trainer


def _online_dpo(trainer_class: Any, config_class: Any, model: Any, settings: dict[str, Any], *, adapter: bool) -> Any:
    if not hasattr(config_class, "model_init_kwargs"):
        # In 0.17.0 the import of GRPO's config makes this a field of all that transformers checks.
        config_class = type(config_class.__name__, (config_class,), {"model_init_kwargs": None})
    if adapter:
        from peft import get_peft_model

        model = get_peft_model(model, _lora())
        tiny.set_adapters(model)
    return tiny.online_dpo(trainer_class, config_class, model, **settings)


def _trains_an_adapter(name: str) -> bool:
    """Return whether this release has the trainer, and it takes an adapter and is as right or wrong as the others."""
    trainer_class, _ = tiny.classes(name)
    # GRPO from 0.16 on and Nash-MD of 0.11 and 0.12 have all gradients without the patch.
    right_alone = {"GRPO": not _is_before("0.16.0") and _is_before("0.22.0"), "NashMD": _is_before("0.13.0")}
    if trainer_class is None or right_alone.get(name):
        return False
    return "peft_config" in inspect.signature(trainer_class.__init__).parameters


def _is_before(release: str) -> bool:
    return Version(version("trl")) < Version(release)


def _reward_model(model: Any) -> Any:
    import torch
    from transformers import LlamaForSequenceClassification

    torch.manual_seed(2)
    config = copy.deepcopy(model.config)
    config.num_labels = 1
    return LlamaForSequenceClassification(config)


def train() -> tiny.TrainingResult:
    outcomes, gradients, losses = [], {}, []
    for name in NAMES:
        if not _trains_an_adapter(name):
            continue
        expected, run = _Run(name, None), _Run(name, REENTRANT)
        reached = [key for key, gradient in run.gradients.items() if gradient.abs().max() > 1e-9]
        trainable = STEPS * MICRO_BATCHES * expected.trainable
        outcomes.append(judge(len(reached), right=trainable, wrong=STEPS * MICRO_BATCHES, trainer=name))
        # Once the adapters are trained the second step of the other run is another one.
        same = reached if len(reached) == trainable else [key for key in reached if key.startswith(("0.", "1."))]
        difference = max(float((run.gradients[key] - expected.gradients[key]).abs().max()) for key in same)
        if len(expected.gradients) != trainable or difference > 1e-6 or abs(run.loss - expected.loss) > 1e-6:
            raise AssertionError(
                f"{name}: {len(expected.gradients)} of {trainable} without checkpoints, off by {difference}"
            )
        if expected.acted or run.acted not in (None, 1):
            raise AssertionError(
                f"{name}: the wrapper acts {run.acted} times, and {expected.acted} without checkpoints"
            )
        gradients |= {f"{name}.{key}": gradient for key, gradient in run.gradients.items()}
        losses.append(run.loss)
    if not outcomes:
        return tiny.TrainingResult(absent("this release has no such trainer of adapters"))
    if len({outcome.verdict for outcome in outcomes}) != 1:
        raise AssertionError(f"the trainers are not all alike: {outcomes}")
    return tiny.TrainingResult(outcomes[0], sum(losses), gradients)


def unaffected() -> tiny.TrainingResult:
    """Train without checkpointing, with a checkpoint that is not reentrant, and all weights."""
    loss, gradients = 0.0, {}
    for name in filter(_trains_an_adapter, ("GRPO", "OnlineDPO")):
        runs = {
            "none": _Run(name, None),
            "not reentrant": _Run(name, {"use_reentrant": False}),
            "full": _Run(name, REENTRANT, adapter=False),
        }
        if any(run.acted for run in runs.values()):
            raise AssertionError(f"{name}: the wrapper acts: {[kind for kind, run in runs.items() if run.acted]}")
        gradients |= {
            f"{name}.{kind}.{key}": value for kind, run in runs.items() for key, value in run.gradients.items()
        }
        loss += runs["none"].loss
    return tiny.TrainingResult(absent("the decoder has its gradients"), loss, gradients)
