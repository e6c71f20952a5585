"""What ranks say to one another, and what differs between their repairs.

The messages are exchanged through the key-value store of ``torch.distributed`` and not by a collective: a rank on which
``TRL_HOTFIX`` is not set would never take part in a collective, and the other ranks would hang.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ..errors import plain
from ..log import event, warning
from ..patching.engine import rank_and_world as rank_and_world

RANK_TIMEOUT = 60.0
"""Seconds to wait for a rank, unless ``TRL_HOTFIX_PATIENCE`` says otherwise.

All ranks have built their wrapped model together just before, so they arrive at nearly the same time.
"""

NOTHING_THERE = "no trl_hotfix is on there, or it is slow"

_trainings = itertools.count()

Record = Mapping[str, Any]
"""The result of ``Report.freeze()``."""

_SHARE = 5 / 6
"""Rank 0 waits for so much of the patience, so that its verdict comes while the others still wait for it."""


def gather(own: Mapping[str, Any], moment: str, *, patiently: bool = True) -> dict[int, Any]:
    """Return on rank 0 what each rank says at this moment, by its number, and nothing elsewhere.

    It leaves out a rank that does not answer. No rank waits but rank 0, and without ``patiently`` not even that one.
    """
    rank, world = rank_and_world()
    if world == 1:
        return {}
    store = _store(moment)
    if rank != 0:
        store.set(str(rank), json.dumps(own))
        return {}
    found: dict[int, Any] = {0: own}
    deadline = time.monotonic() + (_SHARE * _patience() if patiently else 0)
    for other in range(1, world):
        if _wait_for_key(store, str(other), deadline - time.monotonic()):
            found[other] = _read(store.get(str(other)))
    return found


def decide(moment: str, proposal: str, *, waits: bool) -> str:
    """Return what is decided at this moment: the first proposal of a rank. One that ``waits`` makes it at the end."""
    store = _store(moment)
    if waits and _wait_for_key(store, _DECIDED, _patience()):
        return bytes(store.get(_DECIDED)).decode(errors="replace")
    try:
        return bytes(store.compare_set(_DECIDED, "", proposal)).decode(errors="replace")
    except RuntimeError:
        # The rank that holds the store is gone.
        return proposal


_DECIDED = "decided"


def post(moment: str, what: Mapping[str, Any]) -> None:
    """Leave something for all ranks to find, unless a rank has left something before."""
    with suppress(RuntimeError):
        _store(moment).compare_set("posted", "", json.dumps(what))


def posted(moment: str) -> Any:
    """Return what a rank has left, or None. It asks the store once, and does not wait."""
    store = _store(moment)
    return _read(store.get("posted")) if _is_set(store, "posted") else None


def part(moment: str) -> None:
    """Call this before this rank ends with the others. Rank 0 waits a little for them: its store goes with it."""
    rank, world = rank_and_world()
    if world == 1:
        return
    store = _store(moment)
    with suppress(RuntimeError):
        if store.add("parting", 1) == world:
            store.set("all", "")
        if rank == 0:
            _wait_for_key(store, "all", (1 - _SHARE) * _patience())


def world_size() -> int:
    """Return the number of processes that train together."""
    return rank_and_world()[1]


def number_of_training() -> int:
    """Return the number of a training that begins, the same on every rank. Each may have trained alone before."""
    return next(_trainings) if world_size() > 1 else 0


def patience() -> str:
    """Return how long this rank waits for others, in words."""
    return f"{_patience():g} s (TRL_HOTFIX_PATIENCE)"


def _store(prefix: str) -> Any:
    distributed: Any = sys.modules["torch.distributed"]
    return distributed.PrefixStore(f"trl_hotfix/{prefix}", distributed.distributed_c10d._get_default_store())


def _patience() -> float:
    """Return the timeout in seconds. It refuses NaN and infinity: they would hang the job while a rank is missing."""
    value = os.environ.get("TRL_HOTFIX_PATIENCE") or RANK_TIMEOUT
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if 0 <= seconds < math.inf:
        return seconds
    fields = event("patience-setting")
    warning("TRL_HOTFIX_PATIENCE is %r, not a number of seconds; taken as %g", value, RANK_TIMEOUT, extra=fields)
    return RANK_TIMEOUT


def _read(text: Any) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _wait_for_key(store: Any, key: str, timeout: float) -> bool:
    """Wait for ``key`` up to ``timeout`` seconds, and return whether it is set.

    ``Store.wait`` is not used, since it leaves some stores unusable when it ends.
    """
    deadline = time.monotonic() + timeout
    pause = 0.01
    while not _is_set(store, key):
        left = deadline - time.monotonic()
        if left < 0:
            return False
        time.sleep(min(pause, left))
        pause = min(2 * pause, 0.5)
    return True


def _is_set(store: Any, key: str) -> bool:
    try:
        return bool(store.check([key]))
    except RuntimeError:
        # The rank that holds the store is gone.
        return False


def differences(first: Record, second: Record, in_first: str, in_second: str) -> list[str]:
    """Return the differences between two records in words: the TRL, and patches with their revisions and options."""
    return list(differing(first, second, in_first, in_second).values())


def differing(first: Record, second: Record, in_first: str, in_second: str) -> dict[str, str]:
    """Return the same by the id of the patch. That of the TRL has no id."""
    messages = {}
    if first["trl"] != second["trl"]:
        messages[""] = f"TRL {first['trl']} {in_first}, {second['trl']} {in_second}"
    first_patches = {patch["id"]: patch for patch in first["patches"]}
    second_patches = {patch["id"]: patch for patch in second["patches"]}
    for patch_id in sorted(first_patches.keys() | second_patches.keys()):
        before, after = _describe(first_patches.get(patch_id)), _describe(second_patches.get(patch_id))
        if before != after:
            messages[patch_id] = f"{patch_id} is {before} {in_first}, {after} {in_second}"
    return {patch_id: plain(message) for patch_id, message in messages.items()}


def _describe(patch: Record | None) -> str:
    if patch is None:
        return "not on"
    return " ".join([f"r{patch['revision']}", *(f"{name}={choice}" for name, choice in patch["options"].items())])
