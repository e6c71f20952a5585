"""The Liger loss runs within the forward of DistributedDataParallel, once, and any other call stays as it is."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from trl_hotfix.catalogue import loading
from trl_hotfix.matching import gates
from trl_hotfix.testing import default_arguments, dpo_stub, stub_trainer, tiny_causal_lm

import tiny

ID = "dpo-kto-liger-ddp-no-gradient-sync"
TARGETS = {
    target.attribute.partition("Trainer")[0]: target
    for target in gates.targets_here(next(patch for patch in loading.load() if patch.id == ID))
}
MICRO_BATCHES = (torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]), torch.tensor([[2, 4, 6]]), torch.tensor([[9, 1], [3, 3]]))


class Rank(DistributedDataParallel):
    """One of two ranks, without a process group; the other one has no gradient.

    It has this in common with the real one: gradients are averaged if its forward has run, and only then.
    """

    def __init__(self, model: Any) -> None:
        torch.nn.Module.__init__(self)
        self.module, self.given = model, []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.given.append((args, kwargs))
        if torch.is_grad_enabled():
            self.module.weight.register_hook(lambda gradient: gradient / 2)
        return self.module(*args, **kwargs)


class Compiled:
    """A compiled model as torch has it."""

    def __init__(self, model: Any) -> None:
        self._orig_mod = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._orig_mod(*args, **kwargs)


def unwrapped(model: Any) -> Any:
    model = getattr(model, "_orig_mod", model)
    return getattr(model, "module", model)


class Run:
    """A trainer with a Liger loss that calls the model as well, and the method that the patch is on."""

    def __init__(self, method: str) -> None:
        self.target = TARGETS[method]
        self.is_new = self.target.attribute.endswith(".compute_loss")
        self.model = tiny_causal_lm()
        module = importlib.import_module(self.target.module)
        self.trainer = self._new(module, method) if self.is_new else self._old(module)
        self.trainer.accelerator.unwrap_model = unwrapped

    def _new(self, module: Any, method: str) -> Any:
        def loss(model: Any, inputs: Any, return_outputs: bool) -> Any:
            value = model(inputs["input_ids"]).logits.square().mean()
            return (value, {"a": 1}) if return_outputs else value

        arguments = default_arguments(getattr(module, f"{method}Config"))
        losses = {"_compute_loss_liger": loss, "_compute_loss": loss}
        trainer_class, attributes = getattr(module, f"{method}Trainer"), {"use_liger_kernel": True}
        trainer = stub_trainer(
            trainer_class, arguments, model=self.model, is_fsdp_enabled=False, **losses, **attributes
        )
        trainer.accelerator.state = SimpleNamespace(deepspeed_plugin=None)
        return trainer

    def _old(self, module: Any) -> Any:
        def fused(weight: Any, hidden: Any, labels: Any, **kwargs: Any) -> Any:
            # Then come log-probs and mean logits of chosen and rejected, the loss of rpo_alpha and both rewards.
            return ((hidden @ weight.t()).square().sum(-1) * (labels != -100)).mean(), (0.0,) * 7

        model = self.model
        model.get_decoder = lambda: lambda ids, **kwargs: SimpleNamespace(last_hidden_state=model(ids).logits)
        model.get_output_embeddings = lambda: SimpleNamespace(weight=model.weight)
        settings: dict[str, Any] = {"reference_free": True, "padding_free": False, "label_pad_token_id": -100}
        settings["dpo_loss_fn"] = fused
        return dpo_stub(module, model=model, max_length=None, use_logits_to_keep=False, **settings)

    def inputs(self, token_ids: Any) -> dict[str, Any]:
        if self.is_new:
            return {"input_ids": token_ids}
        parts = {"prompt": token_ids[:, :1], "chosen": token_ids, "rejected": token_ids.flip(1)}
        batch = {f"{name}_input_ids": part for name, part in parts.items()}
        return batch | {f"{name}_attention_mask": (part > 0).long() for name, part in parts.items()}

    def loss(self, model: Any, token_ids: Any) -> Any:
        if self.is_new:
            return self.trainer.compute_loss(model, self.inputs(token_ids))
        return self.trainer._compute_loss_liger(model, self.inputs(token_ids))["loss"]

    def step(self, model: Any, token_ids: Any) -> tuple[float, Any]:
        """Return the loss of a micro-batch, and its gradient."""
        self.model.weight.grad = None
        loss = self.loss(model, token_ids)
        loss.backward()
        return float(loss.detach()), self.model.weight.grad.clone()

    def acts(self) -> int | None:
        return tiny.acts(ID, f"{self.target.module}:{self.target.attribute}", self.trainer)


@pytest.fixture(params=TARGETS)
def make(request: pytest.FixtureRequest) -> Callable[[], Run]:
    return lambda: Run(request.param)


def alone(make: Callable[[], Run], token_ids: Any) -> tuple[float, Any]:
    """Return the loss and the gradient of a run on one device."""
    run = make()
    return run.step(run.model, token_ids)


@pytest.mark.parametrize("wrap", [Rank, lambda model: Compiled(Rank(model))], ids=["plain", "compiled"])
def test_the_gradient_of_each_micro_batch_is_averaged_over_the_ranks(make: Any, wrap: Any) -> None:
    for token_ids in MICRO_BATCHES:
        run, (loss, gradient) = make(), alone(make, token_ids)
        found = run.step(wrap(run.model), token_ids)
        assert found[0] == loss
        torch.testing.assert_close(found[1], gradient / 2)


def test_trl_does_not_average_it(make: Any, switch: Any) -> None:
    with switch.off():
        run, (loss, gradient) = make(), alone(make, MICRO_BATCHES[0])
        found = run.step(Rank(run.model), MICRO_BATCHES[0])
    assert found[0] == loss
    assert found[1].equal(gradient)


def test_one_trainer_is_averaged_in_each_micro_batch(make: Any) -> None:
    run = make()
    rank = Rank(run.model)
    for number, token_ids in enumerate(MICRO_BATCHES, 1):
        run.loss(rank, token_ids)
        assert len(rank.given) == number
    assert run.acts() == len(MICRO_BATCHES)


def test_the_forward_of_the_rank_is_given_what_the_method_is(make: Any) -> None:
    run = make()
    rank = Rank(run.model)
    inputs = run.inputs(MICRO_BATCHES[0])
    name = "inputs" if run.is_new else "batch"
    getattr(run.trainer, run.target.attribute.partition(".")[2])(rank, **{name: inputs})
    ((args, kwargs),) = rank.given
    assert args == (rank,)
    assert list(kwargs) == [name]
    assert kwargs[name] is inputs


def test_the_method_has_the_inputs_that_the_rank_hands_on(make: Any) -> None:
    class MovesInputs(Rank):
        """Hands on inputs that it has moved to its device."""

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(args[0], run.inputs(MICRO_BATCHES[1]), *args[2:], **kwargs)

    run = make()
    found = run.step(MovesInputs(run.model), MICRO_BATCHES[0])
    assert found[0] == alone(make, MICRO_BATCHES[1])[0]


def test_an_evaluation_has_the_same_loss(make: Any) -> None:
    run = make()
    rank = Rank(run.model)
    run.model.eval()
    with torch.no_grad():
        loss = run.loss(rank, MICRO_BATCHES[0])
    assert float(loss) == alone(make, MICRO_BATCHES[0])[0]
    assert len(rank.given) == 1


def test_the_outputs_are_returned_too(make: Any) -> None:
    run = make()
    if not run.is_new:
        result = run.trainer._compute_loss_liger(Rank(run.model), run.inputs(MICRO_BATCHES[0]))
        expected = run.trainer._compute_loss_liger(run.model, run.inputs(MICRO_BATCHES[0]))
        assert result.keys() == expected.keys()
        assert len(result) > 1
        return
    loss, outputs = run.trainer.compute_loss(Rank(run.model), run.inputs(MICRO_BATCHES[0]), return_outputs=True)
    assert float(loss.detach()) == alone(make, MICRO_BATCHES[0])[0]
    assert outputs == {"a": 1}


def test_the_model_has_its_own_forward_afterwards(make: Any) -> None:
    run = make()
    run.loss(Rank(run.model), MICRO_BATCHES[0])
    assert "forward" not in vars(run.model)


def test_the_model_has_its_own_forward_after_an_error(make: Any, switch: Any) -> None:
    with switch.on():
        run = make()
        with pytest.raises(IndexError):
            run.loss(Rank(run.model), torch.full((2, 3), 99))
    assert "forward" not in vars(run.model)


def test_the_model_has_its_own_forward_if_the_rank_fails_before_it(make: Any, switch: Any) -> None:
    class Failing(Rank):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("a rank is gone")

    with switch.on():
        run = make()
        with pytest.raises(RuntimeError, match="a rank is gone"):
            run.loss(Failing(run.model), MICRO_BATCHES[0])
    assert "forward" not in vars(run.model)


@pytest.mark.parametrize("wrap", [lambda model: model, Compiled], ids=["plain", "compiled"])
def test_a_run_on_one_device_stays_as_it_is(make: Any, wrap: Any, switch: Any) -> None:
    run = make()
    found = run.step(wrap(run.model), MICRO_BATCHES[0])
    assert run.acts() == 0
    with switch.off():
        expected = alone(make, MICRO_BATCHES[0])
    assert found[0] == expected[0]
    assert found[1].equal(expected[1])


def test_another_wrapper_stays_as_it_is(make: Any) -> None:
    class Engine(torch.nn.Module):
        """As DeepSpeed has it."""

        def __init__(self, model: Any) -> None:
            super().__init__()
            self.module = model

    run = make()
    run.loss(Engine(run.model), MICRO_BATCHES[0])
    assert run.acts() == 0


def test_without_liger_the_loss_calls_the_rank_itself(make: Any) -> None:
    run = make()
    if not run.is_new:
        pytest.skip("in this release the loss of Liger is a method of its own")
    run.trainer.use_liger_kernel = False
    rank, (loss, gradient) = Rank(run.model), alone(make, MICRO_BATCHES[0])
    found = run.step(rank, MICRO_BATCHES[0])
    assert found[0] == loss
    torch.testing.assert_close(found[1], gradient / 2)
    assert [len(args) for args, _ in rank.given] == [1]
    assert run.acts() == 0


def test_every_trainer_is_averaged(make: Any) -> None:
    expected = alone(make, MICRO_BATCHES[1])[1] / 2
    for _ in range(3):
        run = make()
        torch.testing.assert_close(run.step(Rank(run.model), MICRO_BATCHES[1])[1], expected)
