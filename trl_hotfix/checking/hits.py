"""The bugs of the catalogue that the user's run hits: by what he gave to the trainer, and not by what a check cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..catalogue import loading
from ..catalogue.conditions import UNSET, Argument, Kind
from ..matching import versions
from ..matching.hits import TRAINER_ONLY_ARGUMENTS, Answer, finding
from ..model import Bug, Severity
from ..patching.given import described
from ..recording.run_hits import name_of
from ..recording.trainer_arguments import TrainerArguments
from ..recording.trainer_facts import TrainerFacts
from ..reporting.sentences import repair_of
from .argument_classes import defaults
from .loading import DTYPE
from .safe_arguments import LEFT_OUT, SET

_LEFT_OUT = LEFT_OUT | SET.keys()


class _AsTold:
    """The arguments of a trainer with the fields of its config as the user gave them."""

    def __init__(self, trainer: Any, told: Mapping[str, Any]) -> None:
        self._arguments, self._told = TrainerArguments(trainer), told
        self._defaults, self._model = defaults(type(trainer.args)), trainer.model

    def find(self, name: str) -> Argument:
        if name in ("model.dtype", "model.torch_dtype"):
            dtype = getattr(self._model, DTYPE, None)
            return described(dtype) if dtype is not None else self._arguments.find(name)
        if name.partition(".")[0] == "train":
            return UNSET
        if "." in name or name in TRAINER_ONLY_ARGUMENTS or name not in self._defaults:
            return self._arguments.find(name)
        if name in self._told:
            value = described(self._told[name])
            is_default = self._told[name] is self._defaults[name] or self._is_default(name)
            if value.kind is Kind.LITERAL and is_default:
                return Argument(Kind.LITERAL, value.value, is_default=True)
            return UNSET if is_default else value
        value = described(self._defaults[name])
        return Argument(Kind.LITERAL, value.value, is_default=True) if value.kind is Kind.LITERAL else UNSET

    def _is_default(self, name: str) -> bool:
        plain = (bool, int, float, str, type(None), list, dict)
        told, default = self._told[name], self._defaults[name]
        return isinstance(told, plain) and isinstance(default, plain) and bool(told == default)


def of(trainer: Any, told: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the bugs that the run hits or may hit, the worst first."""
    trl = versions.installed("trl") or ""
    lookup, facts = _AsTold(trainer, told), TrainerFacts(trainer)
    found = []
    bugs: list[Bug] = [*loading.known(()), *loading.without_repair()]
    for bug in bugs:
        if repair_of(bug) == "if named" or bug.severity is Severity.DIAGNOSIS:
            continue
        answer = finding(name_of(trainer), lookup.find, bug, trl, fact=facts.find)
        if answer.answer is Answer.NOT_HIT:
            continue
        found.append(
            {
                "id": bug.id,
                "title": bug.title,
                "severity": bug.severity.value,
                "harm": bug.harm.value if bug.harm is not None else None,
                "answer": answer.answer.value,
                "symptom": answer.symptom,
                "because": list(answer.because),
                "unknown": list(answer.unknown),
                "repair": repair_of(bug),
                "fixed_in": bug.upstream.fixed_in,
                # Its conditions concern what a small run leaves out.
                "narrowed": bool({name for hit in bug.hits for name in hit.when} & (told.keys() & _LEFT_OUT)),
            }
        )
    ranks = [severity.value for severity in Severity]
    found.sort(key=lambda bug: (bug["answer"] != Answer.HIT.value, ranks.index(bug["severity"]), bug["id"]))
    return found
