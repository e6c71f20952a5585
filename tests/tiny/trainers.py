"""Configs and trainers of any release: fields and parameters by the names that this release has."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import tempfile
from importlib import import_module
from typing import Any

from .variants import state


def config(config_class: type, **settings: Any) -> Any:
    """Return an instance of a TRL config. Settings for which this release has no field are left out."""
    fields = {field.name for field in dataclasses.fields(config_class)}
    defaults = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "max_steps": 1,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "seed": 0,
        "disable_tqdm": True,
        "gradient_checkpointing": False,
    }
    if state.variant == "compiled":
        defaults |= {"torch_compile": True, "torch_compile_backend": state.compiler}
    settings = {**defaults, **settings, **state.overrides}
    return config_class(**{name: value for name, value in settings.items() if name in fields})


def trainer(trainer_class: type, **arguments: Any) -> Any:
    """Return a trainer. The argument ``tokenizer`` is passed under the name that it has in this release."""
    if "tokenizer" in arguments and "processing_class" in parameters(trainer_class):
        arguments["processing_class"] = arguments.pop("tokenizer")
    if state.variant in ("lora", "full"):
        arguments.pop("peft_config", None)
    if state.variant == "lora":
        arguments.pop("ref_model", None)  # The model without its adapter is the reference.
    instance = trainer_class(**arguments)
    state.trained.add("lora" if hasattr(instance.model, "peft_config") else "full")
    state.fingerprints.append(getattr(instance.train_dataset, "_fingerprint", ""))
    return instance


def parameters(trainer_class: type) -> set[str]:
    """Return what the trainer's constructor takes.

    A class that was moved or renamed passes everything on to the class that replaces it, so its bases are searched.
    """
    names_by_class = (set(inspect.signature(base.__init__).parameters) for base in trainer_class.__mro__)
    return next(names for names in names_by_class if names != {"self", "args", "kwargs"})


def classes(name: str) -> tuple[Any, Any]:
    """Return the trainer and its config, or None twice: some moved to ``trl.experimental``, others were removed."""
    folder = {"OnlineDPO": "online_dpo", "NashMD": "nash_md"}.get(name, name.lower())
    for module_name in (f"trl.experimental.{folder}", "trl"):
        with contextlib.suppress(AttributeError, ImportError):
            module = import_module(module_name)
            return getattr(module, f"{name}Trainer"), getattr(module, f"{name}Config")
    return None, None


def methods_with_a_reference_adapter() -> list[str]:
    """Return the trainers that make a reference of the adapter of a PeftModel."""
    return [
        name
        for name in ("GRPO", "RLOO", "DPO", "KTO")
        if _makes_a_reference_adapter(classes_with_a_reference_adapter(name)[0])
    ]


def classes_with_a_reference_adapter(method: str) -> tuple[Any, Any]:
    """Return the trainer and its config. KTO was experimental from 1.2.0 to 1.7.1, and left its old name behind."""
    import trl

    of_trl = getattr(trl, f"{method}Trainer"), getattr(trl, f"{method}Config")
    return classes(method) if method == "KTO" and not _makes_a_reference_adapter(of_trl[0]) else of_trl


def _makes_a_reference_adapter(trainer_class: Any) -> bool:
    # The constructor may be wrapped.
    return "ref" in inspect.unwrap(trainer_class.__init__).__code__.co_consts
