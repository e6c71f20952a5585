"""Run inside one release: the proofs of several patches, each in a fork of a process that has imported TRL.

    python -m bench.proving.prove_several OUT.json SECONDS ID=GRADIENTS...

To import TRL takes about as long as to train for a proof.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from trl_hotfix.catalogue import loading

import tiny  # noqa: F401  imported before the forks
from bench.proving import prove, release


def main(out: str, seconds: str, *gradients_by_id: str) -> None:
    gradients = dict(text.split("=", 1) for text in gradients_by_id)
    patches = [patch for patch in loading.load() if patch.id in gradients]
    release.warm(patches)
    answers = {
        patch.id: release.in_a_fork(lambda patch: prove.answer(patch.id, gradients[patch.id]), patch, float(seconds))
        for patch in patches
    }
    Path(out).write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
