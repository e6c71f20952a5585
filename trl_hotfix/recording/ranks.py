"""Have all ranks the same repairs?

Asked through the key-value store of ``torch.distributed`` and not with a collective: a rank on which ``TRL_HOTFIX`` was
not set would never take part, and the others would hang.
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

Ranks have made their wrapped model together just before.
"""

Record = Mapping[str, Any]
"""What ``Report.freeze()`` returns."""

_rounds = itertools.count()


def compare(mine: Record) -> list[str]:
    """What differs between the ranks, in words, the same on each; empty if nothing does or there is one process only.

    Every rank must call it the same number of times; one that does not is among what is said.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return []
    rank, world = distributed.get_rank(), distributed.get_world_size()
    if world == 1:
        return []
    patience = _patience()
    everybodys = distributed.distributed_c10d._get_default_store()
    store = distributed.PrefixStore(f"trl_hotfix/{next(_rounds)}", everybodys)
    if rank == 0:
        said = _collected(store, mine, world, patience)
        store.set("verdict", json.dumps(said))
        return said
    store.set(str(rank), json.dumps(mine))
    if not _wait_for_key(store, "verdict", patience + 10):
        return ["rank 0 does not answer: no trl_hotfix is on there"]
    verdict = _read(store.get("verdict"))
    said = verdict if isinstance(verdict, list) else ["rank 0 answers what cannot be read"]
    return [plain(str(each)) for each in said]


def _patience() -> float:
    """Seconds. Not a number, or without end, would be a hang of the whole job while one rank is missing."""
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


def _collected(store: Any, mine: Record, world: int, patience: float) -> list[str]:
    by_what: dict[str, list[int]] = {}
    until = time.monotonic() + patience
    for rank in range(1, world):
        what = "no trl_hotfix is on there"
        if _wait_for_key(store, str(rank), until - time.monotonic()):
            theirs = freeze_files.record(_read(store.get(str(rank))))
            what = "its record cannot be read"
            if theirs is not None:
                what = "; ".join(differences(mine, theirs, "on rank 0", "there"))
        if what:
            by_what.setdefault(what, []).append(rank)
    return [f"rank {', '.join(map(str, ranks))}: {what}" for what, ranks in by_what.items()]


def _wait_for_key(store: Any, key: str, patience: float) -> bool:
    """Has somebody set ``key`` within ``patience`` seconds? ``Store.wait`` leaves some stores unusable when it ends."""
    until = time.monotonic() + patience
    pause = 0.01
    while not store.check([key]):
        if time.monotonic() > until:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.5)
    return True


def differences(one: Record, other: Record, in_one: str, in_other: str) -> list[str]:
    """How two records differ, each difference in words: patches with their revisions and options, and the TRL."""
    said = []
    if one["trl"] != other["trl"]:
        said.append(f"TRL {one['trl']} {in_one}, {other['trl']} {in_other}")
    ours, theirs = ({each["id"]: each for each in record["patches"]} for record in (one, other))
    for patch_id in sorted(ours.keys() | theirs.keys()):
        how = [_how(its[patch_id]) if patch_id in its else "not on" for its in (ours, theirs)]
        if how[0] != how[1]:
            said.append(f"{patch_id} is {how[0]} {in_one}, {how[1]} {in_other}")
    return [plain(each) for each in said]


def _how(patch: Record) -> str:
    return " ".join([f"r{patch['revision']}", *(f"{name}={choice}" for name, choice in patch["options"].items())])
