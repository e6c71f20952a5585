"""Put decisions, evidence and addresses into words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from packaging.specifiers import SpecifierSet

from ..errors import printable
from ..model import Bug, Decision, Evidence, Harm, KnownBug, Patch, Reason, Upstream

HARMS = {
    Harm.SCALE: "a constant factor; Adam cancels it, but for clipping, epsilon and weight decay",
    Harm.OBJECTIVE: "the gradients of another objective",
    Harm.DATA: "rows or tokens were lost, doubled or wrong",
    Harm.WEIGHTS: "the weights that were saved, loaded or handed on are not the trained ones",
    Harm.METRIC: "only the log is wrong",
    Harm.EVALUATION: "evaluation is wrong, and so the checkpoint that it chooses",
    Harm.CRASH: "the run stopped with an error",
}
"""What a run with the bug leaves behind."""

_OF_A_TARGET = {
    Reason.MISSING_TARGET: "this TRL has no {target}",
    Reason.ALREADY_FIXED: "this code of {target} is without the bug",
    Reason.UNKNOWN_BODY: "not proven on this code of {target}",
}


def because(reason: Reason, evidence: Evidence) -> str:
    """Return a reason in words, with its evidence."""
    sentences = {
        Reason.SWITCHED_OFF: "trl_hotfix is off in this process",
        Reason.NOT_SELECTED: "not among those asked for",
        Reason.EXCLUDED: "left out on request",
        Reason.DEFAULT_OFF: "off unless it is asked for by name",
        Reason.FIXED_UPSTREAM: "TRL {installed}: fixed upstream in {fixed_in}",
        Reason.NO_TRL: "TRL is not installed here",
        Reason.TRL_VERSION: "TRL {installed} does not have this bug ({range})",
        Reason.REQUIREMENT: "needs {requires}, found {found}",
        Reason.APPLIES: "TRL {installed} has this bug",
        Reason.BODY_DECIDES: "TRL {installed} is not proved: the body of the method decides, when it is imported",
        Reason.NOT_IMPORTED: "goes on when its module is imported",
        Reason.REPRODUCED: "the bug is here; nothing is changed",
        Reason.PROVEN: "reproduced before, fixed after, in this process",
        Reason.BY_REQUEST: "taken off on request",
    }
    if reason is Reason.REQUIREMENT and evidence.get("found") is None:
        return f"needs {evidence['requires']}, which is not installed here"
    # What a process has found stands by module instead.
    if "target" in evidence:
        sentences |= _OF_A_TARGET
    if reason in sentences:
        return sentences[reason].format_map(evidence)
    return _in_words(evidence)


def _in_words(evidence: Evidence) -> str:
    def words(value: Any) -> Iterable[str]:
        if isinstance(value, Mapping):
            return [f"{key} {' '.join(words(part))}" for key, part in value.items() if key != "traceback"]
        # An error of other code may have line breaks in its text, and escape codes.
        return [f"{value:.6g}" if isinstance(value, float) else printable(str(value))]

    return ", ".join(words(evidence))


def in_one_line(decision: Decision) -> str:
    """Return the evidence of a decision in one line, without its traceback, which ``status()`` has."""

    def short(value: Any) -> str:
        if isinstance(value, Mapping):
            return " ".join(f"{key}={short(part)}" for key, part in value.items())
        return f"{value:.6g}" if isinstance(value, float) else printable(str(value))

    shown = {key: value for key, value in decision.evidence.items() if key != "traceback"}
    if isinstance(red := shown.get("red"), Mapping) and isinstance(green := shown.get("green"), Mapping):
        changed = {key: value for key, value in green.items() if red.get(key) != value}
        shown = {"before": red, "after": changed}
    return "".join(f"; {key}: {short(value)}" for key, value in shown.items())


def links(upstream: Upstream) -> list[str]:
    """Return the addresses of upstream's issues and pull requests."""

    def urls(kind: str, numbers: int | tuple[int, ...] | None) -> list[str]:
        as_tuple = (numbers,) if isinstance(numbers, int) else numbers or ()
        return [f"https://github.com/huggingface/trl/{kind}/{number}" for number in as_tuple]

    return urls("issues", upstream.issue) + urls("pull", upstream.fix)


def repair_of(bug: Bug) -> str:
    """Return how trl_hotfix repairs a bug: ``by default``, ``if named``, or ``none`` for one without a patch."""
    if isinstance(bug, KnownBug):
        return "none"
    return "by default" if bug.default else "if named"


def fixed_in_layers(bug: Bug) -> dict[str, str]:
    """Return the first version without the bug of each other distribution; ``>0.18.3`` if only 0.18.3 has it."""
    ends = {
        distribution: {each.operator: each.version for each in SpecifierSet(specifiers)}
        for distribution, specifiers in bug.requires.items()
    }
    return {
        distribution: end.get("<") or f">{end['==']}" for distribution, end in ends.items() if "<" in end or "==" in end
    }


def where_fixed(fixed_in: str | None, layers: Mapping[str, str]) -> str | None:
    """Return the releases without the bug, such as ``TRL 1.9.0, or transformers 5.3``. None: no release lacks it."""
    releases = {**({"TRL": fixed_in} if fixed_in else {}), **layers}
    return ", or ".join(f"{distribution} {version}" for distribution, version in releases.items()) or None


def fixed_of(bug: Bug) -> str | None:
    """Return the releases without the bug in words."""
    return where_fixed(bug.upstream.fixed_in, fixed_in_layers(bug))


def no_repair(fixed: str | None) -> str:
    """Return what there is for a bug without a patch. ``fixed``: the releases without the bug."""
    return f"known, no repair here; {f'fixed in {fixed}' if fixed else 'no release fixes it'}"


def severity_and_harm(severity: str, harm: str | None) -> str:
    """Return the two in short: ``wrong-gradient, scale``. A pack may name no harm."""
    return f"{severity}, {harm}" if harm is not None else severity


def harm_in_words(harm: Harm | None) -> str | None:
    """Return the kind of harm and what it means."""
    return f"{harm.value}: {HARMS[harm]}" if harm is not None else None


def turn_off(patch: Patch) -> list[str]:
    """Return the settings and calls that leave ``patch`` out."""
    return [
        f"TRL_HOTFIX_SKIP={patch.id}",
        f"trl_hotfix.apply(skip=[{patch.id!r}])",
        f"trl_hotfix.revert({patch.id!r})",
    ]
