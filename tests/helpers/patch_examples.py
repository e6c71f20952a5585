"""A patch, all releases of TRL from 0.9.6 to 1.16.0, and selections."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hypothesis import strategies as st
from msgspec.structs import replace

from trl_hotfix.model import Patch, Severity, Target, Upstream
from trl_hotfix.selection.selection import Selection

# fmt: off
RELEASES = [
    "0.9.6", "0.10.1", "0.11.0", "0.11.1", "0.11.2", "0.11.3", "0.11.4", "0.12.0", "0.12.1", "0.12.2", "0.13.0",
    "0.14.0", "0.15.0", "0.15.1", "0.15.2", "0.16.0", "0.16.1", "0.17.0", "0.18.0", "0.18.1", "0.18.2", "0.19.0",
    "0.19.1", "0.20.0", "0.21.0", "0.22.0", "0.22.1", "0.22.2", "0.23.0", "0.23.1", "0.24.0", "0.25.0", "0.25.1",
    "0.26.0", "0.26.1", "0.26.2", "0.27.0", "0.27.1", "0.27.2", "0.28.0", "0.29.0", "0.29.1", "1.0.0", "1.1.0",
    "1.2.0", "1.3.0", "1.4.0", "1.5.0", "1.5.1", "1.6.0", "1.7.0", "1.7.1", "1.8.0", "1.9.0", "1.9.1",
    "1.9.2", "1.10.0", "1.11.0", "1.12.0", "1.13.0", "1.14.0", "1.14.1", "1.14.2", "1.15.0", "1.16.0",
]
# fmt: on
"""Every release of TRL from 0.9.6 to 1.16.0."""
TARGET = Target("trl.trainer.dpo_trainer", "DPOTrainer.step", "wrapper")
PATCH = Patch(
    id="some-patch",
    revision=1,
    title="A title",
    severity=Severity.CRASH,
    trl=">=0.11.0,<0.12.0",
    upstream=Upstream(fixed_in="0.12.0"),
    why="because",
    how="so",
    targets=(TARGET,),
    self_test="self_test",
)
IDS = ("some-patch", "another-patch", "third-patch")
KNOWN = tuple(replace(PATCH, id=patch_id) for patch_id in IDS)
some_release = st.sampled_from(RELEASES)


def patch(**changes: Any) -> Patch:
    return replace(PATCH, **changes)


def having(**distributions: str) -> Callable[[str], str | None]:
    return distributions.get


def selection_of(
    only: Any = None,
    skip: Any = None,
    environment: Mapping[str, str] | None = None,
    known: Any = KNOWN,
    options: Any = None,
) -> Selection:
    return Selection.of(only, skip, environment or {}, known, options)


ids = st.lists(st.sampled_from(IDS), unique=True)
