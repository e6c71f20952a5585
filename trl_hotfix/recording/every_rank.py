"""What each patch was on every rank of a run, in the record of rank 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import ranks
from .run import Word

_FINE = (Word.REPAIRED.value, Word.CALLED.value)
"""A rank whose rows have nothing to repair was called, and is as right as the others."""


def said(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a rank says of its patches: a word and the counts of each."""
    unreached = {entry["id"]: ["unreached", 0, 0] for entry in record.get("unreached", ())}
    entries = [*record["patches"], *record.get("reverted", ())]
    return {**unreached, **{entry["id"]: [entry["word"], entry["called"], entry["acted"]] for entry in entries}}


def merged(record: dict[str, Any], moment: str, *, patiently: bool) -> dict[str, Any]:
    """Return the record with the words of all ranks, where they differ, and the sums of their counts.

    Every rank calls it at the same moments. With one process, and on the other ranks, it is the record itself.
    """
    found = ranks.gather(said(record), moment, patiently=patiently)
    if not found:
        return record
    answers = {rank: answer for rank, answer in found.items() if isinstance(answer, dict)}
    entries, problems = [], list(record.get("problems", ()))
    silent = [rank for rank in range(ranks.world_size()) if rank not in answers]
    if silent:
        problems.append(f"{_numbers(silent)} did not say what became of the patches there")
    for entry in record["patches"]:
        of_patch = {rank: answer.get(entry["id"], ["off", 0, 0]) for rank, answer in answers.items()}
        merged_entry, problem = _merged(entry, of_patch)
        entries.append(merged_entry)
        if problem and problem not in problems:
            problems.append(problem)
    return {**record, "patches": entries, **({"problems": problems} if problems else {})}


def _merged(entry: dict[str, Any], of_patch: Mapping[int, Any]) -> tuple[dict[str, Any], str]:
    """Return the entry for all ranks, and what is wrong with it, or no text."""
    by_word: dict[str, list[int]] = {}
    for rank, (word, _, _) in sorted(of_patch.items()):
        by_word.setdefault(word, []).append(rank)
    sums = {"called": sum(one[1] for one in of_patch.values()), "acted": sum(one[2] for one in of_patch.values())}
    entry = {**entry, "all_ranks": sums}
    if len(by_word) == 1:
        return entry, ""
    entry["ranks"] = by_word
    if set(by_word) <= set(_FINE):
        return {**entry, "word": Word.REPAIRED.value}, ""
    words = "; ".join(f"{word} on {_numbers(numbers)}" for word, numbers in by_word.items())
    if Word.REPAIRED.value not in by_word:
        return entry, ""
    return {**entry, "word": Word.ON_SOME_RANKS.value}, f"{entry['id']}: {words}"


def _numbers(ranks_: list[int]) -> str:
    return f"rank{'s' if len(ranks_) > 1 else ''} {', '.join(map(str, ranks_))}"
