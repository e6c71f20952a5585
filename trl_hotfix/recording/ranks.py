"""Check that all ranks have the same repairs.

The records are exchanged through the key-value store of ``torch.distributed`` and not by a collective: a rank on which
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
from typing import Any

from ..errors import plain
from ..log import log
from ..selection import freeze_files

RANK_TIMEOUT = 60.0
"""Seconds to wait for a rank, unless ``TRL_HOTFIX_PATIENCE`` says otherwise.

All ranks have built their wrapped model together just before, so they arrive at nearly the same time.
"""

Record = Mapping[str, Any]
"""The result of ``Report.freeze()``."""

_rounds = itertools.count()


def compare(own_record: Record) -> list[str]:
    """Return the differences between the ranks in words, the same list on each rank. With one process it is empty.

    Every rank must call it the same number of times. A rank that does not is reported as one of the differences.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return []
    rank, world = distributed.get_rank(), distributed.get_world_size()
    if world == 1:
        return []
    timeout = _patience()
    default_store = distributed.distributed_c10d._get_default_store()
    store = distributed.PrefixStore(f"trl_hotfix/{next(_rounds)}", default_store)
    if rank == 0:
        messages = _collected(store, own_record, world, timeout)
        store.set("verdict", json.dumps(messages))
        return messages
    store.set(str(rank), json.dumps(own_record))
    if not _wait_for_key(store, "verdict", timeout + 10):
        return ["rank 0 does not answer: no trl_hotfix is on there"]
    verdict = _read(store.get("verdict"))
    messages = verdict if isinstance(verdict, list) else ["rank 0 answers what cannot be read"]
    return [plain(str(message)) for message in messages]


def _patience() -> float:
    """Return the timeout in seconds. NaN and infinity are refused: they would hang the job while a rank is missing."""
    value = os.environ.get("TRL_HOTFIX_PATIENCE") or RANK_TIMEOUT
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if 0 <= seconds < math.inf:
        return seconds
    log.warning("TRL_HOTFIX_PATIENCE is %r, not a number of seconds; taken as %g", value, RANK_TIMEOUT)
    return RANK_TIMEOUT


def _read(text: Any) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _collected(store: Any, own_record: Record, world: int, timeout: float) -> list[str]:
    """Return the differences of the other ranks from rank 0, with the ranks of equal differences in one message."""
    ranks_by_difference: dict[str, list[int]] = {}
    deadline = time.monotonic() + timeout
    for rank in range(1, world):
        difference = "no trl_hotfix is on there"
        if _wait_for_key(store, str(rank), deadline - time.monotonic()):
            rank_record = freeze_files.record(_read(store.get(str(rank))))
            difference = "its record cannot be read"
            if rank_record is not None:
                difference = "; ".join(differences(own_record, rank_record, "on rank 0", "there"))
        if difference:
            ranks_by_difference.setdefault(difference, []).append(rank)
    return [f"rank {', '.join(map(str, ranks))}: {difference}" for difference, ranks in ranks_by_difference.items()]


def _wait_for_key(store: Any, key: str, timeout: float) -> bool:
    """Wait for ``key`` up to ``timeout`` seconds, and return whether it is set.

    ``Store.wait`` is not used, since it leaves some stores unusable when it ends.
    """
    deadline = time.monotonic() + timeout
    pause = 0.01
    while not store.check([key]):
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.5)
    return True


def differences(first: Record, second: Record, in_first: str, in_second: str) -> list[str]:
    """Return the differences between two records in words: the TRL, and patches with their revisions and options."""
    messages = []
    if first["trl"] != second["trl"]:
        messages.append(f"TRL {first['trl']} {in_first}, {second['trl']} {in_second}")
    first_patches = {patch["id"]: patch for patch in first["patches"]}
    second_patches = {patch["id"]: patch for patch in second["patches"]}
    for patch_id in sorted(first_patches.keys() | second_patches.keys()):
        before, after = _describe(first_patches.get(patch_id)), _describe(second_patches.get(patch_id))
        if before != after:
            messages.append(f"{patch_id} is {before} {in_first}, {after} {in_second}")
    return [plain(message) for message in messages]


def _describe(patch: Record | None) -> str:
    if patch is None:
        return "not on"
    return " ".join([f"r{patch['revision']}", *(f"{name}={choice}" for name, choice in patch["options"].items())])
