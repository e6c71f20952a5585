"""Measure what the whole catalogue adds to the CPU time of importing TRL's trainers."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import applying
import measure
from measure import Finding, Result

RELEASES = ("0.16.1", "0.19.1", "1.16.0")
TRAINERS = ("SFTTrainer", "DPOTrainer", "GRPOTrainer")
IMPORTS = (*((name,) for name in TRAINERS), TRAINERS)
GOAL = 1.05


def sample(release: str, names: Sequence[str], *, patched: bool) -> measure.Sample:
    """Return the times of a process that imports these trainers, after ``apply()`` or without it."""
    script = f"from trl import {', '.join(names)}\n"
    if patched:
        applied = "any(status.state.value == 'applied' for status in trl_hotfix.status())"
        script = f"import trl_hotfix\ntrl_hotfix.apply()\n{script}assert {applied}\n"
    place = measure.place(release)
    path = f"{place.overlay}:{applying.installed_package()}"
    return measure.process([place.python, "-c", script], measure.release_environment(release, PYTHONPATH=path))


def run(*, quick: bool) -> Result:
    result = Result(versions={"trl": ", ".join(RELEASES)})
    for release in RELEASES:
        for names in IMPORTS:
            case = f"TRL {release}, from trl import {', '.join(names)}"
            variants = {
                "with": functools.partial(sample, release, names, patched=True),
                "without": functools.partial(sample, release, names, patched=False),
            }
            rounds = measure.run_rounds(variants, 2 if quick else 9)
            result.samples[case] = measure.as_plain_data(rounds)
            ratio = measure.ratio(rounds, "with", "without", "cpu_ms")
            result.findings.append(Finding(f"{case}: CPU time with the patches / without", ratio, goal=GOAL))
    return result
