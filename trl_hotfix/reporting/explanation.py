"""Explain one patch and its state in this process in words."""

from __future__ import annotations

from collections.abc import Sequence

from ..catalogue import on_record
from .report import PatchStatus
from .sentences import because, fixed_of, links, turn_off


def explanation(status: PatchStatus, journal: Sequence[str]) -> str:
    """Return one patch in words: the bug, the repair, its state here, and the steps that led to it (``journal``)."""
    patch = status.patch
    fixed = fixed_of(patch)
    lines = [
        f"{patch.id} (revision {patch.revision}): {patch.title}",
        f"severity   {patch.severity.value}",
        f"bug of     {patch.layer or 'TRL'}{f'; fixed in {fixed}' if fixed else ''}",
        f"TRL        {patch.trl}",
    ]
    if patch.review_by:
        lines.append(f"open       in the newest release we checked; we check again by {patch.review_by}")
    lines += [f"requires   {name} {versions}" for name, versions in patch.requires.items()]
    lines.append(f"evidence   {on_record.in_words(patch)}")
    lines += [f"upstream   {link}" for link in links(patch.upstream)]
    for target in status.targets:
        called = f", called: {target.target.called.value}" if target.target.called is not None else ""
        lines.append(f"target     {target.target.module}: {target.target.attribute} ({target.state.value}{called})")
    lines += _options(status)
    lines.append(f"here       {status.state.value} ({status.reason.value}): {because(status.reason, status.evidence)}")
    lines += [f"why        {patch.why}", f"how        {patch.how}"]
    if patch.not_repaired:
        lines.append(f"left out   {patch.not_repaired}")
    lines += [f"turn off   {switch}" for switch in turn_off(patch)]
    lines += [f"trail      {step}" for step in journal]
    return "\n".join(lines)


def _options(status: PatchStatus) -> list[str]:
    lines = []
    for name, option in status.patch.options.items():
        lines.append(f"option     {name} = {status.options[name]} (default {option.default})")
        lines += [f"           {name}={choice}: {meaning}" for choice, meaning in option.choices.items()]
    return lines
