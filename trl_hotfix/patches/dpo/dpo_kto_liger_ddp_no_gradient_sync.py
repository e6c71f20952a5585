"""The Liger loss of DPO and KTO calls the model inside DistributedDataParallel, whose own forward never runs.

Its forward is what has the gradients of the next backward averaged. ``_compute_loss_liger`` takes the wrapper off
(0.19 to 0.28) or is given the model without it (``compute_loss`` of 1.9 to 1.13; there only ZeRO-3 and FSDP go through
their wrapper). From 0.29.0 to 1.8.0 the wrapper is asked for the attributes of the model, which is an AttributeError.

The wrappers have TRL's method run within that forward: it takes the place of the model's forward for one call. This is
what ``_ForwardRedirection`` of TRL does, and since 1.14.0 TRL does it here, too.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import absent, argument, judge, shadowed
from ...model import Outcome, Verdict
from ...testing import absent_if_reexported, default_arguments, dpo_stub, stub_trainer, tiny_causal_lm


def synchronize_liger_loss(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Compute the Liger loss of DPO within the forward of DistributedDataParallel (0.19.0 to 0.28.0)."""
    return _in_forward(wrapped, args, kwargs)


def synchronize_loss(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute the loss within the forward of DistributedDataParallel, if it is that of Liger (1.9.0 to 1.13.0)."""
    return _in_forward(wrapped, args, kwargs) if instance.use_liger_kernel else wrapped(*args, **kwargs)


def _in_forward(wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``wrapped`` within the forward of the model that it is given, if that is DistributedDataParallel."""
    from torch.nn.parallel import DistributedDataParallel

    model = argument(wrapped, args, kwargs, "model")
    # torch.compile comes last.
    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, DistributedDataParallel):
        return wrapped(*args, **kwargs)
    with ExitStack() as until_called:

        def forward(*args: Any, **kwargs: Any) -> Any:
            # The method may call the model's own.
            until_called.close()
            return wrapped(*args, **kwargs)

        until_called.enter_context(shadowed(model.module, "forward", forward))
        return model(*args, **kwargs)


def liger_loss_is_synchronized(module: ModuleType) -> Outcome:
    """Check the gradients of micro-batches on one of two ranks, of which the other one has none. Liger is not needed.

    Right is the mean of both, half of this rank's own gradient; wrong is its own.
    """
    make = _run_of(module)
    if isinstance(make, Outcome):
        return make
    outcomes = []
    for index, length in enumerate((5, 3, 4)):
        run = make()
        rank = _rank(run.model)
        (own, gradient), (loss, measured) = (run.step(model, index, length) for model in (run.model, rank))
        if loss != own or len(rank.forwards) > 1:
            raise AssertionError(f"the loss is {loss} within a rank, after {len(rank.forwards)} forwards, and {own}")
        outcomes.append(judge(measured, right=gradient / 2, wrong=gradient))
    if len({outcome.verdict for outcome in outcomes}) != 1:
        raise AssertionError(f"the micro-batches are not of one kind: {outcomes}")
    if outcomes[0].verdict is Verdict.FIXED and (mistakes := list(_mistakes_elsewhere(make))):
        raise AssertionError("; ".join(mistakes))
    return outcomes[0]


class _Run:
    """A stub of a trainer with a model of one matrix, whose Liger loss calls the model as well."""

    def __init__(self, trainer: Any, model: Any, call: Callable[..., Any]) -> None:
        self.trainer, self.model, self.call = trainer, model, call
        trainer.accelerator.unwrap_model = lambda model: getattr(getattr(model, "_orig_mod", model), "module", model)

    def step(self, model: Any, index: int, length: int) -> tuple[float, float]:
        """Return the loss of a micro-batch, and its gradient, projected on one number."""
        import torch

        with torch.enable_grad():
            loss = self.call(model, torch.arange(2 * length).reshape(2, length) % (7 + index) + 1)
            (gradient,) = torch.autograd.grad(loss, [self.model.weight])
        return float(loss.detach()), float((gradient.flatten() * torch.cos(torch.arange(gradient.numel()))).sum())


def _run_of(module: ModuleType) -> Callable[[], _Run] | Outcome:
    """Return what makes a run of the trainer of this module, or that the bug cannot occur there."""
    method = "KTO" if module.__name__.endswith("kto_trainer") else "DPO"
    trainer_class = getattr(module, f"{method}Trainer")
    if absence := absent_if_reexported(module, trainer_class.compute_loss):
        return absence
    if "unwrap_model" in inspect.unwrap(trainer_class.compute_loss).__code__.co_names:
        return functools.partial(_unwrapped_by_compute_loss, trainer_class, getattr(module, f"{method}Config"))
    if hasattr(trainer_class, "_compute_loss_liger") and "concatenated_forward" in vars(trainer_class):
        return functools.partial(_unwrapped_by_liger_loss, module)
    return absent("there is no Liger loss, or it asks the wrapper for what the model has, which is an error")


def _unwrapped_by_liger_loss(module: ModuleType) -> _Run:
    def fused(weight: Any, hidden: Any, labels: Any, **kwargs: Any) -> Any:
        # Then come log-probs and mean logits of chosen and rejected, the loss of rpo_alpha and both rewards.
        return ((hidden @ weight.t()).square().sum(-1) * (labels != -100)).mean(), (0.0,) * 7

    model = tiny_causal_lm()
    model.get_decoder = lambda: lambda input_ids, **kwargs: SimpleNamespace(last_hidden_state=model(input_ids).logits)
    model.get_output_embeddings = lambda: SimpleNamespace(weight=model.weight)
    settings: dict[str, Any] = {
        "reference_free": True,
        "padding_free": False,
        "label_pad_token_id": -100,
        "dpo_loss_fn": fused,
    }
    trainer = dpo_stub(module, model=model, max_length=None, use_logits_to_keep=False, **settings)

    def call(model: Any, token_ids: Any) -> Any:
        parts = {"prompt": token_ids[:, :1], "chosen": token_ids, "rejected": token_ids.flip(1)}
        batch = {f"{name}_input_ids": part for name, part in parts.items()}
        batch |= {f"{name}_attention_mask": (part > 0).long() for name, part in parts.items()}
        return trainer._compute_loss_liger(model, batch)["loss"]

    return _Run(trainer, model, call)


def _unwrapped_by_compute_loss(trainer_class: Any, config_class: Any) -> _Run:
    from trl.models.utils import _ForwardRedirection

    def loss(model: Any, inputs: Any, return_outputs: bool) -> Any:
        value = model(inputs["input_ids"]).logits.square().mean()
        return (value, {}) if return_outputs else value

    model = tiny_causal_lm()
    losses = {"_compute_loss_liger": loss, "_compute_loss": loss, "_forward_redirection": _ForwardRedirection()}
    arguments = default_arguments(config_class)
    trainer = stub_trainer(
        trainer_class, arguments, model=model, use_liger_kernel=True, is_fsdp_enabled=False, **losses
    )
    trainer.accelerator.state = SimpleNamespace(deepspeed_plugin=None)

    def call(model: Any, token_ids: Any) -> Any:
        loss, outputs = trainer.compute_loss(model, inputs={"input_ids": token_ids}, return_outputs=True)
        return loss if outputs == {} else None

    return _Run(trainer, model, call)


def _rank(model: Any) -> Any:
    """Return a stand-in of DistributedDataParallel without a process group, which halves gradients.

    It has this in common with the real one: gradients are averaged if its forward has run, and only then.
    """
    import torch

    class Rank(torch.nn.parallel.DistributedDataParallel):  # type: ignore[misc]
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            self.module = model
            self.forwards: list[tuple[Any, ...]] = []

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            self.forwards.append(args)
            return halved(self.module(*args, **kwargs))

    def halved(output: Any) -> Any:
        if isinstance(output, dict):
            return {name: halved(value) for name, value in output.items()}
        if isinstance(output, tuple):
            return tuple(map(halved, output))
        if isinstance(output, SimpleNamespace):
            return SimpleNamespace(**halved(vars(output)))
        return (output + output.detach()) / 2 if torch.is_tensor(output) and output.requires_grad else output

    return Rank()


def _mistakes_elsewhere(make: Callable[[], _Run]) -> Iterator[str]:
    """Say what is wrong with a compiled model, without Liger, and after a loss that raises."""
    import torch

    class Compiled:
        def __init__(self, rank: Any) -> None:
            self._orig_mod = rank

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self._orig_mod(*args, **kwargs)

    run = make()
    own, rank = run.step(run.model, 0, 4), _rank(run.model)
    if run.step(Compiled(rank), 0, 4) != (own[0], own[1] / 2) or len(rank.forwards) != 1:
        yield "with a compiled model the loss is not computed in the forward of the rank"
    if vars(run.trainer).get("use_liger_kernel"):
        run.trainer.use_liger_kernel, rank = False, _rank(run.model)
        if run.step(rank, 0, 4) != (own[0], own[1] / 2) or len(rank.forwards) != 1:
            yield f"without Liger there are {len(rank.forwards)} forwards of the rank"
    forward = run.model.forward
    with suppress(IndexError):
        run.call(_rank(run.model), torch.full((2, 3), 99))
    if run.model.forward != forward:
        yield "after an error the forward of the model is another one"
