"""``normalisation`` of ``grpo-loss-normalisation``, for the releases in which ``GRPOConfig`` has a ``loss_type``.

From 0.17.0 on nothing needs a repair: the user can choose (TRL pull request 3256). But a job that moves between
releases can say what it wants in one way, and its numbers do not change with TRL's default, ``bnpo`` up to 0.21 and
``dapo`` since: ``sequence`` is ``loss_type="grpo"``, the mean over sequences of the paper (DeepSeekMath,
arXiv:2402.03300), and ``global``, the mean over tokens, is the release's own default.

It overrides what the arguments say, so it is off unless it is asked for by name, and says what it changes. The
arguments themselves are changed, before TRL reads them: whatever follows from the loss type follows, and what is saved
of the arguments is true.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..authoring import absent, argument
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
        wanted = _loss_type(GRPOConfig, options)
        if settings.loss_type != wanted:
            log.info("normalisation=%s: loss_type=%r -> %r", options["normalisation"], settings.loss_type, wanted)
            settings.loss_type = wanted
    return wrapped(*args, **kwargs)


def _loss_type(config_class: Any, options: Options) -> str:
    default: str = config_class.__dataclass_fields__["loss_type"].default
    return default if options["normalisation"] == "global" else "grpo"


class _ReadError(Exception):
    """Raised where ``__init__`` first reads its arguments, which is as far as the self-test wants it to go."""


def the_arguments_have_the_loss_type(module: ModuleType, options: Options) -> Outcome:
    """What ``args.loss_type`` is when ``GRPOTrainer.__init__`` begins to read ``args``."""
    if "loss_type" not in module.GRPOConfig.__dataclass_fields__:
        return absent("GRPOConfig has no loss_type")

    class Arguments:
        __dataclass_fields__ = module.GRPOConfig.__dataclass_fields__
        loss_type = "neither"

        def __getattr__(self, name: str) -> Any:
            raise _ReadError(name)

    given = Arguments()
    try:
        module.GRPOTrainer.__init__(object.__new__(module.GRPOTrainer), "no model", [], args=given)
    except _ReadError:
        wanted = _loss_type(Arguments, options)
        verdict = Verdict.FIXED if given.loss_type == wanted else Verdict.REPRODUCED
        return Outcome(verdict, {"loss_type": given.loss_type, "wanted": wanted})
    raise AssertionError("GRPOTrainer.__init__ did not read its arguments")
