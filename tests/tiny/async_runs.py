"""AsyncGRPOTrainer and AsyncDistillationTrainer without a server, and what their losses are by the formula.

The trainers are TRL's. Stand-ins are what needs vLLM or a GPU: the rollout worker is a queue that has been filled, the
transfer of the weights does nothing, and the model is a float32 Llama whose FlashAttention is ``tiny.flash``.
"""

from __future__ import annotations

import contextlib
import queue
import tempfile
from dataclasses import dataclass, field
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest import mock

import tiny
from tiny import flash

KINDS = ("AsyncGRPO", "AsyncDistillation")
PROMPT, CANDIDATES = 3, 3
"""The tokens of a prompt, and the candidates that a teacher names for a token."""

LENGTHS = (1, 2, 9, 6, 7, 10, 3, 1)
"""The tokens of the completions, again and again: of two steps of two micro-batches of two, if ``rows`` is 2."""


@dataclass
class AsyncRun:
    """A run: its optimizer steps, the samples in the order of the queue, and how often the patch acted.

    transformers may divide by the micro-batches of a step once more: ``factor`` is what it multiplies a loss by.
    """

    kind: str
    samples: list[Any]
    rows: int
    steps: list[tiny.Step] = field(default_factory=list)
    evaluations: list[Any] = field(default_factory=list)
    """None: these trainers do not evaluate."""

    metrics: list[dict[str, Any]] = field(default_factory=list)
    acted: int | None = None
    factor: float = 1.0
    model: Any = None
    """In float64, for the formula."""

    def samples_of(self, step: int, micro_batch: int) -> list[Any]:
        start = self.rows * (step * len(self.steps[0].micro_batches) + micro_batch)
        return self.samples[start : start + self.rows]

    def total(self, samples: list[Any]) -> Any:
        """Return the sum of the losses of all trained tokens of these samples."""
        return sum(_LOSSES[self.kind](self.model, sample) for sample in samples)


def module_of(kind: str) -> Any:
    """Return the module of a trainer, or None where it does not exist or transformers is too old for it."""
    folder = {"AsyncGRPO": "async_grpo", "AsyncDistillation": "async_distillation"}[kind]
    with contextlib.suppress(ImportError):
        return import_module(f"trl.experimental.{folder}.{folder}_trainer")
    return None


def tokens(samples: list[Any]) -> int:
    """Return how many tokens of these samples are trained on."""
    return sum(int(sample.completion_mask.sum()) for sample in samples)


def train(patch_id: str, kind: str, *, accumulated: int, rows: int = 2, steps: int = 2) -> AsyncRun:
    """Train with the real trainer on the samples of a queue, with ``rows`` of them in a micro-batch."""
    from datasets import Dataset

    module = module_of(kind)
    trainer_class = getattr(module, f"{kind}Trainer")
    # The dataloader fetches ahead.
    run = AsyncRun(kind, [_sample(number) for number in range(4 * len(LENGTHS))], rows)
    buffer: queue.Queue[Any] = queue.Queue()
    for sample in run.samples:
        buffer.put(sample)
    arguments = {
        "args": tiny.config(
            getattr(module, f"{kind}Config"),
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=accumulated,
            max_steps=steps,
            optim="sgd",
            learning_rate=0.5,
            token_budget=0,  # A micro-batch is a number of samples.
        ),
        "train_dataset": Dataset.from_dict({"prompt": ["w1 w2 w3"] * 8}),
        "tokenizer": tiny.tokenizer(),
        "reward_funcs": lambda **_: [0.0],
        "rollout_worker": mock.MagicMock(rollout_buffer=buffer, metrics_queue=queue.Queue()),
        "weight_transfer": mock.MagicMock(),
    }
    taken = tiny.parameters(trainer_class) | {"tokenizer"}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stand_ins:
        model, run.model = (tiny.llama(folder, seed=0) for _ in range(2))
        for name, value in _stand_ins(module, model):
            stand_ins.enter_context(mock.patch(name, value))
        trainer = tiny.trainer(
            tiny.stepwise(trainer_class),
            model=f"{folder}/llama-0",
            **{name: value for name, value in arguments.items() if name in taken},
        )
        factors = _factors(trainer)
        trainer.train()
    run.steps, run.metrics, run.model = trainer.steps, trainer.state.log_history, run.model.double()
    (run.factor,) = factors
    run.acted = tiny.acts(patch_id, f"{module.__name__}:{kind}Trainer.get_batch_samples", trainer)
    return run


def _stand_ins(module: Any, model: Any) -> list[tuple[str, Any]]:
    """Return the names in TRL that give ``model`` and its attention, each with what stands in for it."""
    name = module.__name__
    stand_ins: list[tuple[str, Any]] = []
    if hasattr(module, "TREE_ATTENTION"):
        module.register_tree_attention()
        vars(model.config)["_attn_implementation_internal"] = module.TREE_ATTENTION
        kernels = SimpleNamespace(flash_attn_varlen_func=flash.varlen_attention)
        stand_ins.append((f"{name.rpartition('.')[0]}.packing._flash_attn", lambda: kernels))
    else:
        flash.use(model)
    if hasattr(module, "create_model_from_path"):
        stand_ins.append((f"{name}.create_model_from_path", lambda *_, **__: model))
    else:
        stand_ins.append((f"{name}.AutoModelForCausalLM", SimpleNamespace(from_pretrained=lambda *_, **__: model)))
    if hasattr(module, "get_peak_flops_per_device"):
        stand_ins.append((f"{name}.get_peak_flops_per_device", lambda *_: None))
    return stand_ins


def _factors(trainer: Any) -> set[float]:
    """Return a set, to which each backward adds what the loss has been multiplied by since ``compute_loss``."""
    factors: set[float] = set()
    backward = trainer.accelerator.backward

    def recording(loss: Any, *args: Any, **kwargs: Any) -> Any:
        computed = trainer.steps[-1].micro_batches[-1].loss
        factors.add(round(float(loss.detach()) / computed / trainer.accelerator.gradient_accumulation_steps, 4))
        return backward(loss, *args, **kwargs)

    trainer.accelerator.backward = recording
    return factors


def _sample(number: int) -> Any:
    """Return what a worker puts into the queue, with the fields of all releases."""
    import numpy
    import torch

    generator = torch.Generator().manual_seed(number)
    length = PROMPT + LENGTHS[number % len(LENGTHS)]
    ids = torch.randint(3, 64, (length,), generator=generator)
    mask = torch.arange(length) >= PROMPT
    teacher = torch.log_softmax(torch.randn(length, 64, generator=generator), dim=-1).topk(CANDIDATES)
    return SimpleNamespace(
        prompt=[],
        completion=[],
        input_ids=ids.numpy(),
        completion_mask=mask.long().numpy(),
        # Some ratios are clipped: the logarithm of 64 is 4.16.
        old_log_probs=(-4.16 + 0.3 * torch.randn(length, generator=generator)).float().numpy(),
        advantage=(-1.0) ** number * (1 + number % 3),
        teacher_topk_ids=teacher.indices.numpy(),
        teacher_topk_logprobs=teacher.values.numpy().astype(numpy.float32),
        model_version=0,
        metrics={"reward": 1.0},
        group_id=number // 2,
        prompt_id=number,
        teacher_id="default",
        enqueued_at=None,
    )


def _log_probs(model: Any, sample: Any) -> tuple[Any, Any]:
    """Return the log-probabilities of the model for the trained tokens of a sample, and which these are."""
    import torch

    ids, trained = torch.tensor(sample.input_ids), torch.tensor(sample.completion_mask).bool()
    logits = model(input_ids=ids[None]).logits[0, :-1]
    return torch.log_softmax(logits, dim=-1)[trained[1:]], trained


def _policy_loss(model: Any, sample: Any) -> Any:
    """Return the sum of the clipped losses (arXiv:1707.06347, equation 7) of a sample."""
    import torch

    log_probs, trained = _log_probs(model, sample)
    ids, old = torch.tensor(sample.input_ids)[trained], torch.tensor(sample.old_log_probs).double()[trained]
    ratio = (log_probs.gather(-1, ids[:, None])[:, 0] - old).exp()
    advantage = sample.advantage
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum()


def _divergence(model: Any, sample: Any) -> Any:
    """Return the sum of KL(teacher, student) over a sample's tokens: of the candidates, and of all others as one."""
    import torch

    log_probs, trained = _log_probs(model, sample)
    teacher = torch.tensor(sample.teacher_topk_logprobs).double()[trained]
    student = log_probs.gather(-1, torch.tensor(sample.teacher_topk_ids)[trained])
    teacher, student = (
        torch.cat([part, torch.log1p(-part.exp().sum(-1, keepdim=True))], dim=-1) for part in (teacher, student)
    )
    return (teacher.exp() * (teacher - student)).sum()


_LOSSES = {"AsyncGRPO": _policy_loss, "AsyncDistillation": _divergence}
