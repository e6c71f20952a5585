"""What a setting changes of what a trainer is given, whichever trainer it is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import architectures, forms, images, materials, stand_ins
from .effects import Given
from .setting import HELD_OUT, Setting


def made(trainer_class: Any, arguments: dict[str, Any], setting: Setting, folder: Path) -> Any:
    """Return a trainer of these arguments, as the setting has them. ``folder`` is for what is saved before."""
    if setting.images:
        arguments = images.given(arguments, setting.images, _tokenizer_in(arguments), folder)
    name = "model" if "model" in arguments else "policy"
    model = arguments[name] = _model(arguments[name], setting, folder)
    if setting.reference != "another":
        other = type(model).from_pretrained(model.name_or_path) if setting.reference == "same" else None
        arguments["ref_model"] = other
    _set_text(arguments, setting)
    answers = vars(model).get("generate")
    if setting.samples:
        vars(model).pop("generate", None)
    elif isinstance(answers, materials.AnswersFromTable):
        answers.first = setting.answers_from + _place_in_group(setting, answers.count)
    if setting.evaluates:
        arguments["eval_dataset"] = _evaluated(arguments["train_dataset"], setting)
    if setting.data == "stream":
        arguments["train_dataset"] = arguments["train_dataset"].to_iterable_dataset()
    if setting.callback:
        arguments["callbacks"] = [*arguments.get("callbacks", ()), _callback(setting)]
    given = Given(arguments)
    made_of = {**arguments, **({name: model.name_or_path} if setting.by_path else {})}
    with stand_ins.server(arguments.get("args"), answers, arguments[_tokenizer_in(arguments)]):
        trainer = trainer_class(**made_of)
    trainer.given = given
    if setting.by_path and answers is not None:
        trainer.model.generate = answers
    return trainer


def _set_text(arguments: dict[str, Any], setting: Setting) -> None:
    """Give the tokenizer its marks, and the rows their form."""
    name = _tokenizer_in(arguments)
    if setting.marks:
        arguments[name] = forms.with_marks(arguments[name], setting.marks)
    if setting.form.startswith("conversation") and hasattr(arguments["args"], "dataset_text_field"):
        # A conversation stands in no field of text. Early releases ask for that first.
        arguments["args"].dataset_text_field = type(arguments["args"]).dataset_text_field
    if setting.form:
        arguments["train_dataset"] = forms.in_form(arguments["train_dataset"], setting.form, arguments[name])


def _tokenizer_in(arguments: Mapping[str, Any]) -> str:
    return "processing_class" if "processing_class" in arguments else "tokenizer"


def _place_in_group(setting: Setting, count: int) -> int:
    """Return the place of this rank's first completion in its group, which several ranks may share."""
    return int(os.environ.get("RANK", "0")) * setting.batch_size % count if setting.ranks > 1 else 0


def _evaluated(rows: Any, setting: Setting) -> Any:
    """Return the rows to evaluate on, or two sets of them by name."""
    if setting.evaluates == "training":
        return rows
    held_out = rows.select(HELD_OUT)
    if setting.evaluates == "two sets":
        return {"first": held_out, "second": rows.select(range(len(HELD_OUT), 2 * len(HELD_OUT)))}
    return held_out


def _callback(setting: Setting) -> Any:
    import trl

    options: Mapping[str, Any] = {"BEMACallback": {"update_freq": 1}}.get(setting.callback, {})
    return getattr(trl, setting.callback)(**options)


def _model(model: Any, setting: Setting, folder: Path) -> Any:
    """Return the model in the setting's dtype, with its adapter from disk, or that of another trainer."""
    import torch

    if setting.base is not None:
        return materials.answering_as(model, setting.base)
    if setting.architecture:
        model = materials.answering_as(model, architectures.model_of(setting.architecture, model, folder))
    model = model.to(getattr(torch, setting.dtype))
    if setting.adapter != "path":
        return model
    from peft import PeftModel, get_peft_model

    get_peft_model(model, materials.lora(model)).save_pretrained(folder / "adapter")
    base = type(model).from_pretrained(model.name_or_path)
    return materials.answering_as(model, PeftModel.from_pretrained(base, folder / "adapter", is_trainable=True))
