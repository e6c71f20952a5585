"""A wrapped mixture of experts trains with its auxiliary loss, and what has it already stays as it is."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trl_hotfix.catalogue import loading
from trl_hotfix.matching import gates
from trl_hotfix.testing import dpo_stub, tiny_moe_lm, wrapped_like_deepspeed

import tiny

ID = "moe-aux-loss-lost-under-deepspeed"
COEFFICIENT = 0.5

(PATCH,) = (patch for patch in loading.load() if patch.id == ID)
TARGETS = {target.attribute.partition("Trainer")[0]: target for target in gates.targets_here(PATCH)}


@pytest.fixture(params=list(TARGETS))
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Run:
    """A trainer of a mixture of experts, whose reference has another router."""

    def __init__(self, method: str, *, coefficient: float | None = COEFFICIENT, **attributes: Any) -> None:
        self.method, self.target = method, TARGETS[method]
        settings = {} if coefficient is None else {"router_aux_loss_coef": coefficient}
        config = SimpleNamespace(output_router_logits=True, model_type="tiny", **settings)
        self.model = tiny_moe_lm(config)
        self.trainer = dpo_stub(
            import_module(self.target.module),
            method,
            **{
                "model": self.model,
                "ref_model": tiny_moe_lm(config, router=3.0),
                "aux_loss_enabled": True,
                "calculate_KL": True,
                "embedding_func": None,
                "embedding_tokenizer": None,
                "running": SimpleNamespace(mean=torch.tensor(0.0), update=lambda rewards: None),
                "state": SimpleNamespace(global_step=0),
                **attributes,
            },
        )

    def metrics(self, model: Any, number: int = 0, *, mode: str = "train") -> tuple[Any, dict[str, Any]]:
        self.model.aux_losses.clear()
        mode_if_asked = {} if self.method in ("KTO", "BCO") else {"train_eval": mode}
        result: tuple[Any, dict[str, Any]] = self.trainer.get_batch_loss_metrics(
            model, batch=batch(number), **mode_if_asked
        )
        return result

    def loss(self, model: Any, number: int = 0, *, mode: str = "train") -> Any:
        return self.metrics(model, number, mode=mode)[0]

    @property
    def aux_loss(self) -> Any:
        # KTO's forward for its divergence has no gradient.
        (aux_loss,) = (value for value in self.model.aux_losses if value.requires_grad)
        return aux_loss

    @property
    def acts(self) -> int | None:
        return tiny.acts(ID, self.target.name, self.trainer)


def batch(number: int) -> dict[str, Any]:
    """Return two or three rows. The completions have two or three of the four tokens, by their labels.

    DPO, CPO and ORPO compare two completions; KTO and BCO label single ones; KTO adds unrelated ones for its KL.
    """
    rows = 2 + number % 2
    tokens = 1 + (torch.arange(4 * rows).reshape(rows, 4) * 7 + 3 * number) % 10
    sides = {"prompt": tokens[:, :2], "chosen": tokens, "rejected": tokens.flip(1)}
    sides |= {"completion": tokens, "KL_completion": tokens.flip(0)}
    result: dict[str, Any] = {"label": [True, False, True][:rows]}
    for side, ids in sides.items():
        first = 1 + torch.arange(rows) % 2
        result[f"{side}_input_ids"] = ids
        result[f"{side}_attention_mask"] = torch.ones_like(ids)
        result[f"{side}_labels"] = ids.masked_fill(torch.arange(ids.shape[1]) < first[:, None], -100)
    return result


def wrapped_like_ddp(model: Any) -> Any:
    """Return the model without a ``config``."""
    wrapped = wrapped_like_deepspeed(model)
    del wrapped.config
    return wrapped


def plain(model: Any) -> Any:
    return model


def gradient(value: Any, parameter: Any) -> Any:
    return torch.autograd.grad(value, parameter, retain_graph=True)[0]


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("wrap", [wrapped_like_deepspeed, wrapped_like_ddp, plain], ids=["DeepSpeed", "DDP", "plain"])
def test_each_micro_batch_has_the_term(method: str, wrap: Any, mode: str) -> None:
    run, without = Run(method), Run(method, aux_loss_enabled=False)
    run.model.train(mode == "train")
    wrapped = wrap(run.model)
    for number in range(4):
        run.trainer.state.global_step = number // 2
        loss, of_pairs = run.loss(wrapped, number, mode=mode), without.loss(without.model, number, mode=mode)
        torch.testing.assert_close(loss, of_pairs + COEFFICIENT * run.aux_loss)
        torch.testing.assert_close(gradient(loss, run.model.weight), gradient(of_pairs, without.model.weight))
        router = run.model.router
        torch.testing.assert_close(gradient(loss, router), COEFFICIENT * gradient(run.aux_loss, router))
    assert run.acts == (0 if wrap is plain else 4)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_the_metrics_are_those_of_the_plain_model(method: str, mode: str) -> None:
    run, expected = Run(method), Run(method)
    torch.testing.assert_close(
        run.metrics(wrapped_like_deepspeed(run.model), mode=mode)[1], expected.metrics(expected.model, mode=mode)[1]
    )


def test_each_trainer_has_the_coefficient_of_its_own_model(method: str) -> None:
    for coefficient in (0.5, 0.25, 0.5, 0.0):
        run, without = Run(method, coefficient=coefficient), Run(method, aux_loss_enabled=False)
        loss = run.loss(wrapped_like_deepspeed(run.model))
        torch.testing.assert_close(loss, without.loss(without.model) + coefficient * run.aux_loss)


def test_the_coefficient_is_that_of_the_model_that_accelerate_unwraps(method: str) -> None:
    run = Run(method)
    run.trainer.model = wrapped_like_deepspeed(run.model)
    run.trainer.accelerator.unwrap_model = lambda model: model.module
    loss = run.loss(run.trainer.model)
    assert float(gradient(loss, run.model.router)) == pytest.approx(
        COEFFICIENT * float(gradient(run.aux_loss, run.model.router))
    )


def test_a_config_without_a_coefficient_adds_nothing(method: str) -> None:
    run, without = Run(method, coefficient=None), Run(method, aux_loss_enabled=False)
    torch.testing.assert_close(run.loss(wrapped_like_ddp(run.model)), without.loss(without.model))


def test_a_coefficient_on_the_wrapped_model_stays(method: str) -> None:
    run, without = Run(method), Run(method, aux_loss_enabled=False)
    wrapped = wrapped_like_deepspeed(run.model)
    wrapped.config = SimpleNamespace(router_aux_loss_coef=0.125)
    torch.testing.assert_close(run.loss(wrapped), without.loss(without.model) + 0.125 * run.aux_loss)
    assert run.acts == 0


@pytest.mark.parametrize("wrap", [wrapped_like_deepspeed, wrapped_like_ddp], ids=["DeepSpeed", "DDP"])
def test_a_model_without_the_term_is_left_alone(method: str, wrap: Any) -> None:
    run, seen = Run(method, aux_loss_enabled=False), []
    wrapped = wrap(run.model)
    wrapped.register_forward_hook(lambda model, args, outputs: seen.append(model))
    run.trainer.accelerator.unwrap_model = None
    assert torch.isfinite(run.loss(wrapped))
    assert run.acts == 0
    assert seen[0] is wrapped


def test_the_wrapped_model_is_called_and_keeps_its_config(method: str) -> None:
    run, seen = Run(method), []
    wrapped = wrapped_like_deepspeed(run.model)
    config = wrapped.config
    wrapped.register_forward_hook(lambda model, args, outputs: seen.append(model))
    run.loss(wrapped)
    assert seen[0] is wrapped
    assert wrapped.config is config


def test_trl_multiplies_the_term_by_0(method: str, switch: Any) -> None:
    with switch.off():
        run, without = Run(method), Run(method, aux_loss_enabled=False)
        torch.testing.assert_close(run.loss(wrapped_like_deepspeed(run.model)), without.loss(without.model))
        with pytest.raises(AttributeError, match="config"):
            run.loss(wrapped_like_ddp(run.model))
