"""The texts that ``new`` writes: the entry, the module, the tests and the proof of a new patch, and the next steps."""

from __future__ import annotations

ENTRY = """\
- id: {id}
  revision: 1
  {title}
  severity: {severity}
  harm: objective
  retrain: Yes, or no, and what decides it, for a model that was trained with the bug.
  trl: "{trl}"
  upstream: {upstream}
{review}  why: >-
    Whom it hits, with which settings; what goes wrong, and by how much; what the user sees, or that nothing is logged.
  how: >-
    What is changed in which call, and what stays as it is for whom the bug does not hit.
  targets:
{targets}
  self_test: bug_is_gone
  hits:
    - trainers: [{trainers}]
      symptom: what the user sees, in half a sentence
"""

MODULE = '''"""{title}.

The cause in TRL's code, and the change that TRL has made ({upstream}).

The change that this patch makes; the runs that the bug does not hit, and the part of it that is not repaired.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...authoring import Call, wrapper
from ...model import Outcome


@wrapper
def {wrapper}(call: Call) -> Any:
    """Call TRL with the same arguments. Nothing is repaired yet."""
    return call()


def bug_is_gone(module: ModuleType) -> Outcome:
    """Compare the result of {attribute} in ``module`` with the number by the formula."""
    raise NotImplementedError("write the self-test first: measure, and return judge(measured, right=..., wrong=...)")
'''

TESTS = '''"""What the patch changes in each way that TRL calls it, and what it leaves alone: a test a behaviour."""

from __future__ import annotations


def test_the_loss_is_right_in_training_and_in_evaluation() -> None:
    """The patch is on during each test. ``switch.off()`` of the fixture ``switch`` takes it off for a block."""
    raise NotImplementedError("write the tests: each branch, micro-batch, mode and option, and what stays as it is")
'''

PROOF = '''"""The proof: one step of the real trainer with a tiny model.

The expected number, and how it is computed without TRL's code.
"""

from __future__ import annotations

import tiny

OVERLAYS = ()
PARITY = False


def train() -> tiny.TrainingResult:
    """Train with the bug: ``tiny.TrainingResult(judge(loss, right=..., wrong=...), loss, gradients)``.

    ``tiny.llama(folder, seed=0)`` is a model. ``tiny.measured(TrainerClass)`` records the losses and the batches of a
    trainer, and the gradients of its first step. ``tiny.trainer(...)`` and ``tiny.config(...)`` make the trainer and
    its config with the names of arguments that each release has.
    """
    raise NotImplementedError("write the proof first: train with the real trainer, and judge its loss")


def unaffected() -> tiny.TrainingResult:
    """Train through the patched method without the bug. With and without the patch the result is bitwise equal."""
    raise NotImplementedError("write the proof first: a run that the bug does not hit")
'''

NEXT = """
Next, in this order:
  1. Write the self-test in {module}: one measurement, in at most 50 lines, until
         trl-hotfix verify {id}
     says `unrepaired`: red is `reproduced`, and with the patch it still is. Now it says `error`.
  2. Write the wrapper, until it says `proven`: reproduced, fixed, reproduced.
  3. Write the tests in {tests}, until `make patches PATCHES={id}` passes.
  4. Write the proof in {proof}, until
         python -m bench run --releases {release} --patches {id} --no-write
     says `proven` for the cell and the proof.
  5. Write title, why, how, severity, harm, retrain and upstream in patches.yaml, and the module's docstring; and under
     hits the arguments that the bug needs, so that
         trl-hotfix scan
     of a training script says it for whom it hits, and not for others. Under called: the moment of a run at which TRL
     calls the target; tests/bench/test_called.py compares it with runs of real trainers.
  6. Set trl: there to the releases that have the bug (now "{trl}"), until
         make evidence PATCHES={id}
     has no `uncovered` (too narrow), no `not-reproduced` (too wide), and no proof that fails. It also puts the bodies
     of the method on record: before, the patch is `skipped` (`unknown-body`) for everybody.
  7. Say under not_repaired what is left out, and run `make test`.
docs/add-a-patch.md goes through one, step by step.
"""
