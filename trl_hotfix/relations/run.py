"""Run a trainer in a setting, and note all that a relation may compare."""

from __future__ import annotations

import dis
import hashlib
import inspect
import multiprocessing.connection
import os
import random
import shutil
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from . import engines, stand_ins
from .by_hand import ByHand
from .effects import Given
from .engines import unsharded, whole
from .recipes import Make
from .setting import CannotBeAskedError, Setting

CLOCK = ("runtime", "per_second", "step_time", "profiling", "total_flos", "epoch")
"""Parts of the names of what a trainer logs that depends on the clock, or counts what a setting changes."""

SECONDS = 120.0
"""The limit for a run on several ranks."""


@dataclass
class Run:
    """What a run computed: gradients that the optimizer was given, weights at the end, and what was logged.

    ``start`` are the weights that are trained, before it. ``effects`` are what the trainer has changed of what it was
    given, before and after. ``random`` are the random states at the end, by who keeps them. ``saved`` are the weights
    as they are loaded again, and ``by_hand`` the loss and the gradients of a formula.
    """

    gradients: list[dict[str, Any]] = field(default_factory=list)
    weights: dict[str, Any] = field(default_factory=dict)
    logs: list[dict[str, float]] = field(default_factory=list)
    evaluations: list[dict[str, float]] = field(default_factory=list)
    start: dict[str, Any] = field(default_factory=dict)
    effects: dict[str, tuple[str, str]] = field(default_factory=dict)
    random: dict[str, str] = field(default_factory=dict)
    saved: dict[str, Any] = field(default_factory=dict)
    by_hand: tuple[float, dict[str, Any]] = (0.0, {})
    first_step: int = 1

    def of_set(self, name: str) -> Run:
        """Return it with the evaluations of the set of this name alone, as if there were no other.

        A number without the name of its set does not count: the next set has the same.
        """
        if not name:
            return self
        prefix = f"eval_{name}_"
        own = [{key: value for key, value in logs.items() if key.startswith(prefix)} for logs in self.evaluations]
        renamed = [{key.replace(prefix, "eval_", 1): value for key, value in logs.items()} for logs in own if logs]
        return replace(self, evaluations=renamed)


def run(make: Make, setting: Setting, folder: Path) -> Run:
    """Make a trainer and train it. Raises ``CannotBeAskedError`` where TRL says that it cannot be done so."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    variables = dict(os.environ)
    try:
        with stand_ins.liger(setting.arguments):
            return _run(make, setting, folder)
    finally:
        # A config leaves there what a compiler or an engine is to do, and the next one reads it.
        os.environ.clear()
        os.environ.update(variables)


def _run(make: Make, setting: Setting, folder: Path) -> Run:
    if setting.ranks > 1:
        return _on_ranks(make, setting, folder)
    if setting.second:
        first = _trainer(make, setting, folder)
        _train(first)
        setting = setting.but(base=first.model.get_base_model())
    if not setting.resume_at:
        trainer, record = _trainer(make, setting, folder), Run()
        by_hand = ByHand(trainer, setting.by_hand) if setting.by_hand else None
        _trained(trainer, record)
        if by_hand:
            record.by_hand = by_hand.computed()
        if setting.saves:
            record.saved = _loaded(trainer, folder / "saved")
        return record
    until = setting.but(arguments={"save_strategy": "steps", "save_steps": setting.resume_at})
    first = _trainer(make, until, folder)
    if not inspect.signature(first.train).parameters:
        raise CannotBeAskedError(f"{type(first).__name__}.train takes no checkpoint")
    _stopped(first, setting.resume_at)
    checkpoint = str(folder / f"checkpoint-{setting.resume_at}")
    return _trained(_trainer(make, until, folder), Run(first_step=setting.resume_at + 1), checkpoint)


def _trainer(make: Make, setting: Setting, folder: Path) -> Any:
    import numpy
    import torch
    from transformers import set_seed

    # That of numpy too: KTO of 0.11 shuffles with it before it sets a seed.
    set_seed(0)
    torch.rand(setting.drawn)
    numpy.random.rand(setting.drawn)
    try:
        trainer = make(setting, folder)
    except (ValueError, NotImplementedError, ImportError) as error:
        # TRL says which package it lacks.
        if isinstance(error, ImportError) and not _is_of_trl(error):
            raise
        raise CannotBeAskedError(f"{type(error).__name__}: {error}") from error
    if setting.in_order:
        trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(trainer.train_dataset)
    if setting.adapter and not setting.drawn:
        _settle_adapter(trainer.model)
    return trainer


def _settle_adapter(model: Any) -> None:
    """Give a new adapter the same random half, no matter what made it and when. The other half is zero."""
    import torch

    for name, weight in model.named_parameters():
        place, is_lora, _ = name.partition(".lora_A.")
        if is_lora:
            generator = torch.Generator().manual_seed(sum(place.rpartition("layers.")[2].encode()))
            weight.data.copy_(torch.randn(weight.shape, generator=generator) / weight.shape[1] ** 0.5)


def _stopped(trainer: Any, step: int) -> None:
    from transformers import TrainerCallback

    class Stop(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step >= step

    trainer.add_callback(Stop())
    _train(trainer)


def _train(trainer: Any, checkpoint: str | None = None) -> None:
    """Train. Raises ``CannotBeAskedError`` where TRL refuses, as it does an unknown loss in the middle of a step."""
    try:
        trainer.train(**({"resume_from_checkpoint": checkpoint} if checkpoint else {}))
    except (ValueError, NotImplementedError) as error:
        if not _is_of_trl(error):
            raise
        raise CannotBeAskedError(f"{type(error).__name__}: {error}") from error


def _is_of_trl(error: Exception) -> bool:
    """Return whether TRL raised this in a statement of its own, and no function that it calls."""
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    if innermost is None:
        return False
    frame = innermost.tb_frame
    raises = frame.f_code.co_code[innermost.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return raises and str(frame.f_globals.get("__name__")).partition(".")[0] == "trl"


def _trained(trainer: Any, record: Run, checkpoint: str | None = None) -> Run:
    from transformers import TrainerCallback

    class Recorder(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            optimizer = kwargs["optimizer"]
            while hasattr(optimizer, "optimizer"):
                optimizer = optimizer.optimizer
            optimizer.register_step_pre_hook(lambda *_: note())

        def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any], **kwargs: Any) -> None:
            numbers = {name: float(value) for name, value in logs.items() if _is_number(name, value)}
            is_evaluation = any(name.startswith("eval_") for name in logs)
            (record.evaluations if is_evaluation else record.logs).append(numbers)

    def note() -> None:
        record.gradients.append(
            {name: unsharded(weight.grad).clone() for name, weight in _named(trainer) if weight.grad is not None}
        )

    # A recipe of the user does not say what it has given to the trainer.
    given = getattr(trainer, "given", None) or Given({"args": trainer.args, "model": trainer.model})
    record.start = dict(whole((name, weight) for name, weight in _named(trainer) if weight.requires_grad))
    trainer.add_callback(Recorder())
    _train(trainer, checkpoint)
    record.random = _random_states()
    record.effects = given.changes()
    # The last log is of the whole training.
    record.logs = [logs for logs in record.logs if "train_loss" not in logs]
    record.weights = dict(whole(_named(trainer)))
    # A resumed run that stops too early differs from the other.
    if not checkpoint and len(record.gradients) < trainer.args.max_steps:
        raise RuntimeError(f"the run had {len(record.gradients)} steps of {trainer.args.max_steps}")
    return record


def _is_number(name: str, value: Any) -> bool:
    # PPO's eps are episodes per second.
    return isinstance(value, (int, float)) and name != "eps" and not any(word in name for word in CLOCK)


def _named(trainer: Any) -> list[tuple[str, Any]]:
    """Return the weights of its model, and those that a callback of TRL averages."""
    named = trainer.accelerator.unwrap_model(trainer.model).named_parameters()
    # A compiled model has another name in front.
    weights = [(name.removeprefix("_orig_mod."), weight) for name, weight in named]
    averages = (getattr(callback, "running_model", None) for callback in trainer.callback_handler.callbacks)
    for average in averages:
        if average is not None:
            weights += [(f"average: {name}", weight) for name, weight in average.named_parameters()]
    return weights


def _loaded(trainer: Any, path: Path) -> dict[str, Any]:
    """Save the trainer's model, and return the weights that are loaded."""
    trainer.save_model(str(path))
    model = trainer.accelerator.unwrap_model(trainer.model)
    if not (path / "adapter_config.json").is_file():
        return dict(type(model).from_pretrained(path).named_parameters())
    from peft import PeftModel

    base = model.get_base_model()
    loaded = PeftModel.from_pretrained(type(base).from_pretrained(base.name_or_path), path)
    return dict(loaded.named_parameters())


def _random_states() -> dict[str, str]:
    """Return the random states as short texts, by who keeps them."""
    import numpy
    import torch

    states = {"random": random.getstate(), "numpy": numpy.random.get_state(), "torch": torch.get_rng_state().tolist()}
    return {name: hashlib.sha256(repr(state).encode()).hexdigest() for name, state in states.items()}


def _on_ranks(make: Make, setting: Setting, folder: Path) -> Run:
    """Run in forks of this process, and return what the main rank has noted. Raises what a rank raised."""
    import torch

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    out = folder / "ranks"
    out.mkdir()
    # Here, so that what it imports is imported once.
    arguments = {"ddp_backend": "gloo", **engines.arguments(setting.engine, setting.ranks)}
    setting = setting.but(arguments=arguments)
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=_rank, args=(make, setting, folder, out, number, port))
        for number in range(setting.ranks)
    ]
    for process in ranks:
        process.start()
    running, end = {process.sentinel for process in ranks}, time.monotonic() + SECONDS
    # The others wait for one that has failed.
    while running and time.monotonic() < end and not list(out.glob("failed-*")):
        running -= set(multiprocessing.connection.wait(list(running), 1))
    for process in ranks:
        process.kill()
    for file in out.glob("failed-*"):
        raise torch.load(file, weights_only=False)
    ended = len(list(out.glob("rank-*")))
    if running or ended < setting.ranks:
        raise RuntimeError(f"{setting.ranks - ended} of {setting.ranks} ranks have not ended as they should")
    main: Run = torch.load(out / "rank-0", weights_only=False)
    return main


def _rank(make: Make, setting: Setting, folder: Path, out: Path, rank: int, port: str) -> None:
    import torch
    from accelerate.state import AcceleratorState, GradientState, PartialState  # type: ignore[import-untyped]

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": setting.ranks, "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({name: str(value) for name, value in variables.items()}, MASTER_PORT=port)
    # With it, accelerate takes no notice of DeepSpeed.
    os.environ["ACCELERATE_USE_CPU"] = str(not setting.engine.startswith("zero")).lower()
    answer: Run | Exception
    try:
        trainer = _trainer(make, setting, folder)
        if setting.engine:
            engines.prepare(trainer, setting.engine)
        answer = _trained(trainer, Run())
    # The process that waits raises it again.
    except Exception as error:  # noqa: BLE001
        answer = error if isinstance(error, CannotBeAskedError) else RuntimeError(f"{type(error).__name__}: {error}")
    torch.save(answer, out / f"writing-{rank}")
    (out / f"writing-{rank}").rename(out / f"{'failed' if isinstance(answer, Exception) else 'rank'}-{rank}")
    # Without the handlers of the process that was forked.
    os._exit(0)
