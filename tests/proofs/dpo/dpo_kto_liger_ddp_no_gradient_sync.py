"""Train two steps of two micro-batches, and evaluate, with DistributedDataParallel and the Liger loss of DPO and KTO.

There is one process, so losses and gradients are right with the bug, too: they are compared with the formula (DPO) and
with a run on one device (KTO). What is judged is how many gradients are handed over to be averaged, which a hook of
DistributedDataParallel tells. Liger is an optional package that the stacks lack. What it computes replaces it.
"""

from __future__ import annotations

import functools
import inspect
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trl_hotfix.authoring import absent, judge

import tiny
from tiny import dpo_steps, liger
from tiny.grpo_steps import several_runs

ID = "dpo-kto-liger-ddp-no-gradient-sync"

OVERLAYS = ()
PARITY = True
VARIANTS = {
    "compiled": "the proof wraps the model itself, in the place of accelerate, which would compile it",
    "lora": "up to 0.28 TRL's Liger loss asks the model for its decoder: a TypeError with an adapter, patched or not",
}


class Ranks:
    """Wraps models in DistributedDataParallel, and keeps what is handed over: a tensor for each bucket."""

    def __init__(self, *, find_unused: bool) -> None:
        self.find_unused = find_unused
        self.buckets: list[Any] = []

    def wrap(self, model: Any, **kwargs: Any) -> Any:
        import torch

        if not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        model = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=self.find_unused)
        # It refuses a hook with these annotations as text.
        model.register_comm_hook(None, lambda state, bucket: self.hand_over(bucket))
        return model

    def hand_over(self, bucket: Any) -> Any:
        import torch

        self.buckets.append(bucket.buffer().clone())
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def norm_of_last(self, elements: int) -> float:
        """Return the norm of what was handed over last, which is this many numbers."""
        import torch

        last = torch.cat(self.buckets)[-elements:]
        return float(last.norm())


@contextmanager
def process_group() -> Iterator[None]:
    import torch

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def prepare(trainer: Any, ranks: Ranks | None, *, with_liger: bool = True) -> None:
    """Have the trainer take the Liger loss, and its model wrapped. Releases differ in the names."""
    if with_liger and hasattr(trainer, "concatenated_forward"):
        trainer.args.use_liger_loss = trainer.args.use_liger_kernel = True
        trainer.dpo_loss_fn = functools.partial(liger.dpo_loss, trainer.args.beta)
    elif with_liger:
        from trl.models.utils import _ForwardRedirection

        loss = liger.kto_loss if hasattr(trainer, "calculate_KL") else liger.dpo_loss
        trainer.use_liger_kernel = True
        trainer.liger_loss = functools.partial(loss, trainer.args.beta)
        trainer._forward_redirection = _ForwardRedirection()
    if ranks is not None:
        trainer.accelerator.prepare_model = ranks.wrap


def dpo(ranks: Ranks | None, *, with_liger: bool = True) -> tiny.FormulaSteps:
    settings = {"prepare": lambda trainer: prepare(trainer, ranks, with_liger=with_liger)}
    return dpo_steps.dpo_steps(dpo_steps.reference_or_policy, reference=1, **settings)


def kto(ranks: Ranks | None) -> Any:
    """Return a trainer that has trained two steps of two micro-batches, with the Liger loss, and evaluated."""
    from trl import KTOConfig, KTOTrainer

    settings = {"max_steps": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "max_length": 32}
    with tempfile.TemporaryDirectory() as folder:
        trainer = tiny.trainer(
            tiny.stepwise(KTOTrainer),
            model=tiny.llama(folder, seed=0),
            ref_model=tiny.llama(folder, seed=1),
            args=tiny.config(KTOConfig, optim="sgd", **{**settings, "learning_rate": 0.5}),
            train_dataset=tiny.labelled(),
            eval_dataset=tiny.labelled().select(range(4)),
            tokenizer=tiny.tokenizer(),
        )
        prepare(trainer, ranks)
        trainer.train()
        trainer.evaluate()
    return trainer


def handed_over(gradients: dict[str, Any], ranks: Ranks) -> float:
    """Return how often all gradients were handed over to be averaged. The last ones are those of the last step."""
    elements = sum(gradient.numel() for gradient in gradients.values())
    if ranks.buckets:
        norm = sum(float(gradient.norm()) ** 2 for gradient in gradients.values()) ** 0.5
        of_last = ranks.norm_of_last(elements)
        if abs(of_last - norm) > 1e-5 * norm:
            raise AssertionError(f"the norm of the gradients is {norm}, of what is handed over {of_last}")
    return sum(bucket.numel() for bucket in ranks.buckets) / elements


def is_synchronized_by_compute_loss(trainer_class: Any) -> bool:
    """Return whether the trainer takes the wrapper off in ``compute_loss``: from 1.9.0 to the release that fixes it."""
    return "unwrap_model" in inspect.unwrap(trainer_class.compute_loss).__code__.co_names


def train() -> tiny.TrainingResult:
    from trl import DPOTrainer, KTOTrainer

    is_new = is_synchronized_by_compute_loss(DPOTrainer)
    if not is_new and not {"_compute_loss_liger", "concatenated_forward"} <= vars(DPOTrainer).keys():
        return tiny.TrainingResult(absent("there is no Liger loss, or it asks the wrapper for what the model has"))
    counts = []
    with process_group():
        for find_unused in (True, False):
            ranks = Ranks(find_unused=find_unused)
            run = dpo(ranks)
            dpo_steps.assert_right(run)
            counts.append(handed_over(run.gradients[-1], ranks))
        if is_synchronized_by_compute_loss(KTOTrainer):
            ranks, alone = Ranks(find_unused=True), kto(None)
            trainer = kto(ranks)
            for step, expected in zip(trainer.steps, alone.steps, strict=True):
                assert step.difference(expected.gradients) < 1e-6
            assert abs(trainer.evaluations[0].loss - alone.evaluations[0].loss) < 1e-6
            counts.append(handed_over(trainer.steps[-1].gradients, ranks))
    outcomes = [judge(count, right=4.0, wrong=0.0) for count in counts]
    if len({outcome.verdict for outcome in outcomes}) != 1:
        raise AssertionError(f"the runs are not of one kind: {outcomes}")
    result = run.first_step
    result.outcome = outcomes[0]
    return result


def unaffected() -> tiny.TrainingResult:
    """Train with Liger on one device, and without Liger on several."""
    with process_group():
        runs = {"one device": dpo(None), "without Liger": dpo(Ranks(find_unused=True), with_liger=False)}
    return several_runs(runs, absent("the forward of the wrapper runs, or there is none"))
