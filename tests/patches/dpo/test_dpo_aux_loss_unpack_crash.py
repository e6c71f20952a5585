"""A mixture of experts trains and evaluates with its auxiliary loss, and its reference is computed without one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl.trainer import dpo_trainer
from trl.trainer.dpo_trainer import DPOTrainer

from trl_hotfix.testing import dpo_stub, pair_batch, pair_micro_batches, tiny_moe_lm, wrapped_like_deepspeed

COEFFICIENT = 0.5
MICRO_BATCHES = tuple(pair_micro_batches())

each_mode = pytest.mark.parametrize("mode", ["train", "eval"])


def plain(model: Any) -> Any:
    return model


def stub(**attributes: Any) -> Any:
    """Return a trainer of a mixture of experts, whose reference has another router and other logits."""
    config = SimpleNamespace(router_aux_loss_coef=COEFFICIENT, output_router_logits=True, model_type="tiny")
    reference = tiny_moe_lm(config, router=3.0)
    with torch.no_grad():
        reference.weight.mul_(0.5)
    defaults = {"model": tiny_moe_lm(config), "ref_model": reference, "aux_loss_enabled": True}
    return dpo_stub(dpo_trainer, **{**defaults, "state": SimpleNamespace(global_step=0), **attributes})


def metrics_of(trainer: Any, pairs: Any, mode: str = "train", model: Any = None) -> tuple[Any, dict[str, Any]]:
    model, batch = model if model is not None else trainer.model, pair_batch(dpo_trainer, pairs)
    result: tuple[Any, dict[str, Any]] = trainer.get_batch_loss_metrics(model, batch=batch, train_eval=mode)
    return result


def reference_of(trainer: Any, pairs: Any) -> Any:
    return torch.cat(trainer.compute_reference_log_probs(pair_batch(dpo_trainer, pairs)))


def gradient(value: Any, parameter: Any) -> Any:
    return torch.autograd.grad(value, parameter, retain_graph=True)[0]


@each_mode
@pytest.mark.parametrize("wrap", [plain, wrapped_like_deepspeed], ids=["plain", "DeepSpeed"])
def test_each_micro_batch_has_the_loss_with_the_term_of_the_policy(wrap: Any, mode: str) -> None:
    trainer, without = stub(), stub(aux_loss_enabled=False)
    trainer.model.train(mode == "train")
    for micro_batch in MICRO_BATCHES:
        trainer.state.global_step = micro_batch.step
        trainer.model.aux_losses.clear()
        loss, _ = metrics_of(trainer, micro_batch.pairs, mode, wrap(trainer.model))
        of_pairs, _ = metrics_of(without, micro_batch.pairs, mode)
        (aux_loss,) = trainer.model.aux_losses
        torch.testing.assert_close(loss, of_pairs + COEFFICIENT * aux_loss)
        torch.testing.assert_close(gradient(loss, trainer.model.weight), gradient(of_pairs, without.model.weight))
        router = trainer.model.router
        torch.testing.assert_close(gradient(loss, router), COEFFICIENT * gradient(aux_loss, router))


@each_mode
@pytest.mark.parametrize("of_policy", [False, True], ids=["ref_model", "no ref_model"])
def test_the_reference_is_as_without_the_term(of_policy: bool, mode: str) -> None:
    attributes = {"ref_model": None} if of_policy else {}
    trainer, without = stub(**attributes), stub(**attributes, aux_loss_enabled=False)
    trainer.model.train(mode == "train")
    for micro_batch in MICRO_BATCHES:
        trainer.state.global_step = micro_batch.step
        assert torch.equal(reference_of(trainer, micro_batch.pairs), reference_of(without, micro_batch.pairs))


@each_mode
def test_the_loss_of_a_policy_that_is_its_own_reference_is_computed(mode: str) -> None:
    trainer, without = stub(ref_model=None), stub(ref_model=None, aux_loss_enabled=False)
    pairs = MICRO_BATCHES[0].pairs
    loss, _ = metrics_of(trainer, pairs, mode)
    torch.testing.assert_close(loss, metrics_of(without, pairs, mode)[0] + COEFFICIENT * trainer.model.aux_losses[0])


@each_mode
def test_the_metrics_are_as_without_the_term(mode: str) -> None:
    pairs = MICRO_BATCHES[0].pairs
    torch.testing.assert_close(
        metrics_of(stub(), pairs, mode)[1], metrics_of(stub(aux_loss_enabled=False), pairs, mode)[1]
    )


def test_each_trainer_is_repaired() -> None:
    pairs = MICRO_BATCHES[0].pairs
    losses = [float(metrics_of(trainer, pairs)[0].detach()) for trainer in (stub(), stub(), stub())]
    assert losses == [losses[0]] * 3


@each_mode
@pytest.mark.parametrize("compute", [metrics_of, reference_of])
@pytest.mark.parametrize("attributes", [{}, {"ref_model": None}], ids=["ref_model", "no ref_model"])
def test_trl_unpacks_six_values_into_five_names(
    compute: Any, attributes: dict[str, Any], mode: str, switch: Any
) -> None:
    trainer = stub(**attributes)
    trainer.model.train(mode == "train")
    for micro_batch in MICRO_BATCHES:
        with switch.off(), pytest.raises(ValueError, match="too many values to unpack"):
            compute(trainer, micro_batch.pairs)


@pytest.mark.parametrize("compute", [metrics_of, reference_of])
def test_a_call_leaves_nothing_on_the_trainer_also_after_an_error(compute: Any) -> None:
    trainer = stub()
    compute(trainer, MICRO_BATCHES[0].pairs)
    assert "concatenated_forward" not in vars(trainer)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("out of memory")

    trainer.ref_model.forward = fail
    with pytest.raises(RuntimeError, match="out of memory"):
        compute(trainer, MICRO_BATCHES[0].pairs)
    assert "concatenated_forward" not in vars(trainer)


@pytest.mark.parametrize("compute", [metrics_of, reference_of])
def test_without_the_term_trls_forward_is_its_own(compute: Any) -> None:
    trainer = stub(aux_loss_enabled=False)
    seen = []

    def forward(*args: Any, **kwargs: Any) -> Any:
        seen.append("concatenated_forward" in vars(trainer))
        return DPOTrainer.concatenated_forward(trainer, *args, **kwargs)

    type(trainer).concatenated_forward = staticmethod(forward)
    compute(trainer, MICRO_BATCHES[0].pairs)
    assert seen
    assert not any(seen)


def test_a_model_that_has_the_coefficient_keeps_its_config() -> None:
    trainer = stub()
    other = SimpleNamespace(router_aux_loss_coef=2.0, output_router_logits=True)
    policy = tiny_moe_lm(other)
    pairs = MICRO_BATCHES[0].pairs
    loss, _ = metrics_of(trainer, pairs, model=policy)
    without, _ = metrics_of(stub(aux_loss_enabled=False), pairs)
    torch.testing.assert_close(loss, without + 2.0 * policy.aux_losses[0])


def test_the_plain_model_is_the_one_beneath_the_trainers() -> None:
    trainer = stub()
    engine = wrapped_like_deepspeed(trainer.model)
    trainer.model = engine
    trainer.accelerator.unwrap_model = lambda model: model.module
    pairs = MICRO_BATCHES[0].pairs
    loss, _ = metrics_of(trainer, pairs, model=engine)
    without, _ = metrics_of(stub(aux_loss_enabled=False), pairs)
    torch.testing.assert_close(loss, without + COEFFICIENT * engine.module.aux_losses[0])
