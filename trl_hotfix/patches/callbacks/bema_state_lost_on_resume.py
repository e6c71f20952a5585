"""BEMACallback keeps its averages in lists and in a second model, and no checkpoint has them.

``on_train_begin`` takes the weights that the model has then for theta 0, the average and the averaged model. In a
resumed run these are the weights of the checkpoint.

transformers tells callbacks when it has saved, by ``on_save``. TRL's class has no such method, and the one that it
inherits is not TRL's. So ``on_train_begin`` gives it to the callback itself, which transformers asks for it.
"""

from __future__ import annotations

import logging
import tempfile
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, agreed, judge, keep_beside_checkpoint, kept_beside_checkpoint, wrapper
from ...model import Outcome, Verdict
from ...testing import recorded_warnings

_FILE = "trl_hotfix_bema.safetensors"

_log = logging.getLogger("trl_hotfix")


@wrapper
def go_on_with_the_averages_of_the_checkpoint(call: Call) -> None:
    """Take theta 0, the average and the averaged model from the checkpoint, and have them saved with the next ones."""
    call()
    callback, state = call.trainer, call["state"]
    callback.on_save = partial(_save, callback)
    if not getattr(state, "global_step", 0):
        return
    kept = kept_beside_checkpoint(call["args"], state, _FILE, call["model"])
    tensors = _tensors(callback)
    if kept is None or kept.keys() != tensors.keys():
        _log.warning(
            "bema-state-lost-on-resume: no averages of BEMACallback are found that belong to the checkpoint of "
            "step %s, so they begin anew. If it is not in output_dir, name it as resume_from_checkpoint in the "
            "training arguments.",
            state.global_step,
        )
        return
    call.act()
    for name, tensor in tensors.items():
        tensor.data.copy_(kept[name])


def _save(callback: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
    """Keep the averages in the checkpoint that has been saved, and call the method of the callback's class."""
    keep_beside_checkpoint(args, state, _FILE, kwargs["model"], _tensors(callback))
    return type(callback).on_save(callback, args, state, control, **kwargs)


def _tensors(callback: Any) -> dict[str, Any]:
    """Return all parameters as averaged, and those that are trained as they were at the beginning and on average."""
    tensors = {f"averaged.{name}": parameter for name, parameter in callback.running_model.named_parameters()}
    for kind, parameters in (("initial", callback.theta0_params), ("average", callback.ema_params)):
        for name, parameter in zip(callback.param_names, parameters, strict=True):
            # A second training appends the same names again, and up to 0.24.0 TRL goes on with the first ones.
            tensors.setdefault(f"{kind}.{name}", parameter)
    return tensors


def averages_go_on_in_a_resumed_run(module: ModuleType) -> Outcome:
    """Compare runs that are resumed with a run without a stop, in which nothing else differs."""
    return agreed(_resumed(module, update_after) for update_after in (0, 2))


_STOP, _END = 3, 6
"""The steps at which the runs are stopped and end. The averages are updated in every other step."""


def _resumed(module: ModuleType, update_after: int) -> Outcome:
    """Resume runs from a checkpoint, from none, and from one that is of another run."""
    right, wrong, of_other = (_averaged(update_after, *run) for run in ((0, 1.0), (_STOP, 1.0), (_STOP, 1.5)))
    with tempfile.TemporaryDirectory() as folder:
        run = partial(_Run, module, update_after=update_after)
        here, other, unsaved = (f"{folder}/{name}" for name in ("here", "other", "unsaved"))
        whole = run(here)
        resumed = run(here, begin=_STOP)
        outcome = judge(resumed.averaged, right=right, wrong=wrong)
        is_fixed = outcome.verdict is Verdict.FIXED
        at_once = run(here, begin=_STOP, end=_STOP)
        elsewhere = run(other, begin=_STOP, resume_from_checkpoint=f"{here}/checkpoint-{_STOP}")
        for resumed_run, expected in ((resumed, whole.end), (elsewhere, whole.end), (at_once, whole.stop)):
            different = [name for name, tensor in expected.items() if (resumed_run.end[name] != tensor).any()]
            if resumed_run.warnings or (is_fixed and different):
                raise AssertionError(f"not as without a stop: {different}; warnings: {resumed_run.warnings}")
        if update_after:
            return outcome  # The rest is as without a burn-in.
        for not_resumed, averaged in ((whole, right), (run(here), right), (run(unsaved, should_save=False), right)):
            if not_resumed.warnings or abs(not_resumed.averaged - averaged) > 1e-5:
                raise AssertionError(f"{not_resumed.averaged} instead of {averaged}, {not_resumed.warnings}")
        for without, averaged in (
            (run(here, begin=_STOP, scale=1.5), of_other),
            (run(unsaved, begin=_STOP), wrong),
            (run(here, begin=_STOP, end=_STOP, frozen=True), _weight(_STOP, 1.0)),
        ):
            if len(without.warnings) != is_fixed or abs(without.averaged - averaged) > 1e-5:
                raise AssertionError(f"{without.averaged} instead of {averaged}, {without.warnings}")
        # A stand-in for a trainer has no state.
        whole.callback.on_train_begin(None, None, None, model=whole.model)
    return outcome


class _Run:
    """The callback in a run that is resumed after the step ``begin``, and saves checkpoints at ``_STOP``."""

    def __init__(
        self,
        module: ModuleType,
        folder: str,
        *,
        update_after: int,
        begin: int = 0,
        end: int = _END,
        scale: float = 1.0,
        frozen: bool = False,
        **arguments: Any,
    ) -> None:
        import torch

        saved: list[int] = []

        class Callback(module.BEMACallback):  # type: ignore[misc, name-defined]
            def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
                saved.append(state.global_step)
                return control

        class Model(torch.nn.Module):  # type: ignore[misc]
            def __init__(self, config: Any) -> None:
                super().__init__()
                self.config = config
                self.first = torch.nn.Parameter(torch.tensor([1.0, 2.0], device="cpu"))
                self.last = torch.nn.Parameter(torch.tensor([3.0, _WEIGHT], device="cpu"))

        args = SimpleNamespace(**{"output_dir": folder, "should_save": True, **arguments})
        control = SimpleNamespace()
        self.model, self.stop, beginning = Model(None), {}, Model(None).state_dict()
        self.model.first.requires_grad_(not frozen)
        self.callback: Any = Callback(update_freq=2, update_after=update_after)
        with recorded_warnings() as self.warnings:
            for step in range(begin, end + 1):
                for name, weight in self.model.named_parameters():
                    weight.data.copy_(beginning[name] * scale * (1 + 0.1 * step))
                state = SimpleNamespace(global_step=step)
                event = self.callback.on_train_begin if step == begin else self.callback.on_step_end
                event(args, state, control, model=self.model)
                if begin < step == _STOP:
                    Path(folder, f"checkpoint-{step}").mkdir(parents=True, exist_ok=True)
                    if self.callback.on_save(args, state, control, model=self.model) is not control:
                        raise AssertionError("the answer of the callback's own method is lost")
                    self.stop = self._tensors()
        self.end = self._tensors()
        if saved != [_STOP] * (begin < _STOP):
            raise AssertionError(f"the callback's own method is called after {saved}")

    @property
    def averaged(self) -> float:
        return float(self.end["last"][1])

    def _tensors(self) -> dict[str, Any]:
        """Return a copy of all averages."""
        averaged = {name: value.detach().clone() for name, value in self.callback.running_model.named_parameters()}
        lists = (self.callback.theta0_params, self.callback.ema_params)
        return averaged | {
            f"{kind} {place}": tensor.clone()
            for kind, tensors in enumerate(lists)
            for place, tensor in enumerate(tensors)
        }


_WEIGHT = 3.5
"""The weight, at the beginning of a run, whose averages are compared with the formula."""


def _weight(step: int, scale: float) -> float:
    return _WEIGHT * scale * (1 + 0.1 * step)


def _averaged(update_after: int, begin: int, scale: float) -> float:
    """Return the averaged weight at the end of a run whose averages begin after the step ``begin``.

    BEMA (arXiv:2508.00180): ``ema = (1 - beta) * ema + beta * weight``, and the averaged weight is
    ``ema + alpha * (weight - initial)``, with ``beta = age ** -0.5``, ``alpha = age ** -0.2`` and ``age = 10 + step``.
    """
    initial = average = averaged = _weight(begin, scale)
    for step in range(begin + 1, _END + 1):
        weight = _weight(step, scale)
        if step == update_after:
            initial = average = weight
        elif step > update_after and (step - update_after) % 2 == 0:
            beta = (10 + step) ** -0.5
            average = (1 - beta) * average + beta * weight
            averaged = average + (10 + step) ** -0.2 * (weight - initial)
    return averaged
