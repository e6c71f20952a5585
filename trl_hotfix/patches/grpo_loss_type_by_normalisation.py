"""GRPO's default loss depends on the release; the option of ``grpo-loss-normalisation`` sets ``loss_type`` instead.

``GRPOConfig`` has ``loss_type`` from 0.17.0 on (TRL pull request 3256). ``"grpo"`` is the mean over sequences of the
paper (DeepSeekMath, arXiv:2402.03300). The arguments themselves are changed, before TRL reads them, so that everything
that depends on the loss type follows, and the saved arguments are true.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from typing import Any

from ..authoring import absent, act, argument, shadowed
from ..model import Options, Outcome, Verdict

_log = logging.getLogger("trl_hotfix")


def choose_the_loss_type(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
) -> None:
    """Set ``args.loss_type`` before ``GRPOTrainer.__init__`` reads it."""
    from trl.trainer.grpo_config import GRPOConfig

    settings = argument(wrapped, args, kwargs, "args")
    token_level = GRPOConfig.__dataclass_fields__["loss_type"].default
    loss_type = token_level if options["normalisation"] == "global" else "grpo"
    if settings is None:
        _log.warning("normalisation=%s does nothing for a GRPOTrainer without args", options["normalisation"])
    elif settings.loss_type != loss_type:
        _log.info("normalisation=%s: loss_type=%r -> %r", options["normalisation"], settings.loss_type, loss_type)
        settings.loss_type = loss_type
        act()
    wrapped(*args, **kwargs)


class _ReadError(Exception):
    """Raised where ``__init__`` first reads its arguments, or makes some: the self-test ends there."""


def the_arguments_have_the_loss_type(module: ModuleType, options: Options) -> Outcome:
    """Read ``args.loss_type`` of new trainers at the moment when ``GRPOTrainer.__init__`` begins to read ``args``.

    What is logged is checked too: one line where the loss type changes, and one where there are no arguments.
    """
    if "loss_type" not in module.GRPOConfig.__dataclass_fields__:
        return absent("GRPOConfig has no loss_type")
    normalisation = options["normalisation"]
    wanted = {"sequence": "grpo", "global": module.GRPOConfig.__dataclass_fields__["loss_type"].default}[normalisation]
    begun = [_begun(module, _Arguments("neither")) for _ in range(2)]
    loss_types = [loss_type for loss_type, _ in begun]
    if loss_types == ["neither", "neither"]:
        return Outcome(Verdict.REPRODUCED, {"loss_type": "neither", "wanted": wanted})
    said = f"info: normalisation={normalisation}: loss_type='neither' -> {wanted!r}"
    if begun != [(wanted, [said])] * 2:
        raise AssertionError(f"expected {wanted} and {said!r}: {begun}")
    if (unchanged := _begun(module, _Arguments(wanted))) != (wanted, []):
        raise AssertionError(f"of arguments that have {wanted!r} this becomes: {unchanged}")
    without = f"warning: normalisation={normalisation} does nothing for a GRPOTrainer without args"
    if (defaults := _begun(module, None)) != (None, [without]):
        raise AssertionError(f"expected {without!r}: {defaults}")
    return Outcome(Verdict.FIXED, {"loss_type": wanted, "wanted": wanted})


class _Arguments:
    """Arguments of which only the loss type can be read."""

    def __init__(self, loss_type: str) -> None:
        self.loss_type = loss_type

    def __getattr__(self, name: str) -> Any:
        raise _ReadError(name)


def _begun(module: ModuleType, arguments: _Arguments | None) -> tuple[str | None, list[str]]:
    """Return the loss type of ``arguments`` when ``__init__`` begins to read them, and what is logged until then."""
    messages: list[str] = []

    def record(level: str) -> Callable[..., None]:
        return lambda message, *values: messages.append(f"{level}: {message % values}")

    def make_arguments(*unused: Any, **settings: Any) -> None:
        raise _ReadError("GRPOConfig")

    with ExitStack() as stack:
        # These are not for the log: the trainer is no user's.
        for level in ("info", "warning"):
            stack.enter_context(shadowed(_log, level, record(level)))
        stack.enter_context(shadowed(module, "GRPOConfig", make_arguments))
        try:
            module.GRPOTrainer.__init__(object.__new__(module.GRPOTrainer), "no model", [], args=arguments)
        except _ReadError:
            return getattr(arguments, "loss_type", None), messages
    raise AssertionError("GRPOTrainer.__init__ did not read its arguments")
