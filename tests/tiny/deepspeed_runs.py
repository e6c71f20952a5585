"""Optimizer steps under DeepSpeed: how the weights move, and the gradients of the micro-batches by the plain model."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from .data import preferences_of_several_lengths, tokenizer
from .launching import deepspeed
from .measuring import TrainingResult
from .models import llama
from .steps import acts as acts_of_target
from .trainers import classes, config, trainer

STEPS = 2


@dataclass
class DeepSpeedStep:
    """An optimizer step of SGD with a rate of 1: the weights before it, and the gradients of its micro-batches."""

    before: dict[str, Any]
    gradients: list[dict[str, Any]] = field(default_factory=list)
    moved: dict[str, Any] = field(default_factory=dict)

    def sum_of(self, *numbers: int) -> dict[str, Any]:
        """Return the sum of the gradients of these micro-batches, of all by default."""
        chosen = [self.gradients[number] for number in numbers] if numbers else self.gradients
        return {name: sum(gradients[name] for gradients in chosen) for name in self.before}


def deepspeed_run(method: str, *, micro_batches: int, stage: int, offloads: bool = False, plain: bool = False) -> Any:
    """Return a trainer that was trained for two steps, with ``steps`` and ``losses``.

    The gradients of a micro-batch are those that come to the parameters, before DeepSpeed adds them up. With ``plain``
    they are those of the loss of the plain model, times the factor between this loss and what goes backward.
    """
    import torch

    trainer_class, config_class = classes(method)

    class Recorder(trainer_class):  # type: ignore[misc, valid-type]
        def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
            if self.optimizer is None:
                # One group: transformers' second is empty for a model without biases, and DeepSpeed drops it.
                self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
            return self.optimizer

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not model.training:
                return super().compute_loss(model, inputs, *args, **kwargs)
            if not self.steps or len(self.steps[-1].gradients) == micro_batches:
                self.steps.append(DeepSpeedStep(weights(self.model)))
            self.steps[-1].gradients.append({})
            if plain:
                loss = super().compute_loss(self.model, dict(inputs), *args, **kwargs)
                named = dict(self.model.named_parameters())
                gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
                self.steps[-1].gradients[-1] = dict(zip(named, gradients, strict=True))
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            self.losses.append(float(loss.detach()))
            return loss

    words = tokenizer()
    # The DPO of 0.9.6 puts one in front, whether there is one or not.
    words.bos_token = "<unk>"
    data = preferences_of_several_lengths()
    if method == "SFT":
        data = data.map(lambda row: {"text": row["prompt"] + row["chosen"]}).select_columns(["text"])
    zero = deepspeed(stage)
    zero |= {"zero_force_ds_cpu_optimizer": False, "gradient_clipping": 0.0}
    if offloads:
        zero["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    settings = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": micro_batches, "max_steps": STEPS}
    settings |= {"dataset_text_field": "text"} if method == "SFT" else {}
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        run = trainer(
            Recorder,
            model=llama(folder, seed=0),
            args=config(
                config_class, **settings, learning_rate=1.0, max_length=32, max_prompt_length=16, deepspeed=zero
            ),
            train_dataset=data,
            tokenizer=words,
            **({"ref_model": llama(folder, seed=1)} if method == "DPO" else {}),
        )
    run.steps, run.losses = [], []
    if plain:
        _scale_as_the_loss(run)
    else:
        _keep_what_comes(run)
    run.train()
    after = [step.before for step in run.steps[1:]] + [weights(run.model)]
    for step, following in zip(run.steps, after, strict=True):
        assert len(step.gradients) == micro_batches
        step.moved = {name: step.before[name] - following[name] for name in step.before}
    assert len(run.steps) == STEPS
    return run


def _scale_as_the_loss(run: Any) -> None:
    """Multiply the gradients of the plain model by the factor between the loss and what goes backward."""
    backward = run.accelerator.backward

    def scaled(loss: Any, *args: Any, **options: Any) -> Any:
        factor, gradients = float(loss.detach()) / run.losses[-1], run.steps[-1].gradients[-1]
        for name, gradient in gradients.items():
            gradients[name] = factor * gradient
        return backward(loss, *args, **options)

    run.accelerator.backward = scaled


def _keep_what_comes(run: Any) -> None:
    def keep(name: str, gradient: Any) -> None:
        run.steps[-1].gradients[-1][name] = gradient.detach().clone()

    for name, parameter in run.model.named_parameters():
        parameter.register_hook(partial(keep, name))


def weights(model: Any) -> dict[str, Any]:
    """Return a copy of the parameters of the model."""
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def length(gradients: Mapping[str, Any]) -> float:
    """Return the Euclidean norm of all gradients together."""
    import torch

    return float(torch.cat([value.flatten() for value in gradients.values()]).double().norm())


def largest_difference(gradients: Mapping[str, Any], expected: Mapping[str, Any]) -> float:
    """Return the largest difference of one number of the gradients."""
    return max(float((value - expected[name]).abs().max()) for name, value in gradients.items())


def acts(patch_id: str, run: Any) -> int | None:
    """Return in how many micro-batches the patch acted, on whichever class it is, or None if it was not on."""
    targets = [f"{base.__module__}:{base.__name__}.training_step" for base in type(run).__mro__]
    counts = [acted for target in targets if (acted := acts_of_target(patch_id, target, run)) is not None]
    return sum(counts) if counts else None


def result_of(runs: Mapping[str, Any], outcome: Any) -> TrainingResult:
    """Return the sum of all losses, and how the weights have moved in every step."""
    moved = {
        f"{name} {number} {key}": value
        for name, run in runs.items()
        for number, step in enumerate(run.steps)
        for key, value in step.moved.items()
    }
    return TrainingResult(outcome, sum(sum(run.losses) for run in runs.values()), moved)
