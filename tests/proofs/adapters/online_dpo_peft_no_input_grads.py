"""Train two steps of two micro-batches with the real trainers of online DPO, XPO and Nash-MD, LoRA and checkpointing.

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

ID, TARGET = "online-dpo-peft-no-input-grads", "trl.trainer.online_dpo_trainer:OnlineDPOTrainer.__init__"
NAMES = ("OnlineDPO", "XPO", "NashMD")
STEPS, MICRO_BATCHES = 2, 2
REENTRANT = {"use_reentrant": True}


class _Run:
    """A run of a real trainer: its first loss, its gradients after each micro-batch, and whether the wrapper acted."""

    def __init__(self, name: str, checkpointing: dict[str, Any] | None, *, adapter: bool = True) -> None:
        import torch

        trainer_class, config_class = tiny.classes(name)
        if not hasattr(config_class, "model_init_kwargs"):
            # In 0.17.0 the import of GRPO's config makes this a field of all that transformers checks.
            config_class = type(config_class.__name__, (config_class,), {"model_init_kwargs": None})
        accumulated: list[dict[str, Any]] = []
        losses: list[float] = []

        class RecordGradients(trainer_class):  # type: ignore[misc, valid-type]
            @functools.wraps(trainer_class.__init__)
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                if _is_before("0.12.0"):
                    # Before 0.12.0 the preference is always that of a reward model.
                    kwargs = {key: value for key, value in kwargs.items() if key not in ("judge", "reward_funcs")}
                    kwargs["reward_model"] = _reward_model(kwargs["model"])
                super().__init__(*args, **kwargs)

            def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
                torch.manual_seed(len(losses))  # With and without checkpoints the same is sampled.
                loss = super().training_step(model, *args, **kwargs)
                losses.append(float(loss))
                accumulated.append(tiny.gradients_of(self.model))
                return loss

        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            trainer = tiny.online_dpo(
                RecordGradients,
                config_class,
                self._model(folder, adapter=adapter),
                gradient_checkpointing=checkpointing is not None,
                gradient_checkpointing_kwargs=checkpointing,
                gradient_accumulation_steps=MICRO_BATCHES,
                max_steps=STEPS,
                optim="sgd",
                learning_rate=0.1,
            )
            self.trainable = sum(parameter.requires_grad for parameter in trainer.model.parameters())
            trainer.train()
        if len(losses) != STEPS * MICRO_BATCHES:
            raise AssertionError(f"expected two steps of two micro-batches: {losses}")
        self.loss, self.acted = losses[0], tiny.acts(ID, TARGET, trainer)
        self.gradients = {
            f"{number}.{name}": value for number, values in enumerate(accumulated) for name, value in values.items()
        }

    def _model(self, folder: str, *, adapter: bool) -> Any:
        model = tiny.llama(folder, seed=0)
        if not adapter:
            return model
        from peft import get_peft_model

        lora = tiny.lora()
        lora.modules_to_save = ["model.norm"]
        peft_model = get_peft_model(model, lora)
        tiny.set_adapters(peft_model)
        return peft_model


def _takes_an_adapter(name: str) -> bool:
    """Return whether this release has the trainer, and it can do without a reference model of its own."""
    trainer_class, _ = tiny.classes(name)
    return trainer_class is not None and "peft_config" in inspect.signature(trainer_class.__init__).parameters


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
        # Nash-MD of 0.11 and 0.12 has all gradients without the patch.
        if not _takes_an_adapter(name) or (name == "NashMD" and _is_before("0.13.0")):
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
        return tiny.TrainingResult(absent("this release has no online DPO of adapters"))
    if len({outcome.verdict for outcome in outcomes}) != 1:
        raise AssertionError(f"the trainers are not all alike: {outcomes}")
    return tiny.TrainingResult(outcomes[0], sum(losses), gradients)


def unaffected() -> tiny.TrainingResult:
    """Train without checkpointing, with a checkpoint that is not reentrant, and all weights."""
    runs = {
        "none": _Run("OnlineDPO", None),
        "not reentrant": _Run("OnlineDPO", {"use_reentrant": False}),
        "full": _Run("OnlineDPO", REENTRANT, adapter=False),
    }
    if any(run.acted for run in runs.values()):
        raise AssertionError(f"the wrapper acts: {[name for name, run in runs.items() if run.acted]}")
    gradients = {f"{name}.{key}": value for name, run in runs.items() for key, value in run.gradients.items()}
    return tiny.TrainingResult(absent("the decoder has its gradients"), runs["none"].loss, gradients)
