"""GRPO's default loss depends on the release; the option of ``grpo-loss-normalisation`` sets ``loss_type`` instead.

``GRPOConfig`` has ``loss_type`` from 0.17.0 on (TRL pull request 3256). ``"grpo"`` is the mean over sequences of the
paper (DeepSeekMath, arXiv:2402.03300). The arguments themselves are changed, before TRL reads them, so that everything
that depends on the loss type follows, and the saved arguments are true.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..authoring import absent, act, argument
from ..model import Options, Outcome, Verdict


def choose_the_loss_type(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
) -> Any:
    """Set ``args.loss_type`` before ``GRPOTrainer.__init__`` reads it."""
    from trl.trainer.grpo_config import GRPOConfig

    settings = argument(wrapped, args, kwargs, "args")
    log = logging.getLogger("trl_hotfix")
    if settings is None:
        log.warning("normalisation=%s does nothing for a GRPOTrainer without args", options["normalisation"])
    else:
        loss_type = _loss_type(GRPOConfig, options)
        if settings.loss_type != loss_type:
            log.info("normalisation=%s: loss_type=%r -> %r", options["normalisation"], settings.loss_type, loss_type)
            settings.loss_type = loss_type
            act()
    return wrapped(*args, **kwargs)


def _loss_type(config_class: Any, options: Options) -> str:
    default: str = config_class.__dataclass_fields__["loss_type"].default
    return default if options["normalisation"] == "global" else "grpo"


class _ReadError(Exception):
    """Raised where ``__init__`` first reads its arguments: the self-test ends there."""


def the_arguments_have_the_loss_type(module: ModuleType, options: Options) -> Outcome:
    """Read ``args.loss_type`` at the moment when ``GRPOTrainer.__init__`` begins to read ``args``."""
    if "loss_type" not in module.GRPOConfig.__dataclass_fields__:
        return absent("GRPOConfig has no loss_type")

    class Arguments:
        __dataclass_fields__ = module.GRPOConfig.__dataclass_fields__
        loss_type = "neither"

        def __getattr__(self, name: str) -> Any:
            raise _ReadError(name)

    arguments = Arguments()
    try:
        module.GRPOTrainer.__init__(object.__new__(module.GRPOTrainer), "no model", [], args=arguments)
    except _ReadError:
        expected = _loss_type(Arguments, options)
        verdict = Verdict.FIXED if arguments.loss_type == expected else Verdict.REPRODUCED
        return Outcome(verdict, {"loss_type": arguments.loss_type, "wanted": expected})
    raise AssertionError("GRPOTrainer.__init__ did not read its arguments")
