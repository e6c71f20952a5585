"""GOLD divides its loss by tokens that it does not train on, and by those that it trains on several times.

Since TRL 1.7.0 (pull request 6006) ``compute_loss`` divides the sum of the divergences over the tokens by
``num_items_in_batch``. ``Trainer`` counts these items over the labels of ``gradient_accumulation_steps`` batches of the
dataloader. In GOLD every one of these batches is the whole data of the optimizer step: ``RepeatSampler`` repeats it,
``_fill_buffer`` splits the first one into micro-batches and puts completions of the student into some of them. So the
count is that of the dataset's labels, as often as there are micro-batches. The factor of ``Trainer.compute_loss`` for
several ranks is missing, as in GKD.

``DistillationTrainer``, which has the same buffer, counts the tokens of the buffer on all ranks, and divides by
the number of ranks (pull request 6478). The wrapper does the same: the buffer of a step is full before its first loss.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import absent, argument, judge, replaced_argument, shadowed
from ...model import Outcome, Verdict
from ...testing import compare_gradients, distillation_stub, divergence, single_process


def divide_by_the_tokens_of_the_step(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Give ``compute_loss`` the tokens of all micro-batches of the step, as a mean over the ranks."""
    counted = argument(wrapped, args, kwargs, "num_items_in_batch")
    # The loss across tokenizers takes no count.
    if counted is None or instance.use_uld_loss:
        return wrapped(*args, **kwargs)
    micro_batches = instance._buffered_inputs if instance.model.training else None
    if micro_batches is None:
        return wrapped(*args, **kwargs)
    tokens, ranks = sum((part["labels"][:, 1:] != -100).sum() for part in micro_batches), 1
    if instance.args.average_tokens_across_devices:
        tokens, ranks = instance.accelerator.gather(tokens).sum(), instance.accelerator.num_processes
    tokens = tokens.clamp(min=1) / ranks
    if (tokens == counted).all():
        return wrapped(*args, **kwargs)
    args, kwargs = replaced_argument(wrapped, args, kwargs, "num_items_in_batch", tokens)
    return wrapped(*args, **kwargs)


def loss_is_divided_by_the_tokens_of_the_step(module: ModuleType) -> Outcome:
    """Compare losses and gradients of whole steps with the formula: of the dataset, generated, mixed, on four ranks.

    The real buffer is filled. Other calls are an evaluation, steps whose count is right, and losses without a count.
    """
    import torch

    if "num_items_in_batch" not in signature(module.GOLDTrainer.generalized_jsd_loss).parameters:
        return absent("the loss is a mean over the micro-batch")
    outcomes = []
    case = _Case(module)
    for generated in ([], [1, 2], [0, 1, 2]):
        outcomes += case.judged_step(generated)
    for settings in ({"ranks": 4}, {"ranks": 4, "average_tokens_across_devices": False}):
        other = _Case(module, **settings)
        outcomes += other.judged_step([]) + other.judged_step([2])
    part = case.trainer._buffered_inputs[0]
    case.judged(part, None, right=7)
    case.judged(part, torch.tensor(24), right=24)
    case.trainer.model.eval()
    case.judged(part, torch.tensor(5), right=5)
    case.trainer.model.train()
    # No micro-batch has a token, or a single one: without any the loss is 0, and not 0 / 0.
    empty, one = ({**part, "labels": torch.full_like(part["labels"], -100)} for _ in range(2))
    one["labels"][1, 1] = 3
    case.trainer._buffered_inputs = [empty] * 3
    case.judged(empty, torch.tensor(4), right=1, wrong=4)
    case.trainer._buffered_inputs = [empty, one, empty]
    outcomes.append(case.judged(one, torch.tensor(4), right=1, wrong=4))
    # A subclass may have no buffer.
    case.trainer._buffered_inputs = None
    case.judged(part, torch.tensor(5), right=5)
    _check_across_tokenizers(case, module)
    if len({outcome.verdict for outcome in outcomes}) != 1:
        raise AssertionError(f"the micro-batches do not agree: {outcomes}")
    return outcomes[0]


def _check_across_tokenizers(case: _Case, module: ModuleType) -> None:
    """Check that the loss across tokenizers, which takes no count, is what it was, and that nothing is gathered."""
    import torch

    part = _micro_batch(4)
    case.trainer._buffered_inputs, gathered = [part], case.gathered

    def uld_loss(student_logits: Any, **kwargs: Any) -> Any:
        return student_logits.sum()

    uld_loss.use_extended_uld = False  # type: ignore[attr-defined]
    across = {"use_uld_loss": True, "teacher_tokenizer": SimpleNamespace(pad_token_id=None), "uld_loss_fn": uld_loss}
    vars(case.trainer).update(across, _teacher_processor=None)
    teacher_inputs = part["input_ids"], part["labels"], part["attention_mask"], None
    with shadowed(module, "build_teacher_inputs_from_texts", lambda *args, **kwargs: teacher_inputs):
        texts = {"original_prompt_text": [""] * 2, "original_completion_text": [""] * 2}
        loss = case.trainer.compute_loss(case.trainer.model, {**part, **texts}, num_items_in_batch=torch.tensor(5))
    if case.gathered != gathered or not torch.equal(loss, case.trainer.model.weight[part["input_ids"]].sum()):
        raise AssertionError(f"the loss across tokenizers is {loss}, and {case.gathered - gathered} were gathered")


class _Case:
    """A trainer whose step has three micro-batches."""

    def __init__(self, module: ModuleType, *, ranks: int = 1, **settings: Any) -> None:
        import torch

        self.module, self.ranks = module, ranks
        self.trainer = distillation_stub(
            module.GOLDTrainer,
            module.GOLDConfig,
            {"gradient_accumulation_steps": 3, "report_to": [], **settings},
            temperature=1.0,
            teacher_tokenizer=None,
            processing_class=SimpleNamespace(pad_token_id=None),
            pad_token_id=None,
            _vlm_collator=None,
            _buffered_inputs=None,
            _step=0,
        )
        self.gathered = 0

        def gather(count: Any) -> Any:
            self.gathered += 1
            # The other ranks have 2, 4 and 6 tokens more.
            return torch.stack([count + 2 * rank for rank in range(ranks)])

        self.trainer.accelerator.num_processes, self.trainer.accelerator.gather = ranks, gather

    def judged_step(self, generated: list[int]) -> list[Outcome]:
        """Judge a step whose data have 2, 3 and 4 tokens, and those micro-batches that are generated 7, 8 and 9."""
        import torch

        tokens = [number + (7 if number in generated else 2) for number in range(3)]
        ranks = range(self.ranks if self.trainer.args.average_tokens_across_devices else 1)
        right = sum(sum(tokens) + 2 * rank for rank in ranks) / len(ranks)
        # Trainer counts the data of all ranks, once for each micro-batch.
        counted = 3 * sum(9 + 2 * rank for rank in ranks)
        window = {name: torch.cat([_micro_batch(2 + number)[name] for number in range(3)]) for name in _micro_batch(2)}

        def generate(slices: Any, indices: Any) -> None:
            for number, part in enumerate(slices):
                self.trainer._buffered_inputs[number] = _micro_batch(tokens[number]) if number in generated else part

        self.trainer._generate_on_policy_for_slices = generate
        self.trainer.lmbda = 1.0 if generated else 0.0
        outcomes = []
        for number in range(3):
            with single_process(self.module):
                part = self.trainer._prepare_inputs(window)
            if int((part["labels"][:, 1:] != -100).sum()) != tokens[number]:
                raise AssertionError(f"micro-batch {number} has the labels {part['labels']}")
            outcomes.append(self.judged(part, torch.tensor(counted), right=right, wrong=counted))
        return outcomes

    def judged(self, part: dict[str, Any], count: Any, *, right: float, wrong: float = -1.0) -> Outcome:
        """Judge the loss and its gradient by the divergence over a number of tokens, the right one or the wrong one."""
        # Trainer passes the count by name.
        loss = self.trainer.compute_loss(self.trainer.model, dict(part), num_items_in_batch=count)
        total = (divergence(self.trainer, part["input_ids"]) * (part["labels"][:, 1:] != -100)).sum()
        by = {"right": float(total.detach()) / right, "wrong": float(total.detach()) / wrong}
        outcome = judge(float(loss.detach()), **by, divided_by=right)
        compare_gradients(self.trainer, loss, total / (right if outcome.verdict is Verdict.FIXED else wrong))
        return outcome


def _micro_batch(tokens: int) -> dict[str, Any]:
    """Return two rows: one ends with a token less than ``tokens``, one has no prompt. Its first token is no target."""
    import torch

    ids = (torch.arange(22).reshape(2, 11) * 3 + tokens) % 11
    labels = torch.full_like(ids, -100)
    labels[0, 12 - tokens :], labels[1, :2] = ids[0, 12 - tokens :], ids[1, :2]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
