"""TRL 1.15.0 cannot take a training step where Triton does not run.

Tokens are scored by ``_ChunkedLogProbFunction``, a Triton kernel. Where Triton cannot be imported (macOS, Windows, a
build of torch for the CPU) that name is None. TRL 1.16.0 computes the same in torch there.

The repair gives the model a forward with the code of the one that ``add_fused_lm_head`` has given it, but with a
computation in torch under that name: the projection, ``logit_scale``, the soft cap and the temperature in the order of
TRL's kernel, in float32, for 1024 tokens at a time, recomputed in the backward pass.
"""

from __future__ import annotations

import builtins
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import update_wrapper, wraps
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, judge, module_of, shadowed, wrapper
from ...model import Outcome
from ...testing import StopConstruction, tiny_attention_model

_TOKENS = 1024
_NAME = "_ChunkedLogProbFunction"


@wrapper
def score_in_torch(call: Call) -> Any:
    """Give the model a forward that needs no Triton if Triton does not run."""
    import torch

    result, module = call(), module_of(call)
    if getattr(module, _NAME) is not None and _triton_runs(torch, os.environ):
        return result
    model = call["model"]
    call.act()
    forward = model.forward.__func__
    # A patch that went on before may have put its own forward around TRL's, which it then closes over.
    around = [
        cell
        for cell in forward.__closure__ or ()
        if isinstance(cell.cell_contents, FunctionType) and cell.cell_contents.__globals__ is vars(module)
    ]
    for cell in around:
        cell.cell_contents = _in_torch(cell.cell_contents)
    if not around:
        model.forward = MethodType(_in_torch(forward), model)
    return result


def _in_torch(fused: FunctionType) -> FunctionType:
    """Return a copy of TRL's forward that scores in torch."""
    names = {**fused.__globals__, _NAME: _TorchLogProbFunction}
    forward = FunctionType(fused.__code__, names, fused.__name__, fused.__defaults__, fused.__closure__)
    forward.__kwdefaults__ = fused.__kwdefaults__
    # generate() reads the signature of the model's own forward, which TRL keeps in __wrapped__.
    update_wrapper(forward, fused.__wrapped__)  # type: ignore[attr-defined]
    return forward


def _triton_runs(torch: Any, environment: Mapping[str, str]) -> bool:
    """Return whether there is a device for Triton's kernels, or its interpreter is asked for."""
    devices = (getattr(torch, name, None) for name in ("cuda", "xpu"))
    return environment.get("TRITON_INTERPRET") == "1" or any(
        device is not None and device.is_available() for device in devices
    )


class _TorchLogProbFunction:
    """Replace ``ChunkedLogProbFunction``, of which TRL calls ``apply`` only."""

    @staticmethod
    def apply(
        hidden: Any,
        weight: Any,
        bias: Any,
        targets: Any,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None,
        logit_scale: float,
        outputs: tuple[str, ...],
    ) -> tuple[Any, ...]:
        """Return log_probs, entropy, log_sum_sq_probs, mean_logits and is_top1, each ``(tokens,)`` or None.

        ``hidden`` is ``(tokens, width)``, ``weight`` ``(vocabulary, width)`` and ``targets`` ``(tokens,)``. The last
        three results have no gradient.
        """
        import torch
        from torch.utils.checkpoint import checkpoint

        def scored(hidden: Any, weight: Any, bias: Any, targets: Any) -> tuple[Any, ...]:
            # Under autocast torch computes this in its type.
            bias = None if bias is None else bias.to(hidden.dtype)
            logits = torch.nn.functional.linear(hidden, weight.to(hidden.dtype), bias).float() * logit_scale
            if final_logit_softcapping is not None:
                logits = final_logit_softcapping * torch.tanh(logits / final_logit_softcapping)
            logits = logits / temperature
            log_probs = logits.log_softmax(1)
            scores = [-torch.nn.functional.nll_loss(log_probs, targets, reduction="none")]
            if "entropy" in outputs:
                scores.append(-(log_probs.exp() * log_probs).sum(1))
            with torch.no_grad():
                if "log_sum_sq_probs" in outputs:
                    scores.append((2 * log_probs).logsumexp(1))
                if "mean_logits" in outputs:
                    scores.append(logits.mean(1))
                if "is_top1" in outputs:
                    scores.append(log_probs.argmax(1) == targets)
            return tuple(scores)

        # split() makes one part of an empty batch too, so that a batch without labels has a gradient of 0.
        chunks = [
            checkpoint(scored, states, weight, bias, labels, use_reentrant=False, preserve_rng_state=False)
            for states, labels in zip(hidden.split(_TOKENS), targets.split(_TOKENS), strict=True)
        ]
        names = ("log_probs", *(name for name in _OPTIONAL if name in outputs))
        results = dict(zip(names, (torch.cat(parts) for parts in zip(*chunks, strict=True)), strict=True))
        return tuple(results.get(name) for name in ("log_probs", *_OPTIONAL))


_OPTIONAL = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def tokens_are_scored_without_triton(module: ModuleType) -> Outcome:
    """Compare what the head gives for two rows, and its gradients, with torch, in a module imported without Triton.

    A private copy of the kernels module, imported without Triton, shows what such a module has under the name.
    """
    import torch

    with ExitStack() as stack:
        stack.enter_context(_as_without_triton(module))
        plain = _Case(module)
        try:
            measured = plain.scores()
        except AttributeError as error:
            if "'NoneType' object has no attribute 'apply'" not in str(error):
                raise
            return judge(0.0, right=float(plain.expected()[0].sum()), wrong=0.0, error=str(error))
        # A chunk is smaller than the labels.
        stack.enter_context(shadowed(sys.modules[__name__], "_TOKENS", 2))
        settings = {"final_logit_softcapping": 0.5, "logit_scale": 3.0}
        cases = {
            "plain": plain,
            "capped": _Case(module, settings, temperature=0.7),
            "with a bias": _Case(module, bias=True),
            "log-probs alone": _Case(module, outputs=("log_probs",)),
            "in float32": _Case(module, bias=True, dtype=torch.bfloat16, cast_lm_head_to_fp32=True),
            "in bfloat16": _Case(module, dtype=torch.bfloat16),
            "without labels": _Case(module, labels=False),
        }
        mistakes = [f"{name}: {mistake}" for name, case in cases.items() for mistake in case.mistakes()]
        with torch.autocast("cpu", torch.bfloat16):
            mistakes += [f"under autocast: {mistake}" for mistake in _Case(module, autocast=True).mistakes()]
        if getattr(module, _NAME) is None:
            mistakes += _mistakes_with_a_kernel(module)
        mistakes += _mistakes_beneath_another_forward(module)
    mistakes += _mistakes_about_triton()
    if mistakes:
        raise AssertionError("; ".join(mistakes))
    return judge(float(measured[0].detach().sum()), right=float(plain.expected()[0].sum()), wrong=0.0)


class _Case:
    """A model with TRL's head, two rows of two and three labels, and by torch what the head is to give for them."""

    def __init__(
        self,
        module: ModuleType,
        settings: Mapping[str, float] | None = None,
        *,
        bias: bool = False,
        dtype: Any = None,
        labels: bool = True,
        autocast: bool = False,
        **options: Any,
    ) -> None:
        import torch

        self.model = tiny_attention_model().to(dtype)
        vars(self.model.config).update(settings or {})
        if bias:
            weight = self.model.lm_head.weight
            self.model.lm_head.bias = torch.nn.Parameter(torch.linspace(-1, 1, len(weight)).to(weight.dtype))
        self.options: dict[str, Any] = {
            "temperature": 1.0,
            "cast_lm_head_to_fp32": False,
            "outputs": ("log_probs", *_OPTIONAL),
        }
        self.options.update(options)
        self.under_autocast, self.in_bfloat16 = autocast, autocast or dtype is torch.bfloat16
        self.ids = torch.tensor([[7, 3, 6, 2], [3, 4, 5, 6]])
        self.labels = torch.tensor([[7, 3, -100, 2], [3, 4, 5, 6]]) if labels else torch.full_like(self.ids, -100)
        # The model's own forward would return the same as TRL's head. The test measures TRL's head.
        self.own_forward = self.model.forward
        module.add_fused_lm_head(self.model, **self.options)

    def scores(self) -> tuple[Any, ...]:
        """Return what the head gives for the labels, in the order of the kernel."""
        outputs = self.model(input_ids=self.ids, labels=self.labels, fused_lm_head=True)
        mask = self.labels[:, 1:] != -100
        found = (getattr(outputs, name) for name in ("log_probs", *_OPTIONAL))
        return tuple(None if value is None else value[mask] for value in found)

    def expected(self) -> tuple[Any, ...]:
        """Return the same by torch: by the formulas of ``FusedCausalLMOutput``'s fields."""
        import torch

        config, head = self.model.config, self.model.lm_head
        hidden = self.model.base_model(input_ids=self.ids).last_hidden_state[:, :-1]
        weight, bias = head.weight, head.bias
        if bias is not None and self.options["cast_lm_head_to_fp32"]:
            bias = bias.float()
        if self.options["cast_lm_head_to_fp32"]:
            hidden, weight = hidden.float(), weight.float()
        elif self.under_autocast:
            hidden, weight = hidden.bfloat16(), weight.bfloat16()
        mask = self.labels[:, 1:] != -100
        with torch.autocast("cpu", enabled=False):
            logits = torch.nn.functional.linear(hidden[mask], weight, bias).float()
        logits = logits * getattr(config, "logit_scale", 1.0)
        if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
            logits = cap * torch.tanh(logits / cap)
        logits = logits / self.options["temperature"]
        targets = self.labels[:, 1:][mask]
        probabilities = logits.softmax(-1)
        scores = {
            "log_probs": torch.log(probabilities[range(len(targets)), targets]),
            "entropy": -(probabilities * probabilities.log()).sum(-1),
            "log_sum_sq_probs": torch.log((probabilities**2).sum(-1)).detach(),
            "mean_logits": logits.mean(-1).detach(),
            "is_top1": logits.argmax(-1) == targets,
        }
        return tuple(scores[name] if name in self.options["outputs"] else None for name in scores)

    def mistakes(self) -> Iterator[str]:
        """Give what differs, a line each."""
        import torch

        parameters = list(self.model.parameters())
        # bfloat16 has 8 bits, and a gradient goes through several roundings.
        tolerance = 0.05 if self.in_bfloat16 else 1e-5
        found, expected = self.scores(), self.expected()
        for name, one, other in zip(("log_probs", *_OPTIONAL), found, expected, strict=True):
            if (one is None) != (other is None):
                yield f"{name} is {one}"
            elif one is not None:
                if one.requires_grad != other.requires_grad or not torch.allclose(one, other, atol=1e-5):
                    yield f"{name} is {one} instead of {other}"
                if one.requires_grad:
                    gradients = [
                        torch.autograd.grad((scores**2).sum(), parameters, retain_graph=True, allow_unused=True)
                        for scores in (one, other)
                    ]
                    if not all(
                        (mine is None and right is None) or _is_close(mine, right, tolerance)
                        for mine, right in zip(*gradients, strict=True)
                    ):
                        yield f"the gradient of {name} is another one"
        if not torch.equal(self.model(input_ids=self.ids).logits, self.own_forward(input_ids=self.ids).logits):
            yield "without the head the logits are others"


def _is_close(value: Any, right: Any, tolerance: float) -> bool:
    return bool((value - right).abs().max() <= tolerance * (1 + right.abs().max()))


def _mistakes_about_triton() -> Iterator[str]:
    """Give where it is not known whether Triton runs."""
    there, away = (SimpleNamespace(is_available=lambda there=there: there) for there in (True, False))
    cases: list[tuple[Any, Mapping[str, str], bool]] = [
        (SimpleNamespace(cuda=away), {}, False),
        (SimpleNamespace(cuda=there), {}, True),
        (SimpleNamespace(cuda=away, xpu=there), {}, True),
        (SimpleNamespace(cuda=away, xpu=away), {"TRITON_INTERPRET": "0"}, False),
        (SimpleNamespace(cuda=away), {"TRITON_INTERPRET": "1"}, True),
    ]
    for torch, environment, runs in cases:
        if _triton_runs(torch, environment) is not runs:
            yield f"with {torch} and {environment}, Triton is said to run: {not runs}"


def _mistakes_with_a_kernel(module: ModuleType) -> Iterator[str]:
    """Give where TRL's kernel is called although Triton does not run, or is not called although it does."""

    class Kernel:
        @staticmethod
        def apply(*args: Any) -> None:
            raise StopConstruction

    for runs in (True, False):
        answers = shadowed(sys.modules[__name__], "_triton_runs", lambda *args, runs=runs: runs)
        with shadowed(module, _NAME, Kernel), answers:
            try:
                _Case(module).scores()
            except StopConstruction:
                is_called = True
            else:
                is_called = False
        if is_called is not runs:
            yield f"Triton runs: {runs}, and its kernel is called: {is_called}"


def _mistakes_beneath_another_forward(module: ModuleType) -> Iterator[str]:
    """Give what differs where a patch that went on before has put its own forward around TRL's."""
    trls = inspect.unwrap(module.add_fused_lm_head)

    @wraps(trls)
    def add(model: Any, **options: Any) -> None:
        trls(model, **options)
        fused = model.forward.__func__
        model.forward = MethodType(wraps(fused)(lambda *args, **kwargs: fused(*args, **kwargs)), model)

    def add_in_torch(*args: Any, **kwargs: Any) -> Any:
        return score_in_torch(Call(add, None, args, kwargs))

    with shadowed(module, "add_fused_lm_head", add_in_torch):
        yield from (f"beneath another forward: {mistake}" for mistake in _Case(module).mistakes())


@contextmanager
def _as_without_triton(module: ModuleType) -> Iterator[None]:
    """Put ``module`` into the state that it has when it is imported where there is no Triton."""

    def refuse(name: str, namespace: Any = None, local: Any = None, names: Any = (), level: int = 0) -> Any:
        if name.partition(".")[0] == "triton":
            raise ImportError(name, name=name)
        if "is_triton_available" in (names or ()):
            return SimpleNamespace(is_triton_available=lambda: False)
        return builtins.__import__(name, namespace, local, names, level)

    function = None
    spec = importlib.util.find_spec("trl.kernels.chunked_logprob") if getattr(module, _NAME) is not None else None
    if spec is not None and spec.loader is not None:
        kernels = importlib.util.module_from_spec(spec)
        vars(kernels)["__builtins__"] = {**vars(builtins), "__import__": refuse}
        try:
            spec.loader.exec_module(kernels)
            function = kernels.ChunkedLogProbFunction
        except ImportError as error:
            if not str(error.name).startswith("triton"):
                raise
    with ExitStack() as stack:
        stack.enter_context(shadowed(module, _NAME, function))
        if hasattr(module, "_use_triton"):
            stack.enter_context(shadowed(module, "_use_triton", lambda device: False))
        yield
