"""The scan says nothing false of a corpus of training scripts: each is run, and its trainers record their arguments."""

from __future__ import annotations

import pytest

from helpers import corpus

RUNS = corpus.runs()
OF_OTHERS = {
    f"{name}.py"
    for name in ("construction/ourtrainers", "values/shared_changes", "values/shared_patches", "values/shared_settings")
}
"""What other scripts import."""

MOST_UNTOLD = 0.0218
"""At most this share of the answers is "cannot tell" where the run decides. Lower it when the scan gets better."""


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_what_the_scan_says_is_so_when_the_script_runs(run: corpus.Run) -> None:
    assert corpus.compare(run).false == []


def test_the_scan_can_tell_what_it_could_tell_before() -> None:
    verdicts = [corpus.compare(run) for run in RUNS]
    untold, decided = sum(one.cannot_tell for one in verdicts), sum(one.decided for one in verdicts)
    assert decided > 25_000
    assert untold <= MOST_UNTOLD * decided, f"{untold} of {decided}"


def test_about_half_of_the_scripts_hit_a_bug() -> None:
    scripts = {run.file for run in RUNS}
    hits = [corpus.compare(run).hits for run in RUNS]
    assert len(scripts) >= 80
    assert 0.4 < sum(hits) / len(hits) < 0.6


def test_each_script_makes_a_trainer() -> None:
    without = {run.file for run in RUNS if corpus.compare(run).trainers == 0}
    assert without == {"construction/no_trainer.py", *OF_OTHERS}
