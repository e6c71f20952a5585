"""Compare what the catalogue declares of when a target is called with what was seen in many releases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trl_hotfix.model import Called

WHERE: Mapping[Called, set[str]] = {
    Called.CONSTRUCTION: {"construction"},
    Called.SOME_CONSTRUCTIONS: {"construction"},
    # Data are prepared in constructors too, and evaluate() prepares a dataset that it is given.
    Called.PREPARATION: {"construction", "dataloader", "evaluate"},
    Called.DATA: {"data"},
    # ``dataloader`` is the reference that is precomputed, ``evaluate`` the log of an evaluation.
    Called.STEP: {"step", "evaluation", "dataloader"},
    Called.SOME_STEPS: {"step", "training", "evaluation", "dataloader", "evaluate"},
    Called.EVALUATION: {"evaluation", "evaluate"},
    Called.GENERATION: {"step", "evaluation"},
    Called.SAVE: {"save"},
    Called.RESUME: {"resume"},
    Called.IMPORT: {"import"},
}
"""The moments (``moments.MOMENTS``) in which a target that is declared so is called, and no others."""


@dataclass
class Seen:
    """All calls of one target: by moment, in each construction and in each finished step of the trainers that have it.

    A step is its calls, the generations in it, and whether the trainer generates with vLLM, which counts none.
    """

    moments: Counter[str] = field(default_factory=Counter)
    constructions: list[int] = field(default_factory=list)
    steps: list[tuple[int, int, bool]] = field(default_factory=list)

    def add(self, name: str, answer: Mapping[str, Any]) -> None:
        """Add what one run saw of the target ``name``."""
        self.moments.update(answer["moments"].get(name, {}))
        for trainer in answer["trainers"]:
            if name in trainer["has"]:
                if trainer["construction"] is not None:
                    self.constructions.append(trainer["construction"].get(name, 0))
                for step in trainer["steps"]:
                    self.steps.append((step["calls"].get(name, 0), step["generations"], step["vllm"]))


def seen(name: str, answers: Iterable[Mapping[str, Any]]) -> Seen:
    together = Seen()
    for answer in answers:
        together.add(name, answer)
    return together


def disagreement(called: Called, seen: Seen) -> str | None:
    """Return what keeps the calls from being those that ``called`` declares, or None."""
    if not seen.moments:
        return "it was not called"
    return contradiction(called, seen) or _not_shown(called, seen)


def contradiction(called: Called, seen: Seen) -> str | None:
    """Return what was seen that ``called`` does not allow, or None: also where only a part of it was seen."""
    elsewhere = set(seen.moments) - WHERE[called]
    if elsewhere:
        return f"it was called in: {', '.join(sorted(elsewhere))}"
    without = sum(not calls for calls in seen.constructions)
    if called is Called.CONSTRUCTION and without:
        return f"{without} of {len(seen.constructions)} constructions did not call it"
    without = sum(not calls for calls, _, _ in seen.steps)
    if called is Called.STEP and without:
        return f"{without} of {len(seen.steps)} steps did not call it"
    if called is Called.GENERATION and any(calls and not (made or vllm) for calls, made, vllm in seen.steps):
        return "a step called it and generated nothing"
    return None


def _not_shown(called: Called, seen: Seen) -> str | None:
    """Return what a declaration says besides and was not seen, or None: that some leave it out, that training calls."""
    if called is Called.CONSTRUCTION and not seen.constructions:
        return "0 of 0 constructions did not call it"
    if called is Called.SOME_CONSTRUCTIONS and all(seen.constructions):
        return "every construction called it"
    if called is Called.STEP and not seen.steps:
        return "0 of 0 steps did not call it"
    if called in (Called.SOME_STEPS, Called.GENERATION) and not set(seen.moments) & {"step", "training"}:
        return "training did not call it"
    if called in (Called.SOME_STEPS, Called.GENERATION) and all(calls for calls, _, _ in seen.steps):
        return "every step called it"
    return None
