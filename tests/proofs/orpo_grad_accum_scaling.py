"""Train two optimizer steps of two micro-batches with the real ORPOTrainer, and evaluate.

The accumulated gradient of a step is compared with the mean of the gradients of its micro-batches' losses, and with
their sum.
"""

from __future__ import annotations

import tiny
from tiny import accumulation

ID = "orpo-grad-accum-scaling"
OVERLAYS = ()
PARITY = True
EQUIVALENT = {"applied twice": "the second wrapper finds that transformers divides"}


def train() -> tiny.TrainingResult:
    return accumulation.accumulated_steps(["ORPO"])


def unaffected() -> tiny.TrainingResult:
    return accumulation.unaffected_steps(ID, ["ORPO"])
