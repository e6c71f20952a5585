"""Loss, scores and gradients are those of the model's own logits. TRL's head is kept where it is the model's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from trl.trainer import sft_trainer, utils

from trl_hotfix import witness
from trl_hotfix.patches.heads import fused_lm_head_not_the_models_own as patch

ID = "fused-lm-head-not-the-models-own"
SCORES = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
IS_FUSED = hasattr(utils, "add_fused_lm_head")
"""Whether this release has a fused head for all trainers. Up to 1.14 SFT alone has a chunked loss."""

HEADS: Mapping[str, Callable[[Any, Any], Any]] = {
    "plain": lambda model, states: model.lm_head(states),
    "almost plain": lambda model, states: 1.005 * model.lm_head(states),
    "dense": lambda model, states: model.lm_head(model.dense(states).tanh()),
    "scaled": lambda model, states: 1.05 * model.lm_head(states),
    "biased": lambda model, states: model.lm_head(states) + 0.3 * model.lm_head.weight[:, 0],
    "capped": lambda model, states: 100 * (model.lm_head(states) / 100).tanh(),
    "not finite": lambda model, states: model.lm_head(states).masked_fill(states.abs().amax() > 60, float("nan")),
}
"""What a model makes of the states of its decoder."""

OTHER_HEADS = ("dense", "scaled", "biased", "capped", "not finite")
BATCHES = (
    ([[1, 2, 3, 4, 5], [6, 7, 8, 0, 0]], [[1, -100, 3, 4, 5], [6, 7, 8, -100, -100]], None),
    # One label is learned.
    ([[9, 8, 7], [2, 4, 6]], [[-100, -100, 0], [2, -100, -100]], 7),
    # None is: no logits are before the first token.
    ([[1, 3, 5], [2, 2, 2]], [[5, -100, -100], [-100, -100, -100]], None),
)
"""Tokens, labels and the number of items."""


class Outputs(tuple[Any, ...]):
    """What a decoder or a model returns. Names that it was not given are None."""

    def __getattr__(self, name: str) -> None:
        return None


def outputs_of(states: Any, **named: Any) -> Any:
    outputs = Outputs((states,))
    vars(outputs).update(named, last_hidden_state=states)
    return outputs


class Decoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.runs = 0
        self.embedding = torch.nn.Parameter(torch.cos(1.3 * torch.arange(66.0).reshape(11, 6)))

    def forward(self, input_ids: Any, output_router_logits: bool = False, **kwargs: Any) -> Any:
        self.runs += 1
        return outputs_of(self.embedding[input_ids], router_logits=routed(input_ids) if output_router_logits else None)


def routed(ids: Any) -> Any:
    """Return the logits of two layers of routers for two experts, each ``(tokens, experts)``."""
    return tuple(torch.stack([ids.flatten().float().sin() * layer, ids.flatten().cos()], -1) for layer in (1, 2))


class Model(torch.nn.Module):
    """A model of an embedding and a head, with a router where its config asks for it."""

    def __init__(self, head: str = "dense", **settings: Any) -> None:
        super().__init__()
        self.head = HEADS[head]
        self.transformer = Decoder()
        experts = {"num_experts": 2, "num_experts_per_tok": 1, "router_aux_loss_coef": 0.5}
        vars(self).update(experts)
        self.config = SimpleNamespace(model_type="tiny", **experts, **settings)
        self.config.get_text_config = lambda: self.config
        self.dense, self.lm_head = (torch.nn.Linear(6, size, bias=False) for size in (6, 11))
        waves = torch.arange(66.0).reshape(11, 6)
        self.dense.weight.data, self.lm_head.weight.data = torch.cos(2.3 * waves[:6]), torch.cos(3.3 * waves)

    @property
    def base_model(self) -> Any:
        return self.transformer

    def get_output_embeddings(self) -> Any:
        return self.lm_head

    def logits_of(self, ids: Any) -> Any:
        """Return the logits without a call of the decoder."""
        return self.head(self, self.transformer.embedding[ids])

    def decoded(self, **kwargs: Any) -> Any:
        return self.transformer(**kwargs)

    def forward(self, input_ids: Any = None, use_cache: Any = None, **kwargs: Any) -> Any:
        assert not use_cache
        decoded = self.decoded(input_ids=input_ids, **kwargs)
        assert input_ids.shape == decoded[0].shape[:2]
        return outputs_of(None, logits=self.head(self, decoded[0]), router_logits=decoded.router_logits)


class NestedModel(Model):
    """A vision-language model: its own base model before transformers 5, and calls a decoder in its decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.config.text_config = SimpleNamespace()
        self.config.get_text_config = lambda: self.config.text_config
        self.model = self.transformer
        self.model.decoder = Decoder()
        self.model.decoder.embedding = self.transformer.embedding
        self.model.forward = self.model.decoder.forward

    @property
    def base_model(self) -> Any:
        return self if transformers.__version__.startswith("4") else self.transformer

    def decoded(self, **kwargs: Any) -> Any:
        return self.model.decoder(**kwargs)


class ModelWithoutDecoder(Model):
    def decoded(self, input_ids: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        return outputs_of(self.transformer.embedding[input_ids])


class ModelWithOwnHead(Model):
    def forward(self, input_ids: Any = None, fused_lm_head: bool = False, **kwargs: Any) -> Any:  # type: ignore[override]
        return super().forward(input_ids, **kwargs)


class Kernel:
    """TRL's kernel of 1.15 in torch: the scores of states, as the patch has them of logits."""

    @staticmethod
    def apply(states: Any, weight: Any, *arguments: Any) -> Any:
        return patch._Kernel.apply(states @ weight.T, weight, *arguments)


@pytest.fixture(autouse=True)
def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    if IS_FUSED:
        monkeypatch.setattr(utils, "_ChunkedLogProbFunction", Kernel)


TEMPERATURE = 0.5 if IS_FUSED else 1.0


def with_head(model: Any, outputs: tuple[str, ...] = SCORES) -> Any:
    if IS_FUSED:
        utils.add_fused_lm_head(model, TEMPERATURE, outputs=outputs)
    else:
        sft_trainer._patch_chunked_ce_lm_head(model, 2, is_vlm=isinstance(model, NestedModel))
    return model


def scored(model: Any, index: int = 0, **changed: Any) -> Any:
    ids, labels, items = BATCHES[index]
    batch = {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels), "num_items_in_batch": items, **changed}
    return model(**batch, **({"fused_lm_head": True} if IS_FUSED else {}))


def expected(model: Any, index: int = 0, head: str | None = None) -> dict[str, Any]:
    """Return the outputs by their formulas, with the logits of another head if one is named."""
    ids, all_labels, items = BATCHES[index]
    labels = torch.tensor(all_labels)[:, 1:]
    counted = labels != -100
    states = model.transformer.embedding[torch.tensor(ids)]
    logits = (HEADS[head] if head else model.head)(model, states)[:, :-1] / TEMPERATURE
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
    if IS_FUSED:
        return {"loss": loss, **scores}
    sums = {"num_correct_tokens": scores["is_top1"].sum(), "entropy_sum": scores["entropy"].sum()}
    return {"loss": loss, **sums, "num_valid_tokens": counted.sum()}


def assert_outputs(model: Any, index: int = 0, head: str | None = None) -> None:
    outputs = scored(model, index)
    for name, right in expected(model, index, head).items():
        value = getattr(outputs, name)
        torch.testing.assert_close(value.float(), right.float(), atol=1e-5, rtol=1e-5, msg=name)
        assert not IS_FUSED or value.requires_grad is right.requires_grad, name


def decoder_runs(model: Any) -> int:
    return sum(module.runs for module in model.modules() if isinstance(module, Decoder))


def acted() -> int:
    return witness.totals().get(ID, witness.Count()).acted


@pytest.mark.parametrize("head", OTHER_HEADS)
def test_the_outputs_are_those_of_the_models_logits(head: str) -> None:
    model, before = with_head(Model(head)), acted()
    for index in range(len(BATCHES)):
        assert_outputs(model, index)
    assert acted() == before + 1


@pytest.mark.parametrize("head", ["plain", "almost plain"])
def test_trls_head_is_kept_where_it_is_the_models(head: str, messages: list[str]) -> None:
    model, before = with_head(Model(head)), acted()
    for index in range(len(BATCHES)):
        assert_outputs(model, index, "plain")
    assert acted() == before
    assert not messages


@pytest.mark.parametrize("index", range(len(BATCHES)))
@pytest.mark.parametrize("head", ["plain", "dense"])
def test_the_gradients_are_those_of_the_models_logits(head: str, index: int) -> None:
    model = with_head(Model(head))
    gradients = []
    for part in (vars(scored(model, index)), expected(model, index)):
        # The bonus of GRPO has the gradient of the entropy, too.
        objective = part["loss"] + (part["entropy"].sum() if IS_FUSED else 0.0)
        gradients.append(torch.autograd.grad(objective, list(model.parameters()), allow_unused=True))
    for value, right in zip(*gradients, strict=True):
        # With no label at all, TRL's chunked loss has no gradient for what it does not use.
        if right is not None:
            torch.testing.assert_close(value, right, atol=1e-5, rtol=1e-5)


def test_training_and_evaluation_have_the_same_loss_whichever_comes_first() -> None:
    model = with_head(Model())
    for is_training in (False, True, False):
        with torch.set_grad_enabled(is_training):
            loss = scored(model.train(is_training)).loss
        assert loss.requires_grad is is_training
        torch.testing.assert_close(loss, expected(model)["loss"])


def test_each_of_two_models_has_its_own_head() -> None:
    for head in ("plain", "dense", "plain", "scaled"):
        assert_outputs(with_head(Model(head)))


def test_logits_without_labels_are_those_of_the_model() -> None:
    model = with_head(Model())
    ids = torch.tensor(BATCHES[0][0])
    assert model(input_ids=ids).logits.equal(model.logits_of(ids))


def test_labels_that_are_shifted_already_are_not_shifted_again() -> None:
    model = with_head(Model())
    shifted = torch.tensor([[*row[1:], -100] for row in BATCHES[0][1]])
    torch.testing.assert_close(scored(model, labels=None, shift_labels=shifted).loss, expected(model)["loss"])


@pytest.mark.parametrize("head", ["plain", "dense"])
def test_the_loss_of_a_router_is_added_as_before(head: str) -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    model = with_head(Model(head, output_router_logits=True))
    aux_loss = load_balancing_loss_func(routed(torch.tensor(BATCHES[0][0])), 2, 1, None)
    torch.testing.assert_close(scored(model).loss, expected(model)["loss"] + 0.5 * aux_loss)


@pytest.mark.parametrize("head", ["dense", "plain"])
def test_the_decoder_runs_once_a_micro_batch(head: str) -> None:
    model = with_head(Model(head))
    state = torch.get_rng_state()
    for index in range(len(BATCHES)):
        scored(model, index)
    assert decoder_runs(model) == len(BATCHES)
    assert torch.get_rng_state().equal(state)
    assert "forward" not in vars(model.transformer)


@pytest.mark.parametrize("head", OTHER_HEADS)
def test_the_first_micro_batch_alone_warns(head: str, messages: list[str]) -> None:
    model = with_head(Model(head))
    assert not messages
    for index in range(len(BATCHES)):
        scored(model, index)
    (message,) = messages
    assert "the logits of Model are used" in message


@pytest.mark.parametrize("head", ["plain", "dense"])
def test_generate_reads_the_signature_of_the_models_own_forward(head: str, switch: Any) -> None:
    with switch.off():
        trls = inspect.signature(with_head(Model(head)).forward)
    assert inspect.signature(with_head(Model(head)).forward) == trls
    assert "input_ids" in trls.parameters


@pytest.mark.skipif(not IS_FUSED, reason="the chunked loss has no outputs to ask for")
@pytest.mark.parametrize("asked", [("log_probs",), ("log_probs", "is_top1"), ("log_probs", "entropy", "mean_logits")])
def test_only_the_outputs_that_are_asked_for_are_made(asked: tuple[str, ...]) -> None:
    outputs = scored(with_head(Model(), asked))
    assert tuple(name for name in SCORES if getattr(outputs, name) is not None) == asked


@pytest.mark.parametrize("tokens", [1, 2, 3, 5])
def test_tokens_may_be_scored_in_parts(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch, "_TOKENS", tokens)
    model = with_head(Model())
    for index in range(len(BATCHES)):
        assert_outputs(model, index)


def test_a_model_in_bfloat16_keeps_trls_head(messages: list[str]) -> None:
    scored(with_head(Model("plain").bfloat16()))
    assert not messages


def test_a_decoder_within_the_decoder_is_found() -> None:
    model = with_head(NestedModel())
    forward = vars(model.model)["forward"]
    assert_outputs(model)
    assert decoder_runs(model) == 1
    assert vars(model.model)["forward"] is forward
    assert "forward" not in vars(model.model.decoder)


class ModelThatFails(Model):
    """It does not expect a decoder that returns nothing but states."""

    def decoded(self, input_ids: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        outputs = super().decoded(input_ids=input_ids, **kwargs)
        return outputs_of(outputs.last_hidden_state + outputs.some_offset)


def sharded() -> Any:
    model = Model()
    model.lm_head.weight.full_tensor = lambda: model.lm_head.weight
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (ModelWithoutDecoder, "it does not call its decoder"),
        (ModelThatFails, "TypeError"),
        (sharded, "its weights are sharded"),
    ],
)
def test_a_head_that_cannot_be_compared_is_used_with_a_warning(
    make: Callable[[], Any], reason: str, messages: list[str]
) -> None:
    model, before = with_head(make()), acted()
    for index in range(len(BATCHES)):
        assert_outputs(model, index, "plain")
    (message,) = messages
    assert reason in message
    assert acted() == before
    assert "forward" not in vars(model.transformer)


def test_weights_of_zero_3_are_sharded(messages: list[str]) -> None:
    model = SimpleNamespace(get_output_embeddings=lambda: SimpleNamespace(weight=torch.zeros(0)))
    assert patch._is_own(model, scored, 1.0, {})
    (message,) = messages
    assert "its weights are sharded" in message


def test_a_class_with_a_head_of_its_own_is_left_alone(messages: list[str], switch: Any) -> None:
    model = with_head(ModelWithOwnHead())
    assert_outputs(model, head="plain")
    assert not messages
    with switch.off():
        assert model.forward.__func__.__code__ is with_head(ModelWithOwnHead()).forward.__func__.__code__


def test_trl_multiplies_the_states_alone(switch: Any) -> None:
    with switch.off():
        assert_outputs(with_head(Model()), head="plain")
