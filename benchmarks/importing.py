"""Measure what the whole catalogue adds to the CPU time of importing TRL's trainers."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from benchmarks import applying, measure
from benchmarks.measure import Finding, Result

RELEASES = ("0.16.1", "0.19.1", "1.16.0")
TRAINERS = ("SFTTrainer", "DPOTrainer", "GRPOTrainer")
IMPORTS = (*((name,) for name in TRAINERS), TRAINERS)
GOAL = 1.05


def sample(release: str, names: Sequence[str], *, patched: bool) -> measure.Sample:
    """Return the CPU time in which a process has imported these trainers, after ``apply()`` or without it, in ms."""
    before, after = "", ""
    if patched:
        before = "import trl_hotfix; trl_hotfix.apply()"
        # Not in the measured time: to ask for the states is no part of a start.
        after = "assert any(status.state.value == 'applied' for status in trl_hotfix.status())"
    script = f"""
import time
{before}
from trl import {", ".join(names)}
import_ms = time.process_time() * 1e3
{after}
print(f'{{{{"import_ms": {{import_ms}}}}}}')
"""
    return applying.run_beside(release, applying.installed_package(), "-c", script)


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
            ratio = measure.ratio(rounds, "with", "without", "import_ms")
            result.findings.append(Finding(f"{case}: CPU time with the patches / without", ratio, goal=GOAL))
    return result
