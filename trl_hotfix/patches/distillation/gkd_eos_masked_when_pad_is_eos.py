"""GKD masks what is generated where it is the padding token, and so the ends of all completions if that is the end too.

``generate_on_policy_outputs`` compares all tokens of a generation, those of the prompts as well, with the padding
token. TRL 1.9.0 (pull request 6357) masks a completion after its first end, and a prompt as it was masked when it was
generated from. Both tensors are changed in place: they are new, and what another patch has noted of them is theirs.

Up to 1.6 the labels of the prompts stay as they are: the loss leaves the prompts out.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, agreed, judge, wrapper
from ...model import Outcome, Verdict
from ...testing import absent_if_reexported, compare_gradients, distillation_stub, divergence


@wrapper
def keep_the_first_end(call: Call) -> Any:
    """Unmask the end of each completion, and the tokens of the prompts."""
    import torch

    generated = call()
    tokens, attention_mask, labels = generated
    inputs = call["inputs"]
    length = inputs["prompts"].shape[1]
    completions, ends = tokens[:, length:], call["generation_config"].eos_token_id
    if ends is None:
        # In 0.11 the trainer leaves it to the model to know its ends.
        model_config = getattr(call["model"], "generation_config", None)
        ends = getattr(model_config, "eos_token_id", None)
    expected = attention_mask.clone()
    if inputs.get("prompt_attention_mask") is not None:
        expected[:, :length] = inputs["prompt_attention_mask"]
    is_end = torch.zeros_like(completions)
    if ends is not None:
        is_end = torch.isin(completions, torch.as_tensor(ends, device=tokens.device)).long()
    expected[:, length:] = is_end.cumsum(1) == is_end
    if not torch.equal(expected, attention_mask):
        call.act()
        attention_mask.copy_(expected)
        labels[:, length:] = completions.where(expected[:, length:].bool(), -100)
    return generated


def ends_are_labels(module: ModuleType) -> Outcome:
    """Compare masks, losses and gradients of generated micro-batches with the formula.

    Where the padding is another token, or nothing ends a completion, they are right already.
    """
    generate = getattr(getattr(module, "GKDTrainer", None), "generate_on_policy_outputs", None)
    if generate is None:
        return absent("this release has no GKD")
    if reexported := absent_if_reexported(module, generate):
        return reexported
    outcomes = [_Case(module, training=training).judged(rows) for rows in _COMPLETIONS for training in (True, False)]
    outcomes.append(_Case(module).judged(_OTHER_END, ends=[0, 9]))
    if "pad_token_id" in signature(generate).parameters:
        # Later releases have a collator of their own only if it has this mask.
        outcomes.append(_Case(module).judged(_COMPLETIONS[0], with_prompt_mask=False))
        outcomes.append(_Case(module).judged(_COMPLETIONS[0], ends_of_model=0))
    one = _Case(module)
    outcomes += [one.judged(rows) for rows in _COMPLETIONS]
    for rows, settings in ((_PADDED, {"pad": 10}), (_ENDLESS, {"pad": 10, "ends": None})):
        one.judged(rows, prompts=_OTHER_PROMPTS, **settings)
    return agreed(outcomes)


_PROMPTS = ((0, 1, 2, 0, 3), (4, 0, 5, 6, 7))
_PROMPT_MASK = ((0, 1, 1, 1, 1), (1, 1, 1, 1, 1))
"""Prompts in which a turn ends. The first is padded."""

_OTHER_PROMPTS = ((10, 1, 2, 0, 3), (4, 0, 5, 6, 7))

_COMPLETIONS = (
    ((5, 6, 0, 0, 0), (7, 0, 0, 0, 0)),
    ((1, 2, 3, 4, 0), (9, 8, 3, 0, 0)),
    ((5, 1, 2, 3, 4), (0, 0, 0, 0, 0)),
)
"""Of each micro-batch. 0 is the end and the padding; one completion has no end, and one nothing else."""

_OTHER_END = ((5, 9, 0, 0, 0), (8, 0, 0, 0, 0))
_PADDED = ((5, 6, 0, 10, 10), (7, 0, 10, 10, 10))
_ENDLESS = ((5, 6, 0, 1, 2), (7, 0, 1, 2, 3))


class _Case:
    def __init__(self, module: ModuleType, *, training: bool = True) -> None:
        # That of 0.11 mixes the log-probs.
        self.trainer = distillation_stub(module.GKDTrainer, module.GKDConfig, generalized_jsd_loss=_mean_divergence)
        self.trainer.model.train(training)

    def judged(
        self,
        rows: Sequence[Sequence[int]],
        *,
        prompts: Sequence[Sequence[int]] = _PROMPTS,
        ends: int | list[int] | None = 0,
        ends_of_model: int | None = None,
        pad: int = 0,
        with_prompt_mask: bool = True,
    ) -> Outcome:
        """Generate these completions, and judge their loss by the divergence over their tokens, up to the first end."""
        import torch

        inputs = {"prompts": torch.tensor(prompts), "prompt_attention_mask": torch.tensor(_PROMPT_MASK)}
        if not with_prompt_mask:
            del inputs["prompt_attention_mask"]
        tokens = torch.cat([inputs["prompts"], torch.tensor(rows)], dim=1)
        writer = SimpleNamespace(generate=lambda **kwargs: SimpleNamespace(sequences=tokens.clone()))
        if ends_of_model is not None:
            writer.generation_config = SimpleNamespace(eos_token_id=ends_of_model)
        generate = self.trainer.generate_on_policy_outputs
        padding = (pad,) if "pad_token_id" in signature(generate).parameters else ()
        given = ends if ends_of_model is None else None
        ids, mask, labels = generate(writer, inputs, SimpleNamespace(eos_token_id=given), *padding)
        batch = {"input_ids": ids, "attention_mask": mask, "labels": labels, "prompts": inputs["prompts"]}
        loss = self.trainer.compute_loss(self.trainer.model, batch)

        known = [ends] if isinstance(ends, int) else ends or []
        lengths = [next((place + 1 for place, token in enumerate(row) if token in known), len(row)) for row in rows]
        kept = torch.tensor([[place < length for place in range(5)] for length in lengths])
        of_prompts = inputs.get("prompt_attention_mask", inputs["prompts"] != pad)
        masks = {"right": torch.cat([of_prompts, kept], dim=1).bool(), "wrong": tokens != pad}
        # The first token of a completion is the sixth.
        of_tokens = divergence(self.trainer, tokens)[:, 4:]
        totals = {name: of_tokens[of_kind[:, 5:]].mean() for name, of_kind in masks.items()}
        outcome = judge(float(loss.detach()), **{name: float(total.detach()) for name, total in totals.items()})
        kind = "right" if outcome.verdict is Verdict.FIXED else "wrong"
        compare_gradients(self.trainer, loss, totals[kind])
        expected_labels = tokens.where(masks[kind], -100)[:, 5:]
        if not (torch.equal(mask, masks[kind].long()) and torch.equal(labels[:, 5:], expected_labels)):
            raise AssertionError(f"mask and labels are not {kind}: {mask}, {labels}, expected {masks[kind]}")
        if not torch.equal(ids, tokens):
            raise AssertionError(f"the tokens are {ids}, and not {tokens}")
        return outcome


def _mean_divergence(student_logits: Any, teacher_logits: Any, labels: Any, beta: float = 0.5, **unused: Any) -> Any:
    """Return the mean over the labels of beta times KL(teacher, mixture) + (1 - beta) times KL(student, mixture).

    Equation 1 of arXiv:2306.13649, for a beta of 0.5.
    """
    probs = [logits.softmax(-1) for logits in (student_logits, teacher_logits)]
    mixture = sum(probs) / 2
    divergence = sum(0.5 * (of * (of / mixture).log()).sum(-1) for of in probs)
    return divergence[labels != -100].mean()
