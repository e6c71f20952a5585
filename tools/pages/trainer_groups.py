"""The groups of trainers by which the bugs stand in the sidebar."""

from __future__ import annotations

from collections.abc import Iterable

from packaging.version import Version

from trl_hotfix.catalogue import loading
from trl_hotfix.matching import gates
from trl_hotfix.matching.fingerprints import bodies
from trl_hotfix.model import Bug

GROUPS = {
    "SFT": {"SFT"},
    "DPO": {"DPO", "TPO"},
    "GRPO and RLOO": {"GRPO", "RLOO"},
    "KTO, BCO, CPO, ORPO": {"KTO", "BCO", "CPO", "ORPO"},
    "Reward and PRM": {"Reward", "PRM"},
    "Online": {"OnlineDPO", "XPO", "NashMD", "PPO"},
    "Distillation": {"GKD", "GOLD", "Distillation", "MiniLLM"},
}
SEVERAL = "Several trainers"


def trainers_of(bug: Bug) -> list[str]:
    """Return the trainers that may hit a bug, by their names without ``Trainer``; ``*`` stands for all."""
    return list(dict.fromkeys(name for hit in bug.hits for name in hit.trainers))


def group_of(bug: Bug) -> str:
    """Return the group that has all trainers of a bug, or ``SEVERAL``."""
    names = {*trainers_of(bug)}
    return next((group for group, members in GROUPS.items() if names <= members), SEVERAL)


def newest_first(bugs: Iterable[Bug]) -> list[Bug]:
    """Return bugs by the last release that has them, the newest first, then by id."""
    return sorted(bugs, key=lambda bug: (-_place_of_last_release(bug), bug.id))


def _place_of_last_release(bug: Bug) -> int:
    releases = sorted(bodies().releases, key=Version)
    return max((place for place, release in enumerate(releases) if gates.has_bug(release, bug)), default=-1)


def by_group() -> dict[str, list[Bug]]:
    """Return the bugs of each group, with a repair or without, those that newer releases have first."""
    known: list[Bug] = [*loading.load(), *loading.without_repair()]
    ordered = newest_first(known)
    named = {group: [bug for bug in ordered if group_of(bug) == group] for group in (*GROUPS, SEVERAL)}
    return {group: bugs for group, bugs in named.items() if bugs}
