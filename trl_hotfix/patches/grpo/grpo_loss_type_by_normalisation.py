"""GRPO's default loss depends on the release; the option of ``grpo-loss-normalisation`` sets ``loss_type`` instead.

``GRPOConfig`` has ``loss_type`` from 0.17.0 on (TRL pull request 3256). ``"grpo"`` is the mean over sequences of the
paper (DeepSeekMath, arXiv:2402.03300). The arguments themselves are changed, before TRL reads them, so that everything
that depends on the loss type follows, and the saved arguments are true.
"""

from __future__ import annotations

import logging
from types import ModuleType
from typing import Any

from ...authoring import Call, absent, shadowed, wrapper
from ...model import Options, Outcome, Verdict

_NORMALISATIONS = ("grpo", "bnpo", "dr_grpo", "dapo")
"""Of one loss. Any other loss type is an algorithm of its own, such as CISPO."""

_log = logging.getLogger("trl_hotfix")


@wrapper
def choose_the_loss_type(call: Call, options: Options) -> None:
    """Set ``args.loss_type`` before ``GRPOTrainer.__init__`` reads it."""
    from trl.trainer.grpo_config import GRPOConfig

    settings = call["args"]
    token_level = GRPOConfig.__dataclass_fields__["loss_type"].default
    loss_type = token_level if options["normalisation"] == "global" else "grpo"
    if settings is None:
        _log.warning("normalisation=%s does nothing for a GRPOTrainer without args", options["normalisation"])
    elif settings.loss_type not in _NORMALISATIONS:
        _log.warning("normalisation=%s does nothing for loss_type=%r", options["normalisation"], settings.loss_type)
    elif settings.loss_type != loss_type:
        _log.info("normalisation=%s: loss_type=%r -> %r", options["normalisation"], settings.loss_type, loss_type)
        settings.loss_type = loss_type
        call.act()
    call()


class _ReadError(Exception):
    """Raised where ``__init__`` first reads its arguments: the self-test ends there."""


def the_arguments_have_the_loss_type(module: ModuleType, options: Options) -> Outcome:
    """Read ``args.loss_type`` at the moment when ``GRPOTrainer.__init__`` begins to read ``args``."""
    fields = module.GRPOConfig.__dataclass_fields__
    if "loss_type" not in fields:
        return absent("GRPOConfig has no loss_type")

    class Arguments:
        loss_type = "dr_grpo"

        def __getattr__(self, name: str) -> Any:
            raise _ReadError(name)

    arguments, trainer_class = Arguments(), module.GRPOTrainer
    wanted = fields["loss_type"].default if options["normalisation"] == "global" else "grpo"
    try:
        # The line is not for the log: the trainer is no user's.
        with shadowed(_log, "info", lambda *args: None):
            trainer_class.__init__(object.__new__(trainer_class), "no model", [], args=arguments)
    except _ReadError:
        verdicts = {wanted: Verdict.FIXED, "dr_grpo": Verdict.REPRODUCED}
        return Outcome(verdicts[arguments.loss_type], {"loss_type": arguments.loss_type, "wanted": wanted})
    raise AssertionError("GRPOTrainer.__init__ did not read its arguments")
