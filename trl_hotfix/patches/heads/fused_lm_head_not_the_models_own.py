"""TRL's own LM head multiplies the states of the decoder with the weights of the output embeddings, and little more.

It applies the scale and the soft cap that it finds in the config under the names that it knows. What else a model does
between its decoder and its logits is left out, and so is a scale under a name that a release does not know yet: 1.4.0
knew ``logit_scale`` only, 1.15.0 also ``logits_scaling`` and ``lm_head_multiplier``.

The model answers whether the head is its own. In the first call of its forward, both are given the same states: the
decoder's ``forward`` returns them for that long, so the decoder is not run, and no random number is drawn. The states
are a fixed function of their index. All ranks have the same ones and decide alike, without asking one another.

If they differ, TRL's forward runs on with another ``self``, whose decoder returns the logits of the model in the place
of states, and with other names: what TRL calls to project states scores these logits. Everything else is TRL's: labels,
masks, the number of items, the auxiliary loss, the outputs.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import FunctionType, MappingProxyType, MethodType, ModuleType, SimpleNamespace
from typing import Any

from ...authoring import act_of_this_call, argument, judge, shadowed
from ...model import Outcome, Verdict
from ...testing import recorded_warnings

_SIZES = (1.0, 8.0, 64.0)
"""How large the states are. A bias shows in small ones, a cap in large ones."""

_STATES = 9
_TOLERANCE = 0.02
"""By how much the losses may differ, as a part of the loss. Logits in bf16 are rounded to 0.004 of themselves."""

_TOKENS = 1024
"""So many tokens are scored at a time, so that float32 copies of all logits are never there at once."""

_OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
"""What TRL's kernel returns, in its order."""

_FAILURES = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What code of a model raises that does not expect to be called with a decoder which returns nothing but states."""


def compare_the_chunked_loss(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Give the model a forward that uses TRL's chunked loss if it is that of the model's own logits. Up to 1.14."""
    result = wrapped(*args, **kwargs)
    model = argument(wrapped, args, kwargs, "model")
    loss = "_chunked_cross_entropy_loss"
    _install(model, {loss: _with(model.forward.__func__.__globals__[loss], {"_chunk": _scored_chunk})})
    return result


def compare_the_fused_head(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Give the model a forward that uses TRL's fused head if its log-probs are those of the model. From 1.15 on."""
    result = wrapped(*args, **kwargs)
    model, temperature = (argument(wrapped, args, kwargs, name) for name in ("model", "temperature"))
    _install(model, {"_ChunkedLogProbFunction": _Kernel}, temperature, fused_lm_head=True)
    return result


def _with(function: FunctionType, names: Mapping[str, Any]) -> FunctionType:
    """Return a copy of the function that has these values under its global names."""
    # Dynamo would read the names in the module of this name, and what it has compiled for another copy of the code.
    names = {name: value for name, value in {**function.__globals__, **names}.items() if name != "__name__"}
    code = function.__code__.replace()
    copy = FunctionType(code, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _install(model: Any, names: Mapping[str, Any], temperature: float = 1.0, **flags: Any) -> None:
    """Give the model a forward that asks it once. ``names``: those of TRL's forward by which logits are scored."""
    import torch

    # A class that takes this argument has such a head itself. The stand-ins of other self-tests do.
    if "fused_lm_head" in inspect.signature(type(model).forward).parameters:
        return
    fused, act = model.forward.__func__, act_of_this_call()
    of_logits = _with(fused, names)
    answers: list[bool] = []
    # What is done once is not compiled.
    is_own = torch.compiler.disable(_is_own)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not answers:
            answers.append(is_own(self, fused, temperature, flags))
        if all(answers):
            return fused(self, *args, **kwargs)
        act()
        return of_logits(_WithLogits(self, fused), *args, **kwargs)

    # generate() and Trainer read the signature of the model's own forward.
    vars(forward).update(vars(fused), __signature__=inspect.signature(fused))
    model.forward = MethodType(forward, model)


class _WithLogits:
    """A model whose decoder returns its logits in the place of its last states."""

    def __init__(self, model: Any, fused: Callable[..., Any]) -> None:
        def decoder(*args: Any, **kwargs: Any) -> Any:
            outputs = fused(model, *args, **kwargs)
            outputs.last_hidden_state = outputs.logits
            return outputs

        self._model = model
        # Under which of these TRL finds the decoder depends on transformers.
        self.base_model = self.model = decoder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _is_own(model: Any, fused: Callable[..., Any], temperature: float, flags: Mapping[str, Any]) -> bool:
    """Return whether TRL's head is the model's own one, or cannot be told from it. Warn if it is used all the same."""
    try:
        weight = model.get_output_embeddings().weight
        if weight.dim() != 2 or hasattr(weight, "full_tensor"):
            raise ValueError("its weights are sharded")
        losses = [_losses(model, fused, temperature, flags, weight, size) for size in _SIZES]
    except _FAILURES as error:
        _warn("TRL's LM head is used, and cannot be compared with that of %s: %r", type(model).__name__, error)
        return True
    # NaN is a difference.
    is_own = all(abs(trls - own) < _TOLERANCE * own for trls, own in losses)
    if not is_own:
        numbers = ", ".join(f"{trls:.4g} for {own:.4g}" for trls, own in losses)
        _warn(
            "the logits of %s are used, which takes more memory: TRL's LM head is another one, the losses of some "
            "states would be %s",
            type(model).__name__,
            numbers,
        )
    return is_own


def _losses(
    model: Any, fused: Callable[..., Any], temperature: float, flags: Mapping[str, Any], weight: Any, size: float
) -> tuple[float, float]:
    """Return the loss of states of this size by TRL's head and by the model's. A wrong scale moves it most."""
    import torch

    index = torch.arange(_STATES * weight.shape[1], device=weight.device)
    states = (size * index.sin()).reshape(1, _STATES, -1).to(weight.dtype)
    with torch.no_grad(), _decoded(model, states) as calls:
        # Nobody reads the tokens, but their number.
        logits = fused(model, input_ids=torch.zeros_like(states.argmin(-1))).logits.float() / temperature
        if not calls:
            raise LookupError("it does not call its decoder")
        # The least likely tokens.
        labels = logits.argmin(-1)
        own = (logits.logsumexp(-1) - logits.amin(-1)).mean()
        trls = fused(model, shift_labels=labels, output_router_logits=False, **flags).loss
    return float(trls), float(own)


@contextmanager
def _decoded(model: Any, states: Any) -> Iterator[list[Any]]:
    """Have the decoder return these states inside the block. Give a list of what it was called with."""
    calls: list[Any] = []

    def forward(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return _Decoded((states,))

    # The decoder of a vision-language model is not its base model before transformers 5. OPT calls one inside of it.
    base = model.base_model if model.base_model is not model else model.model
    with ExitStack() as stack:
        for decoder in {base, getattr(base, "decoder", base)}:
            own = vars(decoder).get("forward")
            stack.callback(setattr if own else delattr, decoder, "forward", *([own] if own else []))
            decoder.forward = forward
        yield calls


class _Decoded(tuple[Any, ...]):
    """What a decoder returns, of any class: the states, and None under all other names."""

    last_hidden_state = property(lambda self: next(iter(self)))

    def __getattr__(self, name: str) -> None:
        return None


def _scores(logits: Any, labels: Any, temperature: float) -> tuple[Any, ...]:
    """Return ``_OUTPUTS`` of logits, ``(tokens, vocabulary)``. The first two can be differentiated."""
    import torch

    logits = logits.float() / temperature
    log_probs = logits - logits.logsumexp(1, keepdim=True)
    constant = log_probs.detach()
    return (
        log_probs.gather(1, labels[:, None]).squeeze(1),
        torch.special.entr(log_probs.exp()).sum(1),
        (2 * constant).logsumexp(1),
        logits.detach().mean(1),
        constant.argmax(1) == labels,
    )


def _scored_chunk(logits: Any, weight: Any, bias: Any, labels: Any, *settings: Any) -> tuple[Any, Any, Any]:
    """Stand for TRL's ``_chunk``: return the sums of the losses, of the likeliest labels and of the entropies."""
    counted = labels != -100
    log_probs, entropy, _, _, is_top1 = _scores(logits[counted], labels[counted], 1.0)
    return -log_probs.sum(), is_top1.sum().float(), entropy.sum()


class _Kernel:
    """Stand for TRL's kernel, of which ``apply`` is called."""

    @staticmethod
    def apply(
        logits: Any, weight: Any, bias: Any, labels: Any, temperature: float, *settings: Any
    ) -> tuple[Any | None, ...]:
        """Return ``_OUTPUTS``, each ``(tokens,)``, or None for those that are not asked for."""
        import torch
        from torch.utils.checkpoint import checkpoint

        chunks = zip(logits.split(_TOKENS), labels.split(_TOKENS), strict=True)
        parts = [checkpoint(_scores, *chunk, temperature, use_reentrant=False) for chunk in chunks]
        results = dict(zip(_OUTPUTS, (torch.cat(part) for part in zip(*parts, strict=True)), strict=True))
        return tuple(results[name] if name in ("log_probs", *settings[-1]) else None for name in _OUTPUTS)


def _warn(message: str, *values: Any) -> None:
    logging.getLogger("trl_hotfix").warning(f"fused-lm-head-not-the-models-own: {message}", *values)


def loss_is_that_of_the_models_logits(module: ModuleType) -> Outcome:
    """Compute losses, their gradients and other outputs of micro-batches, with several heads and kinds of models."""
    with recorded_warnings() as warnings:
        case = _Case(module, "dense")
        right, wrong = (case.expected(0, head)["loss"].detach() for head in ("dense", "plain"))
        outcome = judge(float(case.scored(0).loss.detach()), right=float(right), wrong=float(wrong))
        if outcome.verdict is Verdict.FIXED:
            cases = [_Case(module, head) for head in _HEADS]
            cases += [_Case(module, "dense", kind) for kind in ("nested", "opaque", "sharded", "has its own")]
            mistakes = [mistake for case in cases for mistake in case.mistakes(warnings)]
            of_zero_3 = SimpleNamespace(get_output_embeddings=lambda: SimpleNamespace(weight=right.new_zeros(0)))
            if not _is_own(of_zero_3, _scores, 1.0, {}) or "sharded" not in warnings[-1]:
                mistakes.append(f"of sharded weights is said: {warnings[-1]}")
            if mistakes:
                raise AssertionError("; ".join(mistakes))
    return outcome


_HEADS: Mapping[str, Callable[[Any, Any], Any]] = MappingProxyType(
    {
        "plain": lambda model, states: model.lm_head(states),
        "almost plain": lambda model, states: 1.005 * model.lm_head(states),
        "dense": lambda model, states: model.lm_head(model.dense(states).tanh()),
        "scaled": lambda model, states: 1.05 * model.lm_head(states),
        "biased": lambda model, states: model.lm_head(states) + 0.3 * model.lm_head.weight[:, 0],
        "capped": lambda model, states: 100 * (model.lm_head(states) / 100).tanh(),
        "not finite": lambda model, states: model.lm_head(states).masked_fill(states.abs().amax() > 60, float("nan")),
    }
)
"""What stand-ins make of the states of their decoder."""

_IDS = (((1, 2, 3, 4, 5), (6, 7, 8, 0, 0)), ((9, 8, 7), (2, 4, 6)), ((1, 3, 5), (2, 2, 2)))
_LABELS = (
    ((1, -100, 3, 4, 5), (6, 7, 8, -100, -100)),
    ((-100, -100, 0), (2, -100, -100)),
    ((5, -100, -100), (-100,) * 3),
)
"""Three micro-batches. In the second one label is learned, in the third none: no logits are before the first token."""


class _Case:
    """A model that is given TRL's head, and the formula of its loss.

    ``kind``: ``plain``; ``nested``, it is its own base model before transformers 5, and calls a decoder in its decoder;
    ``opaque``, it calls no decoder; ``sharded``; ``has its own``, its class has a fused head.
    """

    def __init__(self, module: ModuleType, head: str, kind: str = "plain") -> None:
        import torch

        self.module, self.head, self.kind = module, head, kind
        self.is_fused = hasattr(module, "add_fused_lm_head")
        self.temperature = 0.5 if self.is_fused else 1.0
        self.wanted = ("log_probs", "is_top1") if kind == "nested" else _OUTPUTS
        self.ids, self.labels = ([torch.tensor(rows) for rows in part] for part in (_IDS, _LABELS))
        self.model = _stand_in(_HEADS[head], kind)
        if self.is_fused:
            module.add_fused_lm_head(self.model, self.temperature, outputs=self.wanted)
        else:
            module._patch_chunked_ce_lm_head(self.model, 2, is_vlm=kind == "nested")

    def scored(self, index: int, items: int | None = None) -> Any:
        """Return the outputs for a micro-batch. TRL's kernel may need a GPU: ours stands for it."""

        class Kernel:
            @staticmethod
            def apply(states: Any, weight: Any, *arguments: Any) -> Any:
                return _Kernel.apply(states @ weight.T, weight, *arguments)

        keywords = {"labels": self.labels[index], "num_items_in_batch": items, "output_router_logits": False}
        # Chunks end within a row.
        tokens = 3 if (self.head, self.kind) == ("dense", "plain") else _TOKENS
        with shadowed(sys.modules[__name__], "_TOKENS", tokens):
            if not self.is_fused:
                return self.model(input_ids=self.ids[index], **keywords)
            with shadowed(self.module, "_ChunkedLogProbFunction", Kernel):
                return self.model(input_ids=self.ids[index], fused_lm_head=True, **keywords)

    def expected(self, index: int, head: str, items: int | None = None) -> dict[str, Any]:
        """Return what the outputs are by the formula, if the model has this head."""
        labels = self.labels[index][:, 1:]
        counted = labels != -100
        logits = _HEADS[head](self.model, self.model.embedding[self.ids[index]])[:, :-1] / self.temperature
        probs = logits.exp() / logits.exp().sum(-1, keepdim=True)
        log_probs = probs.log()
        scores = {
            "log_probs": log_probs.gather(-1, labels.clamp(min=0)[..., None])[..., 0] * counted,
            "entropy": -(probs * log_probs).sum(-1) * counted,
            "log_sum_sq_probs": probs.detach().square().sum(-1).log() * counted,
            "mean_logits": logits.detach().mean(-1) * counted,
            "is_top1": (logits.argmax(-1) == labels) * counted,
        }
        loss = -scores["log_probs"].sum() / (items or max(int(counted.sum()), 1))
        if self.is_fused:
            return {"loss": loss, **{name: scores[name] if name in self.wanted else None for name in _OUTPUTS}}
        sums = {"num_correct_tokens": scores["is_top1"].sum(), "entropy_sum": scores["entropy"].sum()}
        return {"loss": loss, **sums, "num_valid_tokens": counted.sum()}

    def mistakes(self, warnings: list[str]) -> Iterator[str]:
        """Give what is wrong, a line each."""
        warnings.clear()
        name, decoder, is_plain = f"{self.head}, {self.kind}", self.model.transformer, self.head.endswith("plain")
        is_compared, forward = self.kind in ("plain", "nested"), vars(decoder).get("forward")
        batches = (None, 7, None) if self.head in ("plain", "dense") and self.kind == "plain" else (7,)
        for index, items in enumerate(batches):
            outputs, expected = (
                self.scored(index, items),
                self.expected(index, self.head if is_compared and not is_plain else "plain", items),
            )
            yield from (f"{name}: {mistake}" for mistake in self._differences(outputs, expected))
            if len(batches) > 1:
                yield from (f"{name}: {mistake}" for mistake in self._other_gradients(outputs, expected))
        if self.model.decoded != len(batches) or vars(decoder).get("forward") is not forward:
            yield f"{name}: the decoder ran {self.model.decoded} times, or has another forward than before"
        if len(warnings) != (not is_plain and self.kind != "has its own"):
            yield f"{name}: the warnings are {warnings}"
        if "input_ids" not in inspect.signature(self.model.forward).parameters:
            yield f"{name}: the signature is {inspect.signature(self.model.forward)}"

    def _differences(self, outputs: Any, expected: Mapping[str, Any]) -> Iterator[str]:
        import torch

        for name, right in expected.items():
            value = getattr(outputs, name)
            if value is None or right is None:
                is_same = value is right
            else:
                is_same = torch.allclose(value.float(), right.float(), atol=1e-5)
                is_same &= not self.is_fused or value.requires_grad is right.requires_grad
            if not is_same:
                yield f"{name} is {value}, not {right}"

    def _other_gradients(self, outputs: Any, expected: Mapping[str, Any]) -> Iterator[str]:
        import torch

        gradients = []
        for part in (vars(outputs), expected):
            # The bonus of GRPO has the gradient of the entropy, too.
            entropy = part.get("entropy")
            objective = part["loss"] + (0.0 if entropy is None else entropy.sum())
            gradients.append(torch.autograd.grad(objective, list(self.model.parameters()), allow_unused=True))
        for value, right in zip(*gradients, strict=True):
            if right is not None and (value is None or not torch.allclose(value, right, atol=1e-5)):
                yield "a gradient is another one"


def _stand_in(head: Callable[[Any, Any], Any], kind: str) -> Any:
    """Return a model of an embedding and this head. ``decoded`` counts how often its decoder ran."""
    import torch
    import transformers

    class Decoder(torch.nn.Module):  # type: ignore[misc]
        def forward(self, input_ids: Any, **kwargs: Any) -> Any:
            model.decoded += 1
            return _Decoded((model.embedding[input_ids],))

    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.decoded = 0
            self.transformer: Any = Decoder()
            self.config = SimpleNamespace(text_config=SimpleNamespace(), output_router_logits=True)
            self.config.get_text_config = lambda: self.config.text_config if kind == "nested" else self.config
            waves = torch.arange(66.0).reshape(11, 6)
            self.embedding = torch.nn.Parameter(torch.cos(1.3 * waves))
            self.dense, self.lm_head = (torch.nn.Linear(6, size, bias=False) for size in (6, 11))
            self.dense.weight.data, self.lm_head.weight.data = torch.cos(2.3 * waves[:6]), torch.cos(3.3 * waves)
            if kind == "nested":
                self.model: Any = self.transformer
                self.model.decoder = Decoder()
                self.model.forward = self.model.decoder.forward  # type: ignore[method-assign]
            if kind == "sharded":
                self.lm_head.weight.full_tensor = None

        @property
        def base_model(self) -> Any:
            return self if kind == "nested" and transformers.__version__.startswith("4") else self.transformer

        def get_output_embeddings(self) -> Any:
            return self.lm_head

        def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
            decoder = self.model.decoder if kind == "nested" else self.transformer
            states = self.embedding[input_ids] if kind == "opaque" else decoder(input_ids=input_ids)[0]
            if input_ids.shape != states.shape[:2] or kwargs.get("use_cache"):
                raise TypeError(f"the model is called with input_ids {input_ids} and {kwargs}")
            return SimpleNamespace(logits=head(self, states), past_key_values=None, hidden_states=None, attentions=None)

    class ModelWithHead(Model):
        def forward(self, input_ids: Any = None, fused_lm_head: bool = False, **kwargs: Any) -> Any:
            return super().forward(input_ids, **kwargs)

    model = ModelWithHead() if kind == "has its own" else Model()
    return model
