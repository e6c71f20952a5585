"""A fork of the script: what it changes at the constructor and at ``train()``, and what it notes."""

from __future__ import annotations

import functools
import inspect
import os
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..patching import given
from . import generation, hits, loading, ordering, owners, recorder, rows
from .argument_classes import ArgumentClasses, defaults, given_to, made_again
from .collating import BesideALongerRow
from .forks import Outcome, write
from .rewards import Rewards
from .safe_arguments import made_safe
from .shapes import as_arguments, shape_of
from .tracing import Trace
from .variant import ALL, Variant

PACK = 48
"""The tokens of a pack."""


class OneRun:
    """One run of the script, from the constructor of its trainer on."""

    def __init__(self, variant: Variant, out: Path, folder: Path, configs: ArgumentClasses) -> None:
        self._variant, self._out, self._folder, self._configs = variant, out, folder, configs
        self._outcome = Outcome()
        self._rewards = Rewards(variant.stand_ins)
        self._given: dict[str, Any] = {}
        self._told: dict[str, Any] = {}
        self._config: Any = None
        self._collator: Any = None
        self.is_constructed = False

    def begin(self, cls: Any) -> None:
        """Prepare the constructor of a trainer of this class, which is about to run."""
        if self._variant.patches:
            self._apply_patches()
        self._configs.make = self.arguments
        of_trl = owners.class_of_trl(cls)
        if cls is not of_trl:
            once(of_trl, self._construct_by_name)
        once(cls, self._construct)

    def arguments(self, given_arguments: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return what to give to a config in this run."""
        return arguments_of(self._variant, given_arguments, fields, str(self._folder / "output"))

    def failed(self, error: BaseException) -> None:
        """Write what the script has raised, and end."""
        self._outcome.error = f"{type(error).__name__}: {error}"
        frames = traceback.extract_tb(error.__traceback__)
        ours = str(Path(__file__).parent)
        where = [frame for frame in frames if not frame.filename.startswith(ours)]
        self._outcome.where = f"{Path(where[-1].filename).name}:{where[-1].lineno}" if where else ""
        traceback.print_exception(error)
        write(self._outcome, self._out)

    def never_trained(self) -> None:
        self._outcome.error = "the script ends without a call of train()"
        write(self._outcome, self._out)

    # At the constructor.

    def _apply_patches(self) -> None:
        from ..patching import engine

        self._configs.is_on = False
        os.environ.pop("TRL_HOTFIX", None)
        only = None if self._variant.patches == (ALL,) else list(self._variant.patches)
        try:
            engine.ENGINE.apply(only, None, None, None)
        finally:
            self._configs.is_on = True

    def _construct(self, original: Callable[..., None], trainer: Any, args: Any, kwargs: Any) -> None:
        """Call the outermost constructor. Its arguments are known by their types."""
        args = tuple(self._changed(value) for value in args)
        kwargs = {name: self._changed(value) for name, value in kwargs.items()}
        try:
            if type(trainer) is owners.class_of_trl(type(trainer)):
                self._construct_by_name(original, trainer, args, kwargs)
            else:
                original(trainer, *args, **kwargs)
        # It is the user's code, or TRL's with what a relation changes.
        except Exception as error:  # noqa: BLE001
            self.failed(error)
        self.is_constructed = True
        trainer.train = functools.partial(self._train, trainer)

    def _changed(self, value: Any) -> Any:
        from transformers import TrainingArguments

        if isinstance(value, TrainingArguments):
            self._config = value
            self._told = given_to(value)
            return made_again(value)
        return in_float(rows.cut(value))

    def _construct_by_name(self, original: Callable[..., None], trainer: Any, args: Any, kwargs: Any) -> None:
        """Call TRL's own constructor. Its arguments are known by their names."""
        signature = inspect.signature(original)
        bound = signature.bind(trainer, *args, **kwargs)
        named = bound.arguments
        self._given = dict(list(named.items())[1:])
        given.note(trainer, original, args, kwargs)
        if named.get("args") is not None and not self._told:
            self._told = given_to(named["args"])
        for name in self._variant.without:
            if name in named:
                named[name] = None
        if "reward_funcs" in named and named["reward_funcs"] is not None:
            named["reward_funcs"] = self._rewards.wrapped(named["reward_funcs"])
        for name in ("train_dataset", "eval_dataset"):
            if named.get(name) is not None:
                named[name] = rows.cut(named[name])
        original(*bound.args, **bound.kwargs)
        self._collator = trainer.data_collator

    # At train().

    def _train(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        try:
            self._outcome.facts = self._facts(trainer)
            self._prepare(trainer)
            run = self._outcome.run
            trainer.add_callback(recorder.callback(trainer, run))
            run.start = recorder.weights(trainer)
            trace = Trace(trainer) if self._variant.traced else None
            if trace:
                trace.install()
            if self._variant.drawn:
                _draw()
            type(trainer).train(trainer)
            run.weights = recorder.weights(trainer)
            if trace:
                self._outcome.trace = trace.found()
            self._outcome.notes["rewards"] = self._rewards.problems()
            self._outcome.notes |= by_the_patches(trainer)
            self._outcome.notes["taken"] = list(loading.TAKEN)
        # It is the user's code and TRL's, which may raise anything: the answer has it.
        except Exception as error:  # noqa: BLE001
            self.failed(error)
        write(self._outcome, self._out)

    def _facts(self, trainer: Any) -> dict[str, Any]:
        facts = owners.facts(trainer, self._given)
        of_trl = owners.class_of_trl(type(trainer))
        shape = shape_of(self._told, defaults(type(trainer.args)))
        facts |= {
            "trainer": type(trainer).__name__,
            "of_trl": of_trl.__name__,
            "shape": shape,
            "evaluates": getattr(trainer, "eval_dataset", None) is not None,
            "rows": rows.held(trainer.train_dataset),
            "optimizer": getattr(trainer, "optimizer", None) is not None,
            "generates": "reward_funcs" in inspect.signature(of_trl.__init__).parameters,
            "widens": "pad_to_multiple_of" in defaults(type(trainer.args)),
            "settings": _settings(self._told, trainer.args),
            "parameters": sum(weight.numel() for weight in trainer.model.parameters()),
            "packs": bool(getattr(trainer.args, "packing", False) or getattr(trainer.args, "padding_free", False)),
            "generation": _has_generations_of_its_own(self._told),
            "reused": _generates_for_several_steps(trainer.args),
        }
        if self._variant == Variant():
            facts["bugs"] = hits.of(trainer, self._told)
        return facts

    def _prepare(self, trainer: Any) -> None:
        from transformers import EarlyStoppingCallback

        variant, notes = self._variant, self._outcome.notes
        shape = self._outcome.facts["shape"]
        without_dropout(trainer.model)
        if getattr(trainer, "ref_model", None) is not None:
            without_dropout(trainer.ref_model)
        if "data_collator" in variant.without and owners.is_of_library(type(self._collator)):
            trainer.data_collator = self._collator
        # It refuses a run without evaluations.
        trainer.remove_callback(EarlyStoppingCallback)
        if "callbacks" in variant.without:
            for each in [one for one in trainer.callback_handler.callbacks if not owners.is_of_library(type(one))]:
                trainer.remove_callback(each)
        if "compute_loss_func" in variant.without and hasattr(trainer, "compute_loss_func"):
            trainer.compute_loss_func = None
        if variant.wider and not self._outcome.facts["generates"]:
            trainer.data_collator = BesideALongerRow(trainer.data_collator, notes)
        if hasattr(trainer, "_get_train_sampler"):
            group = shape.group if self._outcome.facts["generates"] else 1
            ordering.settle(trainer, shape.rows, group, notes, is_reversed=variant.reversed)
        if self._outcome.facts["generates"]:
            generation.in_order()
            words = getattr(trainer, "processing_class", None) or trainer.tokenizer
            beyond = 8 if variant.wider else 0
            length = generation.LONGEST if variant.equal_lengths else 0
            generation.put_on(trainer, getattr(words, "tokenizer", words), beyond=beyond, length=length)
            _note_width(trainer, notes)
        of_trl = owners.class_of_trl(type(trainer))
        if variant.of_trl:
            trainer.__class__ = of_trl
        elif variant.methods:
            methods = {name: getattr(of_trl, name) for name in variant.methods}
            trainer.__class__ = type(type(trainer).__name__, (type(trainer),), methods)


def arguments_of(
    variant: Variant, given_arguments: Mapping[str, Any], fields: Mapping[str, Any], folder: str
) -> dict[str, Any]:
    """Return what to give to a config in a run."""
    safe = made_safe(given_arguments, fields, folder)
    if "gradient_accumulation_steps" in fields:
        shape = shape_of(given_arguments, fields)
        safe |= as_arguments(shape, variant.batch_size, variant.accumulation, fields)
    if variant.generation:
        safe["steps_per_generation"] = variant.generation * safe["gradient_accumulation_steps"]
    if variant.width:
        safe["pad_to_multiple_of"] = variant.width
    if safe.get("packing"):
        # Few rows fill few packs of the user's length.
        for name in ("max_length", "max_seq_length"):
            if name in fields:
                safe[name] = min(value if isinstance(value := safe.get(name), int) else PACK, PACK)
    if variant.evaluates:
        name = "eval_strategy" if "eval_strategy" in fields else "evaluation_strategy"
        safe |= {name: "steps", "eval_steps": 1}
    return safe


def once(cls: Any, replacement: Callable[..., None]) -> None:
    """Have the next call of a class's constructor go through ``replacement(original, trainer, args, kwargs)``."""
    own = vars(cls).get("__init__")
    original = cls.__init__

    @functools.wraps(original)
    def construct(trainer: Any, *args: Any, **kwargs: Any) -> None:
        if own is None:
            del cls.__init__
        else:
            cls.__init__ = own
        replacement(original, trainer, args, kwargs)

    cls.__init__ = construct


def in_float(value: Any) -> Any:
    """Return a model in float32; anything else as it is."""
    import torch

    return value.float() if isinstance(value, torch.nn.Module) else value


def without_dropout(model: Any) -> None:
    import torch

    for module in model.modules() if isinstance(model, torch.nn.Module) else ():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def by_the_patches(trainer: Any) -> dict[str, list[str]]:
    """Return the ids of the patches that this trainer called, of those that acted, and of those that stand."""
    from .. import witness

    counts = list(witness.ledger_of(trainer).every())
    return {
        "called": sorted({each.patch for _, each, count in counts if count.called or count.unseen}),
        "acted": sorted({each.patch for _, each, count in counts if count.acted}),
        "standing": sorted({each.patch for each in witness.standing()}),
    }


def _generates_for_several_steps(args: Any) -> bool:
    times = getattr(args, "steps_per_generation", None)
    several = times is not None and times != args.gradient_accumulation_steps
    return several or (getattr(args, "num_iterations", 1) or 1) > 1


def _has_generations_of_its_own(told: Mapping[str, Any]) -> bool:
    """Return whether the user's generations serve more or less than one step."""
    times, accumulation = told.get("steps_per_generation"), told.get("gradient_accumulation_steps") or 1
    return (times is not None and times != accumulation) or told.get("generation_batch_size") is not None


def _settings(told: Mapping[str, Any], args: Any) -> str:
    """Return what the user has set, as a claim of the ledger names it: ``loss_type=bnpo``."""
    words = []
    for name, default in defaults(type(args)).items():
        value = told.get(name, default)
        if name == "loss_type" or (name in told and value != default):
            words.append(f"{name}={value}")
    return " ".join(words)


def _note_width(trainer: Any, notes: dict[str, Any]) -> None:
    """Note the width of the widest batch that the model computes."""

    def note(module: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        ids = kwargs.get("input_ids")
        if ids is not None:
            notes["width"] = max(notes.get("width", 0), ids.shape[1])

    trainer.accelerator.unwrap_model(trainer.model).register_forward_pre_hook(note, with_kwargs=True)


def _draw() -> None:
    import random

    import numpy
    import torch

    torch.rand(7)
    numpy.random.rand(7)
    random.random()
