"""The head caps the logits as the config says, under whichever name, and the config keeps the names that it had."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl.trainer import sft_trainer, utils

from trl_hotfix import witness

ID = "fused-lm-head-soft-cap-ignored"
NAMES = ("logits_soft_cap", "output_logit_soft_cap")
IS_FUSED = hasattr(utils, "add_fused_lm_head")
"""Whether this release has a fused head for all trainers. Up to 1.14 SFT alone has a chunked loss."""

MICRO_BATCHES = (
    ([[1, 2, 3, 4, 5], [6, 7, 8, 0, 0]], [[1, -100, 3, 4, 5], [6, 7, 8, -100, -100]]),
    # One label alone is learned.
    ([[9, 8, 7], [2, 4, 6]], [[-100, -100, 0], [2, -100, -100]]),
    ([[1, 3], [2, 2]], [[1, 3], [2, 2]]),
)
"""Tokens and labels, each ``(batch, length)``."""


class Kernel:
    """TRL's kernel of 1.15 in torch, for log-probs alone."""

    @staticmethod
    def apply(states: Any, weight: Any, bias: Any, labels: Any, *settings: Any) -> tuple[Any, ...]:
        logits = capped(states @ weight.T, settings[2])
        return logits.log_softmax(1).gather(1, labels[:, None])[:, 0], None, None, None, None


@pytest.fixture(autouse=True)
def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a kernel that needs no GPU. That of 1.16 needs none."""
    if IS_FUSED and not hasattr(utils, "_use_triton"):
        monkeypatch.setattr(utils, "_ChunkedLogProbFunction", Kernel)


def capped(logits: Any, cap: float | None) -> Any:
    return logits if cap is None else cap * torch.tanh(logits / cap)


class Model(torch.nn.Module):
    """A model of an embedding and a head. Its config, or the one of its text part, has these settings."""

    def __init__(self, *, text_part: Any = False, **settings: Any) -> None:
        super().__init__()
        self.text_config = SimpleNamespace(model_type="tiny", **settings)
        self.config = SimpleNamespace(model_type="whole") if text_part else self.text_config
        self.config.get_text_config = lambda: self.text_config
        waves = torch.arange(66.0).reshape(11, 6)
        self.embedding = torch.nn.Parameter(torch.cos(1.3 * waves))
        self.lm_head = torch.nn.Linear(6, 11, bias=False)
        self.lm_head.weight.data = torch.cos(3.3 * waves)
        # Under which of these TRL finds the decoder depends on transformers.
        self.model = self.base_model = self.decoder

    def decoder(self, input_ids: Any, **kwargs: Any) -> Any:
        return SimpleNamespace(last_hidden_state=self.embedding[input_ids], hidden_states=None)

    def get_output_embeddings(self) -> Any:
        return self.lm_head

    def forward(self, input_ids: Any) -> Any:
        return SimpleNamespace(logits=self.lm_head(self.embedding[input_ids]))


def add_head(model: Any) -> None:
    if IS_FUSED:
        utils.add_fused_lm_head(model)
    else:
        sft_trainer._patch_chunked_ce_lm_head(model, 2)


def with_head(model: Any) -> Any:
    add_head(model)
    return model


def assert_caps(model: Any, cap: float | None) -> None:
    """Assert that the loss of each micro-batch, and its gradients, are those of logits with this cap."""
    parameters = list(model.parameters())
    for ids, labels in MICRO_BATCHES:
        tokens, targets = torch.tensor(ids), torch.tensor(labels)
        loss = model(input_ids=tokens, labels=targets, **({"fused_lm_head": True} if IS_FUSED else {})).loss
        logits = capped(model.lm_head(model.embedding[tokens]), cap)[:, :-1]
        right = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten())
        torch.testing.assert_close(loss, right)
        if torch.is_grad_enabled():
            found, expected = (torch.autograd.grad(value, parameters) for value in (loss, right))
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("text_part", [False, True], ids=["config", "text config"])
@pytest.mark.parametrize(("name", "cap"), [(NAMES[0], 0.5), (NAMES[1], 0.5), (NAMES[0], 3.0), (NAMES[1], 30.0)])
def test_the_logits_are_capped_in_each_micro_batch(name: str, cap: float, text_part: bool) -> None:
    assert_caps(with_head(Model(text_part=text_part, **{name: cap})), cap)


@pytest.mark.parametrize("name", NAMES)
def test_the_logits_are_capped_in_an_evaluation(name: str) -> None:
    model = with_head(Model(**{name: 0.5})).eval()
    with torch.no_grad():
        assert_caps(model, 0.5)


def test_a_name_without_a_value_does_not_hide_the_other_one() -> None:
    assert_caps(with_head(Model(logits_soft_cap=None, output_logit_soft_cap=0.5)), 0.5)


def test_each_model_has_its_own_cap() -> None:
    caps = (0.5, None, 2.0)
    models = [Model(logits_soft_cap=cap) for cap in caps]
    for model in models:
        add_head(model)
    for model, cap in zip(models, caps, strict=True):
        assert_caps(model, cap)


CASES = [
    ({}, None, 0),
    ({"logits_soft_cap": None}, None, 0),
    ({"output_logit_soft_cap": 0.0}, None, 0),
    ({"final_logit_softcapping": 0.25}, 0.25, 0),
    ({"final_logit_softcapping": 0.25, "logits_soft_cap": 0.5}, 0.25, 0),
    ({"final_logit_softcapping": None, "logits_soft_cap": 0.5}, 0.5, 1),
    ({"logits_soft_cap": 0.5}, 0.5, 1),
]


@pytest.mark.parametrize(("settings", "cap", "acted"), CASES)
def test_what_trl_reads_itself_is_left_alone(settings: dict[str, Any], cap: float | None, acted: int) -> None:
    before = witness.totals().get(ID, witness.Count())
    model = with_head(Model(**settings))
    since = witness.totals().get(ID, witness.Count()) - before
    assert (since.called, since.acted) == (1, acted)
    assert_caps(model, cap)


@pytest.mark.parametrize("text_part", [False, True], ids=["config", "text config"])
@pytest.mark.parametrize("settings", [case[0] for case in CASES])
def test_the_config_is_afterwards_as_it_was(settings: dict[str, Any], text_part: bool) -> None:
    model = Model(text_part=text_part, **settings)
    before = [vars(config).copy() for config in (model.config, model.text_config)]
    add_head(model)
    assert [vars(config) for config in (model.config, model.text_config)] == before


def test_the_config_is_as_it_was_after_an_error() -> None:
    model = Model(logits_soft_cap=0.5)
    before = vars(model.text_config).copy()
    # The first call is that of the wrapper.
    configs = iter([model.text_config])
    model.config.get_text_config = lambda: next(configs)
    before["get_text_config"] = model.config.get_text_config
    with pytest.raises(StopIteration):
        add_head(model)
    assert vars(model.text_config) == before


@pytest.mark.parametrize("text_part", [False, True], ids=["config", "text config"])
@pytest.mark.parametrize("name", NAMES)
def test_trl_does_not_cap_the_logits(name: str, text_part: bool, switch: Any) -> None:
    with switch.off():
        assert_caps(with_head(Model(text_part=text_part, **{name: 0.5})), None)
