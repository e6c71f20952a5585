"""The weight of each pair is 1 at most, whatever the others weigh, and weights up to 1 are TRL's own."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl.trainer import dpo_trainer

from trl_hotfix.testing import dpo_stub, tiny_causal_lm, wrapped_like_deepspeed

import tiny

ID, TARGET = "dpo-wpo-weights-not-clamped", "trl.trainer.dpo_trainer:DPOTrainer._compute_loss"

LIKELY, UNLIKELY, MIXED = ((1, 2, 3, 6), (1, 5, 4, 0)), ((1, 2, 7, 7), (1, 5, 8, 0)), ((1, 2, 3, 6), (1, 5, 8, 0))
"""Pairs of a prompt, and completions of two tokens and of one. Tokens that follow one another are likely, or not."""


def model() -> Any:
    """Return a model that expects 3 after 2, 6 after 3 and 4 after 5, with the sums of TRL's head from 1.15 on."""
    made = tiny_causal_lm(SimpleNamespace(model_type="tiny"))
    with torch.no_grad():
        made.weight.mul_(0.1)[[2, 3, 5], [3, 6, 4]] = 2.0
    forward = made.forward

    def with_squares(input_ids: Any, **kwargs: Any) -> Any:
        outputs = forward(input_ids, **kwargs)
        outputs.log_sum_sq_probs = (2 * outputs.logits[:, :-1].log_softmax(-1)).logsumexp(-1)
        return outputs

    made.forward = with_squares
    return made


def batch(*pairs: Any) -> dict[str, Any]:
    ids = torch.tensor([pair[side] for side in (0, 1) for pair in pairs])
    mask = torch.tensor([[0, 0, 1, int(row[3] > 0)] for row in ids.tolist()])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "completion_mask": mask}


def weights(*pairs: Any) -> list[float]:
    """Return the weights by the formula, without a clamp."""
    inputs = batch(*pairs)
    of_model = model()
    log_probs = of_model.weight.detach().log_softmax(-1)[inputs["input_ids"][:, :-1]]
    tokens = log_probs.gather(2, inputs["input_ids"][:, 1:, None])[..., 0] - (2 * log_probs).logsumexp(-1)
    mask = inputs["completion_mask"][:, 1:]
    chosen, rejected = ((tokens * mask).sum(1) / mask.sum(1)).chunk(2)
    return [float(value) for value in (chosen + rejected).exp()]


def trainer_of(**settings: Any) -> Any:
    defaults = {"loss_types": ["sigmoid"], "loss_weights": [1.0], "use_weighting": True}
    trainer = dpo_stub(
        dpo_trainer,
        precompute_ref_logps=False,
        state=SimpleNamespace(global_step=0),
        _is_vlm=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
        **{"model": model(), "ref_model": tiny_causal_lm(SimpleNamespace(model_type="tiny")), **defaults, **settings},
    )
    trainer.ref_model.requires_grad_(False)
    return trainer


def gradient(trainer: Any, *pairs: Any, wrap: Any = lambda model: model) -> Any:
    loss = trainer._compute_loss(wrap(trainer.model), batch(*pairs), False)
    return torch.autograd.grad(loss, trainer.model.weight)[0]


def by_formula(factors: list[float], pairs: tuple[Any, ...], **settings: Any) -> Any:
    """Return the mean over the pairs of the gradient without weights, each times its factor."""
    alone = [gradient(trainer_of(use_weighting=False, **settings), pair) for pair in pairs]
    return torch.stack([factor * each for factor, each in zip(factors, alone, strict=True)]).mean(0)


def close(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)


def test_the_pairs_have_weights_on_both_sides_of_1() -> None:
    likely, unlikely, mixed = weights(LIKELY, UNLIKELY, MIXED)
    assert likely > 2
    assert unlikely < 0.5
    assert 0.1 < mixed < 1


@pytest.mark.parametrize(
    "pairs",
    [(LIKELY,), (LIKELY, LIKELY), (LIKELY, UNLIKELY), (UNLIKELY, LIKELY), (MIXED, LIKELY, UNLIKELY)],
)
@pytest.mark.parametrize("wrap", [lambda model: model, wrapped_like_deepspeed], ids=["plain", "DeepSpeed"])
def test_each_pair_weighs_1_at_most(pairs: tuple[Any, ...], wrap: Any) -> None:
    trainer = trainer_of()
    close(gradient(trainer, *pairs, wrap=wrap), by_formula([min(each, 1.0) for each in weights(*pairs)], pairs))
    assert tiny.acts(ID, TARGET, trainer) == 1


def test_without_the_patch_they_weigh_more(switch: Any) -> None:
    with switch.off():
        close(gradient(trainer_of(), LIKELY, UNLIKELY), by_formula(weights(LIKELY, UNLIKELY), (LIKELY, UNLIKELY)))


def test_the_weights_are_those_of_an_evaluation_too() -> None:
    losses = []
    for use_weighting in (True, False):
        trainer = trainer_of(use_weighting=use_weighting)
        trainer.model.eval()
        with torch.no_grad():
            losses.append(trainer._compute_loss(trainer.model, batch(LIKELY), False))
    close(*losses)


@pytest.mark.parametrize("losses", [["discopop"], ["ipo", "sigmoid"], ["apo_zero"], ["ipo"]])
def test_other_losses_are_clamped(losses: list[str]) -> None:
    settings: Any = {"loss_types": losses, "loss_weights": [0.5] * len(losses)}
    close(gradient(trainer_of(**settings), LIKELY), by_formula([1.0], (LIKELY,), **settings))


def test_other_divergences_have_their_exponentials() -> None:
    pairs = (LIKELY, UNLIKELY)
    settings = {"f_divergence_type": "forward_kl"}
    close(
        gradient(trainer_of(**settings), *pairs),
        by_formula([min(each, 1) for each in weights(*pairs)], pairs, **settings),
    )


@pytest.mark.parametrize("pairs", [(UNLIKELY,), (MIXED, UNLIKELY), (UNLIKELY, UNLIKELY, MIXED)])
def test_weights_up_to_1_are_trls(switch: Any, pairs: tuple[Any, ...]) -> None:
    trainer = trainer_of()
    patched = gradient(trainer, *pairs)
    assert tiny.acts(ID, TARGET, trainer) == 0
    with switch.off():
        assert patched.equal(gradient(trainer_of(), *pairs))


def test_without_weights_the_loss_is_trls(switch: Any) -> None:
    trainer, seen = trainer_of(use_weighting=False), list[Any]()
    trainer.model.register_forward_hook(lambda *args: seen.append(dpo_trainer.torch))
    patched = gradient(trainer, LIKELY)
    assert [each is torch for each in seen] == [True]
    assert tiny.acts(ID, TARGET, trainer) == 0
    with switch.off():
        assert patched.equal(gradient(trainer_of(use_weighting=False), LIKELY))


def test_the_module_has_torch_again_also_after_an_error() -> None:
    trainer = trainer_of()
    gradient(trainer, LIKELY)
    assert dpo_trainer.torch is torch
    trainer.loss_types = ["none"]
    with pytest.raises(ValueError, match="Unknown loss type"):
        gradient(trainer, LIKELY)
    assert dpo_trainer.torch is torch
