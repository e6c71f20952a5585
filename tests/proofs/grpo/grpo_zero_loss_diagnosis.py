"""The proof: real GRPO runs that log a loss of 0.0, and healthy runs, which cause no message."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import logging
import sys
import tempfile
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import metadata
from typing import Any
from unittest import mock

import trl_hotfix
from trl_hotfix.authoring import absent, judge

import tiny

ID = "grpo-zero-loss-diagnosis"

OVERLAYS = ()
PARITY = False
MINILLM = "trl.experimental.minillm"
VARIANTS = "It changes nothing that is computed; its proof is two dozen runs, with adapters among them."

HEALTHY: dict[str, dict[str, Any]] = {
    "full": {},
    "LoRA": {"lora": True},
    "LoRA, checkpointing": {"lora": True, "gradient_checkpointing": True},
    "beta 0": {"beta": 0.0},
    "loss_type grpo": {"loss_type": "grpo"},
    "loss_type dr_grpo": {"loss_type": "dr_grpo"},
    "two iterations": {"num_iterations": 2},
    "means of three steps, evaluation between them": {"logging_steps": 3, "eval_strategy": "steps", "eval_steps": 3},
    "two micro-batches": {"gradient_accumulation_steps": 2},
    "a slice of a generation in each step": {"steps_per_generation": 4, "gradient_accumulation_steps": 1, "sparse": 1},
    "no learning rate yet": {"warmup_steps": 5000, "lr_scheduler_type": "linear"},
    "two of three groups without a signal": {"sparse": 2},
    "the same, means of five steps": {"sparse": 2, "logging_steps": 5, "max_steps": 40},
    "no gradient norm": {"max_grad_norm": 0.0},
    "a whole batch's deviation": {"scale_rewards": "batch", "sparse": 1},
}

ZERO_UP_TO_0_15 = ("LoRA", "LoRA, checkpointing", "beta 0", "no learning rate yet")
"""These are healthy there too, but each sequence weighs the same and beta * KL begins as 0: the message is "no bug"."""


def equally_long(model: Any) -> None:
    """Make all completions of one length: every normalisation is then the mean over sequences."""
    import torch

    def generate(input_ids: Any, **kwargs: Any) -> Any:
        rows = [[*(10 + (7 * row + 3 * place) % 50 for place in range(5)), 1] for row in range(len(input_ids))]
        return torch.cat([input_ids, torch.tensor(rows)], dim=1)

    model.generate = generate


@contextmanager
def captured_messages() -> Iterator[list[str]]:
    """Collect the messages about the run. A filter does it, so that they reach no other handler."""
    messages: list[str] = []
    log = logging.getLogger("trl_hotfix")

    def keep(record: logging.LogRecord) -> bool:
        if record.getMessage().startswith("GRPO: "):
            messages.append(record.getMessage())
            return False
        return True

    log.addFilter(keep)
    try:
        yield messages
    finally:
        log.removeFilter(keep)


def new_trainer(model: Any, *, constant: bool = False, sparse: int = 0, **settings: Any) -> Any:
    """Return a trainer whose rewards are 0, 1, 2, 3 in each group; or equal, in all or in ``sparse`` of three."""
    from trl import GRPOTrainer

    if "prediction_step" not in vars(GRPOTrainer):
        # 0.14.0 cannot evaluate.
        settings = {name: value for name, value in settings.items() if not name.startswith("eval_")}
    usual = {"max_steps": 12, "max_grad_norm": 1.0, "learning_rate": 1e-2, "beta": 0.5, "per_device_eval_batch_size": 4}
    peft_config = settings.pop("peft_config", None)
    groups = 0

    class WithAdapterAndEvaluation(GRPOTrainer):
        @functools.wraps(GRPOTrainer.__init__)  # tiny.trainer reads the names of its arguments
        def __init__(self, **kwargs: Any) -> None:
            eval_dataset = kwargs["train_dataset"] if "eval_steps" in settings else None
            super().__init__(**kwargs, peft_config=peft_config, eval_dataset=eval_dataset)

    def reward(completions: Any, **kwargs: Any) -> list[float]:
        nonlocal groups
        rewards: list[float] = []
        for _ in range(len(completions) // 4):
            rewards += [1.0] * 4 if constant or groups % 3 < sparse else [0.0, 1.0, 2.0, 3.0]
            groups += 1
        return rewards

    trainer = tiny.grpo(WithAdapterAndEvaluation, model, reward_funcs=reward, **{**usual, **settings})
    once_for_each_sequence(model)
    return trainer


def once_for_each_sequence(model: Any) -> None:
    """0.14 asks ``generate`` for several sequences of each prompt, later releases for one of each repeated prompt."""
    generate = model.generate

    def repeated(input_ids: Any, **kwargs: Any) -> Any:
        repeats = getattr(kwargs.get("generation_config"), "num_return_sequences", None) or 1
        return generate(input_ids.repeat_interleave(repeats, dim=0), **kwargs)

    model.generate = repeated


def trained(folder: str, *, lora: bool = False, **settings: Any) -> list[str]:
    """Train one run and return its messages."""
    with captured_messages() as messages:
        trainer = new_trainer(tiny.llama(folder, seed=0), peft_config=tiny.lora() if lora else None, **settings)
        if lora and settings.get("gradient_checkpointing"):
            trainer.model.enable_input_require_grads()  # up to 0.15 TRL does not (pull request 2848)
        trainer.train()
    return messages


def by_construction(folder: str, lora: bool) -> list[str]:
    """Train the first case, a loss of 0 with a gradient: completions of one length and no KL term."""
    with captured_messages() as messages:
        model = tiny.llama(folder, seed=0)
        trainer = new_trainer(model, beta=0.0, max_steps=4, peft_config=tiny.lora() if lora else None)
        equally_long(model)
        once_for_each_sequence(model)
        trainer.train()
    assert all(abs(entry["loss"]) < 5e-5 for entry in trainer.state.log_history if "loss" in entry)
    return messages


def frozen(folder: str, beta: float) -> list[str]:
    """Train as TRL 0.23.0 does a quantised PeftModel (pull request 4081): frozen adapters, inputs with gradients."""
    with captured_messages() as messages:
        trainer = new_trainer(tiny.llama(folder, seed=0), max_steps=2, beta=beta, peft_config=tiny.lora())
        trainer.model.requires_grad_(False)
        trainer.model.enable_input_require_grads()
        trainer.train()
    assert not any(bool(weight.any()) for name, weight in trainer.model.named_parameters() if ".lora_B." in name)
    return messages


def beside_the_graph(folder: str) -> list[str]:
    """Train a model whose loss does not depend on its only trainable parameter."""
    import torch

    with captured_messages() as messages:
        model = tiny.llama(folder, seed=0).requires_grad_(False)
        model.beside = torch.nn.Parameter(torch.ones(1))
        model.enable_input_require_grads()
        new_trainer(model).train()
    return messages


def adapter(folder: str, *, weight: float) -> Any:
    """Return a PeftModel whose LoRA matrices B are ``weight``. A new LoRA has 0."""
    import torch
    from peft import get_peft_model

    model = get_peft_model(tiny.llama(folder, seed=0), tiny.lora())
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if ".lora_B." in name:
                tensor.fill_(weight)
    return model


def on_top(folder: str, weight: float) -> list[str]:
    """Train with ``peft_config`` on a PeftModel. From 0.27 on that is an error, which counts as the same message."""
    with captured_messages() as messages:
        try:
            new_trainer(adapter(folder, weight=weight), max_steps=1, peft_config=tiny.lora()).train()
        except ValueError as error:
            if "together with a `peft_config`" not in str(error):
                raise
            messages.append("GRPO: peft_config was given with a model")
    return messages


def for_inference(folder: str) -> list[str]:
    from peft import PeftModel

    adapter(folder, weight=1.0).save_pretrained(f"{folder}/adapter")
    with captured_messages() as messages:
        trainer = new_trainer(PeftModel.from_pretrained(tiny.llama(folder, seed=0), f"{folder}/adapter"), max_steps=2)
        trainer.model.enable_input_require_grads()
        trainer.train()
    return messages


def minillm(folder: str) -> list[str]:
    """Train MiniLLM with its defaults: all rewards are equal, and its loss is the divergence from the teacher."""
    from trl.experimental.minillm import MiniLLMConfig, MiniLLMTrainer

    class WithTeacher(MiniLLMTrainer):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs["reward_funcs"] = None
            super().__init__(*args, teacher_model=tiny.llama(folder, seed=1), **kwargs)

    with captured_messages() as messages:
        model = tiny.llama(folder, seed=0)
        tiny.grpo(WithTeacher, model, MiniLLMConfig, max_steps=12, max_grad_norm=1.0).train()
    return messages


def past_liger(folder: str, prompt_learning: bool) -> list[str] | None:
    """Make a trainer with the Liger loss, whose names alone are installed. Return its messages.

    Return None if the release has no Liger loss or refuses the combination.
    """
    from peft import LoraConfig, PromptTuningConfig
    from trl import GRPOConfig
    from trl.trainer import grpo_trainer

    source = inspect.getsource(grpo_trainer)
    options = ("use_liger_loss", "use_liger_kernel")
    option = next((name for name in options if f"self.{name} = args" in source), "")
    if not hasattr(GRPOConfig, option or "none"):
        return None
    if prompt_learning:
        peft_config: Any = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    else:
        peft_config = LoraConfig(r=2, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
    liger: Any = types.ModuleType("liger_kernel.transformers")
    liger._apply_liger_kernel_to_instance = lambda **settings: None
    with ExitStack() as stack:
        stack.enter_context(
            mock.patch.dict(sys.modules, {liger.__name__.partition(".")[0]: liger, liger.__name__: liger})
        )
        for module in ("trl.trainer.grpo_trainer", "transformers.trainer", "transformers.integrations.liger"):
            if hasattr(sys.modules.get(module), "is_liger_kernel_available"):
                stack.enter_context(mock.patch(f"{module}.is_liger_kernel_available", return_value=True))
        stack.enter_context(mock.patch.object(grpo_trainer, "LigerFusedLinearGRPOLoss", mock.Mock(), create=True))
        messages = stack.enter_context(captured_messages())
        try:
            new_trainer(tiny.llama(folder, seed=0), peft_config=peft_config, **{option: True})
        except (TypeError, ValueError) as error:
            # 0.17 refuses any PEFT model, later releases these two.
            if "is not supported with a PEFT model" not in str(error) and "is incompatible with" not in str(error):
                raise
            return None
    return messages


def train() -> tiny.TrainingResult:
    import trl
    from packaging.version import Version

    # ``trl.__version__`` is "unknown" in 0.22.0.
    release = Version(metadata.version("trl"))

    if not hasattr(trl, "GRPOTrainer"):
        return tiny.TrainingResult(absent("this release has no GRPO"))
    importlib.import_module("trl.trainer.grpo_trainer")  # This applies the patch, before any message is captured.

    with tempfile.TemporaryDirectory() as folder:
        cases = {
            "no bug": [by_construction(folder, lora=False), by_construction(folder, lora=True)],
            "no learning signal": [
                trained(folder, constant=True),
                trained(folder, constant=True, logging_steps=5, beta=0.0),
            ],
            "no gradient": [frozen(folder, 0.0), frozen(folder, 0.5), beside_the_graph(folder)],
            "peft_config was given": [on_top(folder, weight=1.0)],
            "0 of": [for_inference(folder)],
            "the Liger loss goes past": [past_liger(folder, False), past_liger(folder, True)],
        }
        # Without the patch there are no messages, so no false alarms either.
        patched = trl_hotfix.status()[ID].state.value == "applied"
        healthy = {name: trained(folder, **settings) for name, settings in HEALTHY.items() if patched}
        if patched and release < Version("0.16"):
            cases["no bug"] += [healthy.pop(name) for name in ZERO_UP_TO_0_15]
        if patched and importlib.util.find_spec("trl.experimental") and importlib.util.find_spec(MINILLM):
            healthy["MiniLLM"] = minillm(folder)
        if release < Version("0.27"):
            healthy["peft_config with an adapter that is new"] = on_top(folder, weight=0.0)
    alarms = {name: messages for name, messages in healthy.items() if messages}
    if alarms:
        raise AssertionError(f"of healthy runs it was said: {alarms}")
    runs = [(case, messages) for case, attempts in cases.items() for messages in attempts if messages is not None]
    wrong = [
        (case, messages)
        for case, messages in runs
        if messages and not (len(messages) == 1 and messages[0].startswith(f"GRPO: {case}"))
    ]
    if wrong:
        raise AssertionError(f"not one message, or not the right one: {wrong}")
    # TRL raises its own error with the patch and without it, so that case does not count.
    diagnosed = sum(bool(messages) for _, messages in runs)
    errors = int(release >= Version("0.27"))
    return tiny.TrainingResult(judge(diagnosed - errors, right=len(runs) - errors, wrong=0, healthy=len(healthy)))


def unaffected() -> tiny.TrainingResult:
    """Train a healthy run, about which nothing is said. In the place of gradients are the weights that it ends with."""
    with tempfile.TemporaryDirectory() as folder, captured_messages() as messages:
        trainer = new_trainer(tiny.llama(folder, seed=0), max_steps=4)
        trainer.train()
    if messages:
        raise AssertionError(f"of a healthy run it was said: {messages}")
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weights = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    return tiny.TrainingResult(absent("the loss is not 0"), sum(losses), weights)
