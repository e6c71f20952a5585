"""Run inside one release: in which calls the wrappers of patches act.

    python -m bench.inside.acts OUT.json SECONDS ID...

Each patch runs in a fork. Its answer has, for its self-test, for its proof and for what the bug does not hit, the calls
of each target with the patch on, and in how many of them the wrapper acted; or it is a text, the traceback.
"""

from __future__ import annotations

import gc
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trl_hotfix.catalogue import loading, modules
from trl_hotfix.matching import gates
from trl_hotfix.model import Patch, Target
from trl_hotfix.patching import engine
from trl_hotfix.patching.isolation import undisturbed
from trl_hotfix.verification import cells

import tiny  # noqa: F401  imported before the forks
from bench.inside.counting import keep_ledgers, total
from bench.proving import prove, release

Seen = dict[str, list[int]]
"""The number of calls of each target, and in how many of them the wrapper acted."""


def seen(patch: Patch) -> dict[str, Seen | None]:
    """Return what the wrappers of ``patch`` did in each of the three. None: the proof has no ``unaffected()``."""
    proof, targets = prove.proof_of(patch.id), cells.runnable(gates.targets_here(patch))
    of_self_test = {target.name: [0, 0] for target in targets}
    answer: dict[str, Seen | None] = {"self-test": of_self_test, "unaffected": None}
    for options in patch.every_choice():
        self_test = modules.function_of(patch, patch.self_test, options)
        with engine.ENGINE.patched((patch.id,), True, {patch.id: options}, unknown_body="try"), undisturbed():
            for module in dict.fromkeys(target.module for target in targets):
                with counted(patch, targets, of_self_test):
                    self_test(sys.modules[module])
    with prove.patched(patch):
        answer["proof"] = counts_of_run(patch, targets, proof.train)
        if hasattr(proof, "unaffected"):
            answer["unaffected"] = counts_of_run(patch, targets, proof.unaffected)
    return answer


def counts_of_run(patch: Patch, targets: tuple[Target, ...], run: Callable[[], Any]) -> Seen:
    counts = {target.name: [0, 0] for target in targets}
    with counted(patch, targets, counts):
        run()
    return counts


@contextmanager
def counted(patch: Patch, targets: tuple[Target, ...], counts: Seen) -> Iterator[None]:
    """Add to ``counts`` the calls within the block."""
    # Else trainers of an earlier run go while this one counts.
    gc.collect()
    before = {target.name: total(patch, target) for target in targets}
    yield
    for target in targets:
        calls = zip(counts[target.name], before[target.name], total(patch, target), strict=True)
        counts[target.name] = [old + after - before_block for old, before_block, after in calls]


def run(patch: Patch) -> Any:
    try:
        return seen(patch)
    # Any error of a patch or a release is the finding.
    except Exception:  # noqa: BLE001
        return traceback.format_exc()


def main(out: str, seconds: str, *ids: str) -> None:
    keep_ledgers()
    patches = [patch for patch in loading.load() if patch.id in ids]
    release.warm(patches)
    answers = {patch.id: release.in_a_fork(run, patch, float(seconds)) for patch in patches}
    Path(out).write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
