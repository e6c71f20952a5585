"""Train two optimizer steps of two micro-batches with the real AsyncGRPOTrainer, and with AsyncDistillationTrainer.

The micro-batches have 3 and 15 tokens, then 17 and 4. Losses and gradients are compared with the mean over the tokens
of the step, or with the mean of the means of the micro-batches, both computed in float64 from the samples.

``tiny.async_runs`` has the stand-ins: the queue of the rollout worker has been filled, and nothing asks a vLLM server.
"""

from __future__ import annotations

from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Outcome, Verdict

import tiny
from tiny import async_runs

OVERLAYS = ()
PARITY = False
EQUIVALENT = {
    "applied twice": "the mean of equal counts is the count",
    "count_the_tokens_of_the_step: `counts = [batch[_COUNT][0] for batch in batches if _COUNT in batch]` -> "
    "`counts = [batch[_COUNT][ -1] for batch in batches if _COUNT in batch]`": "the count is the same for each row",
}

ID = "async-grpo-loss-mean-of-micro-batches"
ACCUMULATED = 2


def train() -> tiny.TrainingResult:
    runs = _runs(ACCUMULATED)
    if not runs:
        return tiny.TrainingResult(absent("this release has no such trainer, or transformers is too old for it"))
    outcomes = [_judged(run) for run in runs.values()]
    if {outcome.verdict for outcome in outcomes} != {outcomes[0].verdict}:
        raise AssertionError(f"the trainers differ: {outcomes}")
    return tiny.result_of_runs(runs, outcomes[0])


def unaffected() -> tiny.TrainingResult:
    """Train without accumulation: the mean over a micro-batch is that over the step."""
    runs = _runs(1)
    assert not any(run.acted for run in runs.values()), "the wrapper acts on a single micro-batch"
    return tiny.result_of_runs(runs, absent("nobody accumulates"))


def _runs(accumulated: int) -> dict[str, async_runs.AsyncRun]:
    kinds = [kind for kind in async_runs.KINDS if async_runs.module_of(kind) is not None]
    return {kind: async_runs.train(ID, kind, accumulated=accumulated) for kind in kinds}


def _judged(run: async_runs.AsyncRun) -> Outcome:
    """Judge the loss of each micro-batch, and the gradients of each step by the verdict on its losses."""
    outcomes = []
    for number, step in enumerate(run.steps):
        micro_batches = [run.samples_of(number, part) for part in range(len(step.micro_batches))]
        tokens = sum(map(async_runs.tokens, micro_batches))
        run.model.load_state_dict(step.weights)
        for samples, micro_batch in zip(micro_batches, step.micro_batches, strict=True):
            total = float(run.total(samples).detach())
            wrong = total / async_runs.tokens(samples) / ACCUMULATED
            outcomes.append(judge(micro_batch.loss, right=total / tokens, wrong=wrong))
        is_fixed = outcomes[-1].verdict is Verdict.FIXED
        run.model.zero_grad()
        for samples in micro_batches:
            divisor = tokens if is_fixed else async_runs.tokens(samples) * ACCUMULATED
            (run.factor * run.total(samples) / divisor).backward()
        difference = step.difference(tiny.gradients_of(run.model))
        if difference > 1e-6 or len(step.micro_batches) != ACCUMULATED:
            raise AssertionError(f"{run.kind}, step {number}: the gradients differ by {difference}")
    if len(run.steps) != 2 or len({outcome.verdict for outcome in outcomes}) != 1:
        raise AssertionError(f"{run.kind}: {len(run.steps)} steps, of several kinds: {outcomes}")
    return outcomes[0]
