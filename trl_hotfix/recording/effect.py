"""What each repair changed in the first step of a run: the loss and the gradients with it, and without it.

``TRL_HOTFIX_EFFECT=1`` asks for it. When the last micro-batch of the first step is done, we compute the step again for
each repair that acted in it, with this one left out and all others on: the same micro-batches, the same random states,
the same state of the trainer. Then everything is as it was after the step, so the training goes on bit by bit as
without it. Each costs one more forward and backward of that step, and all together one more set of gradients.

What acts outside ``training_step``, in a constructor, in the data or in an optimizer, is in the step either way, and
has no number. Nor has a step whose gradients or weights are not whole in this process, or whose text vLLM generates.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, nullcontext
from typing import Any, NamedTuple

from ..errors import described_error, plain
from ..log import event, log, quiet_wrappers, warning
from ..model import Severity
from ..patching import engine
from ..patching.breaker import is_out_of_memory
from ..reporting.effects import Effect
from ..witness import ledger_of, uncounted
from . import ranks
from .failures import training_goes_on
from .rewinding import Generators, Moment, copied, weights_of

_STEP = "training_step"
_OUTSIDE = f"it acts outside {_STEP}()"
_CHUNK = 1 << 24
"""So many elements of a gradient are compared at once, in double precision."""


def begins(trainer: Any, moment: str) -> None:
    """Have the first step of this run measured, if somebody asked. ``moment`` names the run on all ranks."""
    ends(trainer)
    if not engine.ENGINE.configuration.measure_effect:
        return
    why = _why_not(trainer)
    if why:
        warning("the effect of the repairs is not measured: %s", why, extra=event("effect", why=why))
    else:
        setattr(trainer, _STEP, _FirstStep(trainer, moment))


def ends(trainer: Any) -> None:
    """Stop to wait for the first step of a run."""
    waiting = vars(trainer).get(_STEP) if trainer is not None else None
    if isinstance(waiting, _FirstStep):
        waiting.take_off()


def _why_not(trainer: Any) -> str:
    """Return why nothing can be measured in this run, or no text."""
    if not callable(getattr(trainer, _STEP, None)):
        return f"this trainer has a loop of its own, without {_STEP}()"
    kind = trainer.accelerator.distributed_type
    kind = str(getattr(kind, "value", kind))
    if kind in ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA", "TP"):
        return f"{kind} keeps the gradients in a way of its own"
    if getattr(trainer.model_wrapped, "gradient_as_bucket_view", False) is True:
        return "DDP keeps the gradients in its buckets (gradient_as_bucket_view)"
    if getattr(trainer.args, "use_vllm", False) is True:
        return "vLLM would generate other text for the same step"
    return ""


class _Micro(NamedTuple):
    """A micro-batch: what ``training_step`` was given, the random states then, and whether gradients were shared."""

    args: Any
    kwargs: Any
    generators: Generators
    syncs: bool


class _FirstStep:
    """Stands for ``training_step`` of one trainer until its first step is done, and measures it then."""

    def __init__(self, trainer: Any, moment: str) -> None:
        self._trainer, self._moment = trainer, moment
        self._own = vars(trainer).get(_STEP)
        self._step = getattr(trainer, _STEP)
        self._micros: list[_Micro] = []
        self._acted: set[str] = set()
        self._losses: list[Any] = []
        self._begin: Moment | None = None

    def take_off(self) -> None:
        if self._own is None:
            del vars(self._trainer)[_STEP]
        else:
            setattr(self._trainer, _STEP, self._own)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_kept = False
        with training_goes_on("the effect of the repairs is not measured"):
            self._note(args, kwargs)
            is_kept = True
        if not is_kept:
            self.take_off()
            return self._step(*args, **kwargs)
        before = _acts(self._trainer)
        loss = self._step(*args, **kwargs)
        with training_goes_on("the effect of the repairs is not measured"):
            self._acted.update(patch for patch, acted in _acts(self._trainer).items() if acted > before.get(patch, 0))
            self._losses.append(loss)
            if self._syncs:
                self.take_off()
                self._measure()
        return loss

    def _note(self, args: Any, kwargs: Any) -> None:
        if self._begin is None:
            self._begin = Moment(self._trainer)
        self._micros.append(_Micro(copied(args), copied(kwargs), Generators(), self._syncs))

    @property
    def _syncs(self) -> bool:
        return bool(self._trainer.accelerator.sync_gradients)

    def _measure(self) -> None:
        """Say of each repair what it changed in the step, or why nobody can."""
        patches, why = self._agreed()
        step = self._trainer.state.global_step + 1
        reasons = dict.fromkeys(patches, why) if why else {}
        outside = {patch_id for patch_id, acted in _acts(self._trainer).items() if acted} - self._acted
        reasons |= dict.fromkeys(sorted(outside - _ids_of(Severity.DIAGNOSIS)), _OUTSIDE)
        for patch_id, reason in reasons.items():
            _say(self._trainer, patch_id, Effect(step, why=reason))
        if patches and not why:
            self._measure_each(patches, step)
        elif not reasons and ranks.rank_and_world()[0] == 0:
            why = "no repair has acted by then"
            log.info("no effect to measure in step %d: %s", step, why, extra=event("effect", step=step, why=why))

    def _measure_each(self, patches: Iterable[str], step: int) -> None:
        """Compute the step again without each of these repairs, and put everything back."""
        trainer, begin = self._trainer, self._begin
        assert begin is not None
        gradients = [(weight, weight.grad) for weight in weights_of(trainer.model)]
        end, loss = Moment(trainer), self._loss_of(self._losses)
        sync = trainer.accelerator.sync_gradients
        try:
            for patch_id in patches:
                begin.restore()
                _say(trainer, patch_id, self._without(patch_id, step, loss, gradients))
        finally:
            trainer.accelerator.gradient_state._set_sync_gradients(sync)
            for weight, gradient in gradients:
                weight.grad = gradient
            end.restore()
            moved = end.moved()
            if moved:
                text = "measuring the effect of a repair has changed %s: this run is not as it would be without"
                warning(text, moved, extra=event("effect", moved=moved))

    def _agreed(self) -> tuple[list[str], str]:
        """Return the repairs that acted on a rank, in one order on all ranks, and why they cannot be measured."""
        trainer, begin = self._trainer, self._begin
        # A diagnosis changes nothing.
        acted = sorted(self._acted - _ids_of(Severity.DIAGNOSIS))
        assert begin is not None
        moved = begin.moved()
        why = f"the step itself changes {moved}" if moved else ""
        if any(weight.grad is not None and hasattr(weight.grad, "to_local") for weight in weights_of(trainer.model)):
            why = "the gradients are not whole in this process"
        rank, world = ranks.rank_and_world()
        if world == 1:
            return acted, why
        # On several ranks an error of one of them, which TRL without the repair would raise, would leave the others
        # waiting for it.
        acted = [patch_id for patch_id in acted if patch_id not in _ids_of(Severity.CRASH)]
        found = ranks.gather({"acted": acted, "why": why}, self._moment)
        proposal = {"acted": acted, "why": f"rank 0 did not answer within {ranks.patience()}"}
        if rank == 0:
            answers = [found.get(other) for other in range(world)]
            says = [one for one in answers if isinstance(one, dict)]
            silent = len(says) < world
            proposal = {
                "acted": sorted({patch_id for one in says for patch_id in one["acted"]}),
                "why": next((one["why"] for one in says if one["why"]), "")
                or (f"a rank did not answer within {ranks.patience()}" if silent else ""),
            }
        decided = json.loads(ranks.decide(self._moment, json.dumps(proposal), waits=rank != 0))
        return list(decided["acted"]), str(decided["why"])

    def _without(self, patch_id: str, step: int, loss: float, gradients: list[tuple[Any, Any]]) -> Effect:
        """Compute the step without a repair, and compare it."""
        for weight, _ in gradients:
            weight.grad = None
        with ExitStack() as stack:
            stack.enter_context(uncounted(self._trainer))
            stack.enter_context(quiet_wrappers())
            stack.enter_context(engine.ENGINE.without(patch_id))
            try:
                loss_without = self._loss_of(self._again())
            # It is TRL's own error, or one of the memory. The run has its step already.
            except Exception as error:  # noqa: BLE001
                why = "there is not enough memory" if is_out_of_memory(error) else described_error(error)
                return Effect(step, why=f"without it the step fails: {plain(why)}")
        norm, norm_without, cosine = _compared((with_, weight.grad) for weight, with_ in gradients)
        scale = _scale_of(self._trainer.accelerator)
        return Effect(step, loss, loss_without, norm / scale, norm_without / scale, cosine)

    def _loss_of(self, losses: Iterable[Any]) -> float:
        import torch

        loss = math.fsum(float(loss) for loss in losses)
        if ranks.world_size() == 1:
            return loss
        accelerator = self._trainer.accelerator
        return float(accelerator.reduce(torch.tensor(loss, device=accelerator.device), "mean"))

    def _again(self) -> Iterator[Any]:
        accelerator = self._trainer.accelerator
        for micro in self._micros:
            micro.generators.restore()
            accelerator.gradient_state._set_sync_gradients(micro.syncs)
            model = micro.args[0] if micro.args else self._trainer.model_wrapped
            with nullcontext() if micro.syncs else accelerator.no_sync(model):
                yield self._step(*copied(micro.args), **copied(micro.kwargs))


def _acts(trainer: Any) -> dict[str, int]:
    """Return how often each patch has acted for this trainer so far."""
    found: dict[str, int] = {}
    for _, each, count in ledger_of(trainer).every():
        if not each.observe:
            found[each.patch] = found.get(each.patch, 0) + count.acted
    return found


def _scale_of(accelerator: Any) -> float:
    """Return by what the loss of fp16, and so its gradient, is multiplied."""
    return float(accelerator.scaler.get_scale()) if accelerator.scaler is not None else 1.0


def _ids_of(severity: Severity) -> set[str]:
    return {one.patch.id for one in engine.ENGINE.module_patches() if one.patch.severity is severity}


def _compared(pairs: Iterable[tuple[Any, Any]]) -> tuple[float, float, float | None]:
    """Return the norms of two gradients, and the cosine between them. No gradient is one of zeros."""
    import torch

    squares, squares_without, product = 0.0, 0.0, 0.0
    for with_, without in pairs:
        parts = [None if one is None else one.detach().reshape(-1) for one in (with_, without)]
        for begin in range(0, max((part.numel() for part in parts if part is not None), default=0), _CHUNK):
            first, second = (None if part is None else part[begin : begin + _CHUNK].to(torch.float64) for part in parts)
            squares += float(first.dot(first)) if first is not None else 0.0
            squares_without += float(second.dot(second)) if second is not None else 0.0
            product += float(first.dot(second)) if first is not None and second is not None else 0.0
    norms = math.sqrt(squares), math.sqrt(squares_without)
    return (*norms, product / (norms[0] * norms[1]) if all(norms) else None)


def _say(trainer: Any, patch_id: str, effect: Effect) -> None:
    ledger_of(trainer).run.effects[patch_id] = effect
    if ranks.rank_and_world()[0] == 0:
        log.info("%s: %s", patch_id, effect.line(), extra=event("effect", patch=patch_id, **effect.to_dict()))
