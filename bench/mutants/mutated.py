"""Run inside one release: break the wrappers of one patch in every way, and see what notices it.

    python -m bench.mutants.mutated OUT.json TASK.json

Each mutant runs in a fork: the self-test of the patch as ``apply()`` runs it, its tests, its proof, the runs that the
bug does not hit, and parity with the fixed release. The first that notices has killed it.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trl_hotfix.catalogue import loading, modules
from trl_hotfix.model import Patch, State, Verdict
from trl_hotfix.patching import engine
from trl_hotfix.patching.isolation import TimeLimitExceeded, time_limit

from bench.mutants import breakages, covered
from bench.mutants.breakages import Breakage
from bench.proving import patch_tests, prove, release

SELF_TEST_SECONDS = 20.0
SECONDS = 240.0
"""The limit for a mutant. One that does not end is noticed, too."""

TOLERANCE = 1e-6


@dataclass
class Judge:
    """What a patch is judged by. ``unaffected``: loss and gradients of the runs that the bug does not hit."""

    patch: Patch
    proof: Any
    unaffected: Any = None
    fixed: Mapping[str, Any] | None = None
    _gradients: Mapping[str, Any] = field(default_factory=dict)

    def killer(self) -> tuple[str, str]:
        """Return what notices that the patch is broken, and how. Both are empty if nothing does."""
        stages: Mapping[str, Callable[[], str]] = {
            "self-test": self._by_self_test,
            "tests": self._by_tests,
            "proof": self._by_proof,
            "unaffected": self._by_unaffected,
            "parity": self._by_parity,
        }
        for name, stage in stages.items():
            try:
                why = stage()
            # A mutant may raise anything.
            except (Exception, TimeLimitExceeded) as error:  # noqa: BLE001
                why = f"{type(error).__name__}: {error}"[:300]
            if why:
                return name, why
        return "", ""

    def _by_self_test(self) -> str:
        for options in self.patch.every_choice():
            with (
                time_limit(SELF_TEST_SECONDS),
                engine.ENGINE.patched((self.patch.id,), False, {self.patch.id: options}, unknown_body="try") as report,
            ):
                status = report[self.patch.id]
                if status.state is not State.APPLIED:
                    return f"{status.state.value} ({status.reason.value})"
        return ""

    def _by_tests(self) -> str:
        file = patch_tests.file_of(self.patch.id)
        outcomes = patch_tests.outcomes([file], "-x") if file.is_file() else {}
        return next((f"{test} failed" for test, (outcome, _) in outcomes.items() if outcome == "failed"), "")

    def _by_proof(self) -> str:
        with prove.patched(self.patch):
            result = self.proof.train()
        self._gradients = result.gradients
        return "" if Verdict(result.outcome.verdict) is Verdict.FIXED else f"{result.outcome.verdict}"

    def _by_parity(self) -> str:
        if self.fixed is None:
            return ""
        pairs = [(gradient, self.fixed[name]) for name, gradient in self._gradients.items() if name in self.fixed]
        worst = max((float((patched - fixed).abs().max()) for patched, fixed in pairs), default=0.0)
        return "" if worst <= TOLERANCE else f"gradients differ by {worst:.3g}"

    def _by_unaffected(self) -> str:
        import torch

        if self.unaffected is None:
            return ""
        with prove.patched(self.patch):
            after = self.proof.unaffected()
        loss, gradients = self.unaffected
        changed = [name for name in gradients if not torch.equal(gradients[name], after.gradients.get(name))]
        return "" if after.loss == loss and not changed else f"loss {after.loss!r}, gradients {changed[:3]}"


def judged_code(judge: Judge, module: Any, source: str) -> dict[str, Any]:
    exec(compile(source, module.__file__, "exec"), vars(module))
    return answered(judge)


def answered(judge: Judge) -> dict[str, Any]:
    killer, why = judge.killer()
    return {"killer": killer, "why": why}


def judged_breakage(judge: Judge, module: Any, wrappers: Sequence[str], breakage: Breakage) -> dict[str, Any]:
    with breakages.broken(module, list(wrappers), breakage):
        return {**answered(judge), "had effect": breakage.had_effect}


def unpatched_runs(proof: Any, file: str) -> dict[str, Any]:
    import torch

    result = proof.unaffected()
    torch.save((result.loss, result.gradients), file)
    return {}


def probed(judge: Judge, module: Any, wrappers: Sequence[str], task: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer about the patch as it is, and which mutants are none, since they change nothing in any run.

    Among them are those that detach a value which never has a gradient.
    """
    from bench.mutants import detaching

    exec(compile(task["noting gradients"], module.__file__, "exec"), vars(module))
    probe = Breakage("probe", breakages.probe)
    answer = judged_breakage(judge, module, wrappers, probe)
    no_mutants = {name for name in task["code"] if name.endswith(" detached")} - detaching.has_gradient
    return {**answer, "no mutants": sorted(no_mutants | breakages.ineffective(probe))}


def in_fork(work: Callable[[], Any]) -> dict[str, Any]:
    answer = release.alone(work, SECONDS)
    # It did not end, or it took the process with it.
    return {"killer": "time", "why": answer} if isinstance(answer, str) else answer


def main(out: str, task_file: str) -> None:
    import pytest  # noqa: F401  imported before the forks
    import torch

    import tiny  # noqa: F401

    task = json.loads(Path(task_file).read_text(encoding="utf-8"))
    (patch,) = (patch for patch in loading.load() if patch.id == task["patch"])
    release.warm([patch])
    proof, module = prove.proof_of(patch.id), importlib.import_module(modules.module_of(patch.id))
    judge = Judge(patch, proof)
    if task["fixed"]:
        judge.fixed = torch.load(task["fixed"])["red"]
    if hasattr(proof, "unaffected"):
        with tempfile.NamedTemporaryFile(suffix=".pt") as file:
            answer = release.alone(functools.partial(unpatched_runs, proof, file.name), SECONDS)
            if isinstance(answer, str):
                raise RuntimeError(f"unaffected() of {patch.id}: {answer}")
            judge.unaffected = torch.load(file.name)
    wrappers = list(dict.fromkeys(target.wrapper for target in patch.targets))
    unbroken = in_fork(functools.partial(probed, judge, module, wrappers, task))
    answers = {"": unbroken}
    if not unbroken["killer"]:
        reached = functools.partial(covered.reached, module, task["functions"], judge.killer)
        answers[""] = {**unbroken, "reached": release.alone(reached, SECONDS) if task["branches"] else {}}
        answers |= dict(_answers(judge, module, wrappers, task, unbroken["no mutants"]))
    Path(out).write_text(json.dumps(answers), encoding="utf-8")


def _answers(
    judge: Judge, module: Any, wrappers: Sequence[str], task: Mapping[str, Any], no_mutants: Sequence[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    targets = [target.name for target in judge.patch.targets if target.name in task["targets"]]
    work: dict[str, Callable[[Judge], dict[str, Any]]] = {
        name: functools.partial(judged_code, module=module, source=source) for name, source in task["code"].items()
    }
    work |= {
        breakage.name: functools.partial(judged_breakage, module=module, wrappers=wrappers, breakage=breakage)
        for breakage in breakages.breakages(targets)
    }
    for name, judged in work.items():
        if name not in task["killed"] and name not in no_mutants:
            yield name, in_fork(functools.partial(judged, judge))


if __name__ == "__main__":
    main(*sys.argv[1:])
