"""``trl-hotfix verify``: the self-tests and trainings without a patch, with it and without it again."""

from __future__ import annotations

import json

import pytest

from helpers.command_line import ID, run


def test_verify_shows_red_green_red_with_the_numbers() -> None:
    process = run("--verify", ID)
    assert process.returncode == 0, process.stderr
    for expected in ("proven", "red", "reproduced", "green", "fixed", "red again", "measured=6"):
        assert expected in process.stdout
    (cell,) = json.loads(run("verify", "--json", ID).stdout)["cells"]
    assert cell["verdict"] == "proven"
    assert [run_record["verdict"] for run_record in cell["leaves"]["trl.trainer.dpo_trainer"].values()] == [
        *("reproduced", "fixed", "reproduced"),
    ]


@pytest.mark.matrix
def test_verify_full_trains_red_green_red() -> None:
    process = run("verify", "--full", "--json", "dpo-eval-reference-from-trained-policy", ID)
    assert process.returncode == 0, process.stderr
    proofs = {proof["patch"]: proof for proof in json.loads(process.stdout)["proofs"]}
    trained = proofs["dpo-eval-reference-from-trained-policy"]
    assert trained["verdict"] == "proven"
    verdicts = {name: run_record["verdict"] for name, run_record in trained["runs"].items()}
    assert verdicts == {"red": "reproduced", "green": "fixed", "red again": "reproduced", "unaffected": "absent"}
    assert trained["runs"]["red"]["loss"] != trained["runs"]["green"]["loss"]
    # A missing requirement of a proof is reported, and is no failure.
    assert (proofs[ID]["verdict"], proofs[ID]["why"]) == ("not-run", "it needs scikit-learn")
