"""The auxiliary loss of the router is in each loss of DPO that asks for it, and in the log; Liger is warned of."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl.trainer import dpo_trainer

from trl_hotfix.testing import dpo_stub, tiny_causal_lm, tiny_moe_lm, wrapped_like_deepspeed

COEFFICIENT = 0.5
ASKED = {"router_aux_loss_coef": COEFFICIENT, "output_router_logits": True}
LIGERS = torch.tensor(3.0, requires_grad=True)
"""The loss that Liger returns."""


def trainer_of(make: Any = tiny_moe_lm, **settings: Any) -> Any:
    """Return a trainer of a policy and a reference whose config has these settings, as one rank of two."""
    text_config = SimpleNamespace(**{**ASKED, **settings})
    config = SimpleNamespace(get_text_config=lambda: text_config, model_type="tiny")
    trainer = dpo_stub(
        dpo_trainer,
        model=make(config),
        ref_model=make(config),
        loss_types=["sigmoid"],
        loss_weights=[1.0],
        precompute_ref_logps=False,
        state=SimpleNamespace(global_step=0),
        _is_vlm=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
    )
    # The other rank has a value that is larger by 1.
    trainer.accelerator.gather_for_metrics = lambda value: value if value.dim() else torch.stack([value, value + 1])
    return trainer


def batch(rows: int = 1) -> dict[str, Any]:
    """Return pairs, the chosen before the rejected: two tokens of prompt, then the completion."""
    token_ids = torch.tensor([[1, 2, 3, 4, 7], [8, 9, 7, 0, 0], [1, 2, 5, 0, 0], [8, 9, 4, 5, 6]])[:: 2 // rows]
    completion_mask = ((torch.arange(5) >= 2) & (token_ids > 0)).long()
    return {"input_ids": token_ids, "attention_mask": (token_ids > 0).long(), "completion_mask": completion_mask}


def loss_of(trainer: Any, model: Any = None, rows: int = 1) -> Any:
    return trainer._compute_loss(model if model is not None else trainer.model, batch(rows), False)


def gradients(trainer: Any, loss: Any) -> list[Any]:
    return list(torch.autograd.grad(loss, [trainer.model.weight, trainer.model.router], allow_unused=True))


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("wrap", [lambda model: model, wrapped_like_deepspeed], ids=["plain", "DeepSpeed"])
@pytest.mark.parametrize("rows", [1, 2])
def test_the_term_is_added_and_logged(wrap: Any, training: bool, rows: int) -> None:
    trainer, without = trainer_of(), trainer_of(output_router_logits=False)
    trainer.model.train(training)
    loss, plain = loss_of(trainer, wrap(trainer.model), rows), loss_of(without, rows=rows)
    (aux_loss,) = trainer.model.aux_losses
    torch.testing.assert_close(loss, plain + COEFFICIENT * aux_loss)
    mean_of_ranks = pytest.approx(float(aux_loss) + 0.5)
    assert trainer._metrics["train" if training else "eval"]["aux_loss"] == [mean_of_ranks]


def test_the_gradient_is_that_of_both_terms() -> None:
    trainer, without = trainer_of(), trainer_of(output_router_logits=False)
    of_weight, of_router = gradients(trainer, loss_of(trainer, rows=2))
    torch.testing.assert_close(of_weight, gradients(without, loss_of(without, rows=2))[0])
    (aux_loss,) = trainer.model.aux_losses
    # It is the square of the router's only weight times a number.
    torch.testing.assert_close(of_router, 2 * COEFFICIENT * aux_loss.detach() / trainer.model.router.detach())


def test_each_micro_batch_has_the_term() -> None:
    trainer = trainer_of()
    for _ in range(3):
        loss_of(trainer)
    assert len(trainer._metrics["train"]["aux_loss"]) == 3
    assert not trainer.ref_model.aux_losses


def test_the_outputs_are_returned_too() -> None:
    trainer = trainer_of()
    loss, outputs = trainer._compute_loss(trainer.model, batch(), True)
    assert loss.equal(loss_of(trainer))
    assert hasattr(outputs, "logits")


@pytest.mark.parametrize(
    "settings",
    [{"output_router_logits": False}, {"router_aux_loss_coef": 0.0}, {"router_aux_loss_coef": None}],
    ids=str,
)
def test_where_the_config_does_not_ask_nothing_is_added(settings: dict[str, Any]) -> None:
    trainer = trainer_of(**settings)
    assert loss_of(trainer).requires_grad
    assert not trainer.model.aux_losses
    assert "aux_loss" not in trainer._metrics["train"]


@pytest.mark.parametrize("missing", sorted(ASKED))
def test_a_config_without_the_settings_does_not_ask(missing: str) -> None:
    trainer = trainer_of()
    delattr(trainer.model.config.get_text_config(), missing)
    loss_of(trainer)
    assert not trainer.model.aux_losses


def test_a_model_without_such_a_loss_keeps_its_own(switch: Any) -> None:
    trainer = trainer_of(tiny_causal_lm)
    patched = loss_of(trainer)
    assert "aux_loss" not in trainer._metrics["train"]
    assert patched.requires_grad
    with switch.off():
        assert patched.equal(loss_of(trainer))


def with_liger(trainer: Any) -> Any:
    """Give the trainer a loss of Liger's, a constant, and a decoder by each name that releases call it by."""

    def backbone(*args: Any, **kwargs: Any) -> SimpleNamespace:
        return SimpleNamespace(last_hidden_state=torch.zeros(2, 4, 1))

    for model in (trainer.model, trainer.ref_model):
        model.base_model, model.get_decoder = backbone, lambda: backbone
        model.get_output_embeddings = lambda: SimpleNamespace(weight=None, bias=None)
    trainer.liger_loss_fn = lambda *args: (LIGERS, (torch.zeros(()),) * 7)
    return trainer


def test_liger_is_warned_of_once_for_each_trainer(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        trainer = with_liger(trainer_of())
        caplog.clear()
        losses = [trainer._compute_loss_liger(trainer.model, batch(), False) for _ in range(2)]
        assert losses[0] is losses[1] is LIGERS
        assert ["Liger" in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize("settings", [{"output_router_logits": False}, {"router_aux_loss_coef": 0.0}], ids=str)
def test_liger_is_not_warned_of_where_the_config_does_not_ask(
    settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = with_liger(trainer_of(**settings))
    trainer._compute_loss_liger(trainer.model, batch(), False)
    assert not caplog.records
