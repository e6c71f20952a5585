"""GKD begins its loss at the column where the longest prompt of the batch would end, and cuts other completions there.

The data collator pads on the left: all rows end at the same column, and a completion begins where its own length has
it. ``compute_loss`` slices logits and labels by the width of ``inputs["prompts"]``. That is right for completions that
were generated behind these prompts, and for rows of the dataset only if the longest prompt belongs to the longest
sequence and no completion is longer than its own. The labels of these rows are masked up to the completion, so the
wrapper has the slice begin at the first column, as TRL 1.7.0 does (pull request 6006).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

from ...authoring import absent, argument, judge, replaced_argument
from ...model import Outcome, Verdict
from ...testing import StopConstruction, absent_if_reexported, compare_gradients, distillation_stub, divergence


def begin_at_the_first_column(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Give ``compute_loss`` prompts of one column, if a row begins before its prompt does in ``inputs["prompts"]``.

    What is generated begins with these prompts.
    """
    inputs = argument(wrapped, args, kwargs, "inputs")
    prompts, prompt_mask = inputs["prompts"], inputs.get("prompt_attention_mask")
    # Liger's loss goes by the labels alone.
    if getattr(instance, "use_liger_gkd_loss", False) or prompt_mask is None:
        return wrapped(*args, **kwargs)
    if not (inputs["attention_mask"][:, : prompts.shape[1]] > prompt_mask).any():
        return wrapped(*args, **kwargs)
    args, kwargs = replaced_argument(wrapped, args, kwargs, "inputs", {**inputs, "prompts": prompts[:, :1]})
    return wrapped(*args, **kwargs)


Row = tuple[list[int], list[int]]
"""The token ids of a prompt and of its completion."""

_ROWS: Sequence[Row] = (
    ([1, 2, 3, 4], [5, 6]),
    ([7], [8, 9, 1, 2, 3, 10]),
    ([2, 5], [4, 4, 6]),
    ([3, 1, 9], [7, 2, 8, 5]),
    ([6], [1, 10, 3]),
)


def loss_is_over_whole_completions(module: ModuleType) -> Outcome:
    """Compare losses and gradients of two steps of two micro-batches and of an evaluation, then of other batches.

    Those have completions that begin behind the longest prompt, or were generated, or are for Liger's loss.
    """
    if reexported := absent_if_reexported(module, module.GKDTrainer.compute_loss):
        return reexported
    if "prompts" not in inspect.unwrap(module.GKDTrainer.compute_loss).__code__.co_consts:
        return absent("the loss goes by the labels")
    case = _Case(module)
    outcomes = []
    for number, rows in enumerate((_ROWS[:2], _ROWS[:3], _ROWS[1:4], _ROWS[::2])):
        case.trainer.state.global_step = number // 2
        outcomes.append(case.judged(case.batch(rows)))
    # Of the longer one the first token is cut.
    outcomes.append(_Case(module).judged(case.batch([([7], [8, 9, 1, 2]), ([1, 2], [4, 4])])))
    case.trainer.model.eval()
    outcomes.append(case.judged(case.batch(_ROWS)))
    if len({outcome.verdict for outcome in outcomes}) != 1:
        raise AssertionError(f"the batches do not agree: {outcomes}")
    case.trainer.model.train()
    case.not_affected(case.batch([([1, 2], [3, 4]), ([5], [6])]))
    case.not_affected(case.batch(_ROWS[:1]))
    generated = case.generated(_ROWS)
    case.not_affected(generated)
    # As later releases, and gkd-eos-masked-when-pad-is-eos, have it.
    generated["attention_mask"][:, : generated["prompts"].shape[1]] = generated["prompt_attention_mask"]
    case.not_affected(generated)
    without_mask = case.batch(_ROWS)
    del without_mask["prompt_attention_mask"]
    case.not_affected(without_mask)
    if "use_liger_gkd_loss" in inspect.unwrap(module.GKDTrainer.compute_loss).__code__.co_names:
        case.liger_is_given_the_batch()
    return outcomes[0]


class _Case:
    def __init__(self, module: ModuleType) -> None:
        self.trainer = distillation_stub(module.GKDTrainer, module.GKDConfig)
        loss_of = inspect.unwrap(module.GKDTrainer.generalized_jsd_loss)
        self.mixes_log_probs = "logsumexp" not in loss_of.__code__.co_names

    def batch(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Return what the data collator makes of these rows, padded on the left with 0."""
        return {
            "input_ids": _left_padded([prompt + completion for prompt, completion in rows]),
            "attention_mask": _left_padded([[1] * len(prompt + completion) for prompt, completion in rows]),
            "labels": _left_padded([[-100] * len(prompt) + completion for prompt, completion in rows], -100),
            "prompts": _left_padded([prompt for prompt, _ in rows]),
            "prompt_attention_mask": _left_padded([[1] * len(prompt) for prompt, _ in rows]),
        }

    def generated(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Return what GKD makes of these prompts if the completions are generated: padded on both sides.

        The token 2 is the padding too. The mask hides it within the prompts, up to 1.8.
        """
        import torch

        prompts = _left_padded([prompt for prompt, _ in rows])
        completions = _left_padded([completion[::-1] for _, completion in rows]).flip(1)
        token_ids = torch.cat([prompts, completions], 1)
        is_token = (token_ids != 0) & (token_ids != 2)
        return {
            "input_ids": token_ids,
            "attention_mask": is_token.long(),
            "labels": token_ids.masked_fill(~is_token, -100),
            "prompts": prompts,
            "prompt_attention_mask": (prompts != 0).long(),
        }

    def judged(self, batch: dict[str, Any]) -> Outcome:
        """Judge loss and gradient by the divergence over all labels, and over those behind the longest prompt."""
        import torch

        width = batch["prompts"].shape[1]
        columns = torch.arange(batch["labels"].shape[1])
        expected = {"right": self._divergence(batch, columns >= 1), "wrong": self._divergence(batch, columns >= width)}
        loss, outputs = self._loss(batch)
        outcome = judge(float(loss.detach()), **{name: float(value.detach()) for name, value in expected.items()})
        of_formula = expected["right" if outcome.verdict is Verdict.FIXED else "wrong"]
        compare_gradients(self.trainer, loss, of_formula)
        if outputs.logits.shape[:2] != batch["input_ids"].shape:
            raise AssertionError(f"the outputs are not those of the batch: {outputs.logits.shape}")
        return outcome

    def not_affected(self, batch: dict[str, Any]) -> None:
        """Raise if the loss is not that of the labels behind the longest prompt."""
        import torch

        loss, _ = self._loss(batch)
        expected = self._divergence(batch, torch.arange(batch["labels"].shape[1]) >= batch["prompts"].shape[1])
        if not torch.allclose(loss, expected, rtol=1e-5, atol=1e-7):
            raise AssertionError(f"the loss is {loss}, expected {expected}")
        compare_gradients(self.trainer, loss, expected)

    def liger_is_given_the_batch(self) -> None:
        """Raise if the batch is another one on its way to a loss that goes by the labels."""

        class Batch(dict[str, Any]):
            is_read = False

            def __getitem__(self, name: str) -> Any:
                self.is_read |= name == "input_ids"
                return super().__getitem__(name)

        def end(*args: Any, **kwargs: Any) -> None:
            # From 1.4.0 on the forward is given the whole batch.
            raise StopConstruction(*(inputs["input_ids"] for inputs in args[-1:]))

        batch = Batch(self.batch(_ROWS))
        forwards = {"use_liger_gkd_loss": True, "_forward_redirection": end, "_liger_student_forward": None}
        vars(self.trainer).update(forwards)
        self.trainer.model.get_decoder = lambda: end
        with suppress(StopConstruction):
            self.trainer.compute_loss(self.trainer.model, batch)
        if not batch.is_read:
            raise AssertionError("Liger's loss is given another batch")

    def _loss(self, batch: dict[str, Any]) -> tuple[Any, Any]:
        given = {name: value.clone() for name, value in batch.items()}
        loss, outputs = self.trainer.compute_loss(self.trainer.model, given, return_outputs=True)
        if any(not given[name].equal(value) for name, value in batch.items()):
            raise AssertionError("the batch was changed")
        return loss, outputs

    def _divergence(self, batch: dict[str, Any], columns: Any) -> Any:
        """Return the mean of the divergence over the labels in these columns."""
        of_tokens = divergence(self.trainer, batch["input_ids"], mixes_log_probs=self.mixes_log_probs)
        counted = ((batch["labels"] != -100) & columns)[:, 1:]
        return (of_tokens * counted).sum() / counted.sum()


def _left_padded(rows: Sequence[Sequence[int]], filler: int = 0) -> Any:
    import torch

    longest = max(map(len, rows))
    return torch.tensor([[filler] * (longest - len(row)) + list(row) for row in rows])
