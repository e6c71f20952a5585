"""The proof: real GRPO runs that show a loss of 0.0, and healthy ones, of which nothing is said."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import tempfile
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from trl_hotfix.authoring import absent, judge

import tiny

OVERLAYS = ()
PARITY = False
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
"""Healthy there too, but each sequence weighs the same, and beta * KL begins as 0: that it is no bug is to be said."""


def equally_long(model: Any) -> None:
    """Completions of one length: every normalisation is then the mean over sequences."""
    import torch

    def generate(input_ids: Any, **kwargs: Any) -> Any:
        rows = [[*(10 + (7 * row + 3 * place) % 50 for place in range(5)), 1] for row in range(len(input_ids))]
        return torch.cat([input_ids, torch.tensor(rows)], dim=1)

    model.generate = generate


@contextmanager
def heard() -> Iterator[list[str]]:
    """What is said of the run in here; a filter, so that it is said to nobody else."""
    said: list[str] = []
    log = logging.getLogger("trl_hotfix")

    def keep(record: logging.LogRecord) -> bool:
        if record.getMessage().startswith("GRPO: "):
            said.append(record.getMessage())
            return False
        return True

    log.addFilter(keep)
    try:
        yield said
    finally:
        log.removeFilter(keep)


def made(model: Any, *, constant: bool = False, sparse: int = 0, **settings: Any) -> Any:
    """A trainer whose rewards are 0, 1, 2, 3 in each group; or equal, in all or in ``sparse`` of three."""
    from trl import GRPOTrainer

    if "prediction_step" not in vars(GRPOTrainer):
        # 0.14.0 cannot evaluate.
        settings = {name: value for name, value in settings.items() if not name.startswith("eval_")}
    usual = {"max_steps": 12, "max_grad_norm": 1.0, "learning_rate": 1e-2, "beta": 0.5, "per_device_eval_batch_size": 4}
    peft_config = settings.pop("peft_config", None)
    groups = 0

    class AsGiven(GRPOTrainer):
        @functools.wraps(GRPOTrainer.__init__)  # tiny.trainer reads the names of its arguments
        def __init__(self, **wanted: Any) -> None:
            evaluated = wanted["train_dataset"] if "eval_steps" in settings else None
            super().__init__(**wanted, peft_config=peft_config, eval_dataset=evaluated)

    def reward(completions: Any, **kwargs: Any) -> list[float]:
        nonlocal groups
        found: list[float] = []
        for _ in range(len(completions) // 4):
            found += [1.0] * 4 if constant or groups % 3 < sparse else [0.0, 1.0, 2.0, 3.0]
            groups += 1
        return found

    trainer = tiny.grpo(AsGiven, model, **{**usual, **settings})
    trainer.reward_funcs = [reward]
    once_for_each_sequence(model)
    return trainer


def once_for_each_sequence(model: Any) -> None:
    """0.14 asks ``generate`` for several sequences of each prompt, later releases for one of each repeated prompt."""
    generate = model.generate

    def repeated(input_ids: Any, **kwargs: Any) -> Any:
        asked = getattr(kwargs.get("generation_config"), "num_return_sequences", None) or 1
        return generate(input_ids.repeat_interleave(asked, dim=0), **kwargs)

    model.generate = repeated


def trained(folder: str, *, lora: bool = False, **settings: Any) -> list[str]:
    """What is said of a run."""
    with heard() as said:
        trainer = made(tiny.llama(folder, seed=0), peft_config=tiny.lora() if lora else None, **settings)
        if lora and settings.get("gradient_checkpointing"):
            trainer.model.enable_input_require_grads()  # up to 0.15 TRL does not (pull request 2848)
        trainer.train()
    return said


def by_construction(folder: str, lora: bool) -> list[str]:
    """The first case: a loss of 0 with a gradient: completions of one length and no KL term."""
    with heard() as said:
        model = tiny.llama(folder, seed=0)
        trainer = made(model, beta=0.0, max_steps=4, peft_config=tiny.lora() if lora else None)
        equally_long(model)
        once_for_each_sequence(model)
        trainer.train()
    assert all(abs(entry["loss"]) < 5e-5 for entry in trainer.state.log_history if "loss" in entry)
    return said


def frozen(folder: str, beta: float) -> list[str]:
    """A quantised PeftModel of TRL 0.23.0 (pull request 4081): the adapters were frozen, the inputs have gradients."""
    with heard() as said:
        trainer = made(tiny.llama(folder, seed=0), max_steps=2, beta=beta, peft_config=tiny.lora())
        trainer.model.requires_grad_(False)
        trainer.model.enable_input_require_grads()
        trainer.train()
    assert not any(bool(each.any()) for name, each in trainer.model.named_parameters() if ".lora_B." in name)
    return said


def beside_the_graph(folder: str) -> list[str]:
    """What is trainable is not what the loss depends on."""
    import torch

    with heard() as said:
        model = tiny.llama(folder, seed=0).requires_grad_(False)
        model.beside = torch.nn.Parameter(torch.ones(1))
        model.enable_input_require_grads()
        made(model).train()
    return said


def adapter(folder: str, *, weight: float) -> Any:
    """A PeftModel whose LoRA matrices B are ``weight``: 0 is as LoRA makes them."""
    import torch
    from peft import get_peft_model

    model = get_peft_model(tiny.llama(folder, seed=0), tiny.lora())
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if ".lora_B." in name:
                tensor.fill_(weight)
    return model


def on_top(folder: str, weight: float) -> list[str]:
    """``peft_config`` with a PeftModel. From 0.27 on that is an error, which says the same."""
    with heard() as said:
        try:
            made(adapter(folder, weight=weight), max_steps=1, peft_config=tiny.lora()).train()
        except ValueError as error:
            if "together with a `peft_config`" not in str(error):
                raise
            said.append("GRPO: peft_config was given with a model")
    return said


def for_inference(folder: str) -> list[str]:
    from peft import PeftModel

    adapter(folder, weight=1.0).save_pretrained(f"{folder}/adapter")
    with heard() as said:
        trainer = made(PeftModel.from_pretrained(tiny.llama(folder, seed=0), f"{folder}/adapter"), max_steps=2)
        trainer.model.enable_input_require_grads()
        trainer.train()
    return said


def past_liger(folder: str, prompt_learning: bool) -> list[str] | None:
    """The constructor with the Liger loss, of which only the names are there; None where there is none, or an error."""
    from peft import LoraConfig, PromptTuningConfig
    from trl import GRPOConfig
    from trl.trainer import grpo_trainer as leaf

    source = inspect.getsource(leaf)
    option = next((each for each in ("use_liger_loss", "use_liger_kernel") if f"self.{each} = args" in source), "")
    if not hasattr(GRPOConfig, option or "none"):
        return None
    if prompt_learning:
        peft_config: Any = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    else:
        peft_config = LoraConfig(r=2, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
    names: Any = types.ModuleType("liger_kernel.transformers")
    names._apply_liger_kernel_to_instance = lambda **settings: None
    with ExitStack() as stack:
        stack.enter_context(
            mock.patch.dict(sys.modules, {names.__name__.partition(".")[0]: names, names.__name__: names})
        )
        for module in ("trl.trainer.grpo_trainer", "transformers.trainer", "transformers.integrations.liger"):
            if hasattr(sys.modules.get(module), "is_liger_kernel_available"):
                stack.enter_context(mock.patch(f"{module}.is_liger_kernel_available", return_value=True))
        stack.enter_context(mock.patch.object(leaf, "LigerFusedLinearGRPOLoss", mock.Mock(), create=True))
        said = stack.enter_context(heard())
        try:
            made(tiny.llama(folder, seed=0), peft_config=peft_config, **{option: True})
        except (TypeError, ValueError) as error:
            # 0.17 refuses any PEFT model, later releases these two.
            if "is not supported with a PEFT model" not in str(error) and "is incompatible with" not in str(error):
                raise
            return None
    return said


def train() -> tiny.TrainingResult:
    import trl
    from packaging.version import Version

    if not hasattr(trl, "GRPOTrainer"):
        return tiny.TrainingResult(absent("this release has no GRPO"))
    from trl import GRPOTrainer, __version__  # patched in here, before anything is listened to

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
        # Unpatched, there is nobody to raise a false alarm.
        patched = not inspect.isfunction(vars(GRPOTrainer)["log"])
        healthy = {name: trained(folder, **settings) for name, settings in HEALTHY.items() if patched}
        if patched and Version(__version__) < Version("0.16"):
            cases["no bug"] += [healthy.pop(name) for name in ZERO_UP_TO_0_15]
        if Version(__version__) < Version("0.27"):
            healthy["peft_config with an adapter that is new"] = on_top(folder, weight=0.0)
    alarms = {name: said for name, said in healthy.items() if said}
    if alarms:
        raise AssertionError(f"of healthy runs it was said: {alarms}")
    runs = [(case, said) for case, its in cases.items() for said in its if said is not None]
    wrong = [
        (case, said) for case, said in runs if said and not (len(said) == 1 and said[0].startswith(f"GRPO: {case}"))
    ]
    if wrong:
        raise AssertionError(f"not one message, or not the right one: {wrong}")
    # What an error of TRL's own says is said with the patch and without.
    named = sum(bool(said) for case, said in runs)
    own = int(Version(__version__) >= Version("0.27"))
    return tiny.TrainingResult(judge(named - own, right=len(runs) - own, wrong=0, healthy=len(healthy)))
