"""The padding of a prompt changes no log-prob: each method that scores gives the positions that ``generate`` gave."""

from __future__ import annotations

import importlib
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trl_hotfix.testing import default_arguments, stub_trainer, trainer_and_config, wrapped_like_deepspeed

KEPT = 3
"""The number of columns of the completions."""

COLUMNS = torch.arange(6)
FIRST, END = torch.tensor([[2], [0], [1], [1]]), torch.tensor([[6], [5], [6], [4]])
MASK = ((COLUMNS >= FIRST) & (COLUMNS < END)).long()
"""Prompts and completions of one to three tokens each: the padding is on both sides."""

BATCHES = (torch.arange(24).view(4, 6) * torch.tensor([3, 4, 5, 7]).view(4, 1, 1)) % 11
POSITIONS = {"right": (COLUMNS - FIRST).clamp(min=0), "wrong": COLUMNS.expand(4, 6)}

scorers = pytest.mark.parametrize(
    ("method", "scorer"),
    [
        ("GRPO", "_get_per_token_logps"),
        ("GRPO", "_get_per_token_logps_and_entropies"),
        ("GRPO", "_get_last_hidden_state"),
        ("GRPO", "_chunked_logps"),
        ("RLOO", "_get_per_token_logps_and_entropies"),
    ],
)


def table(rows: int, columns: int, phase: float) -> Any:
    return torch.nn.Parameter(torch.sin(torch.arange(float(rows * columns)) + phase).view(rows, columns))


def log_probs_of(head: Any, hidden: Any, tokens: Any) -> Any:
    return (hidden @ head.T).log_softmax(-1).gather(-1, tokens[:, -KEPT:, None])[..., 0]


class Decoder(torch.nn.Module):
    """A decoder whose embedding of a token depends on its position. ``given`` has the positions of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = table(11, 4, 0.0), table(6, 4, 0.5)
        self.given: list[Any] = []

    def forward(self, input_ids: Any, position_ids: Any = None, **unused: Any) -> Any:
        self.given.append(position_ids)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1]).expand(input_ids.shape)
        positions = torch.nn.functional.embedding(position_ids, self.positions)
        return SimpleNamespace(last_hidden_state=self.tokens[input_ids] + positions)


class Model(torch.nn.Module):
    """A model with a decoder, by both of TRL's names, and a head. It computes log-probs as TRL's own head does."""

    def __init__(self, model_type: str | None = "gpt2", **attributes: Any) -> None:
        super().__init__()
        self.model, self.head = Decoder(), table(11, 4, 1.0)
        self.config = SimpleNamespace(**{"model_type": model_type} if model_type else {})
        self.config.get_text_config = lambda: self.config
        self.__dict__.update(attributes)

    base_model = property(lambda self: self.model)

    @property
    def given(self) -> list[Any]:
        found: list[Any] = self.model.given
        return found

    def get_output_embeddings(self) -> Any:
        return SimpleNamespace(weight=self.head, bias=None)

    def forward(self, logits_to_keep: int = 0, fused_lm_head: bool = False, **inputs: Any) -> Any:
        outputs = SimpleNamespace(logits=(self.model(**inputs).last_hidden_state @ self.head.T)[:, -logits_to_keep:])
        if fused_lm_head:
            labels = inputs["labels"][:, 1:].clamp(min=0)
            outputs.log_probs = outputs.logits[:, :-1].log_softmax(-1).gather(2, labels[..., None])[..., 0]
        return outputs

    def formula(self, tokens: Any, positions: Any) -> Any:
        """Return the log-probs of the completions with the tokens at these positions."""
        hidden = self.model.tokens[tokens] + self.model.positions[positions]
        return log_probs_of(self.head, hidden[:, -KEPT - 1 : -1], tokens)


class Case:
    """A trainer with a method that scores. The model can be another one than the policy, such as its reference."""

    def __init__(self, method: str, scorer: str, model: Any = None) -> None:
        try:
            module = importlib.import_module(f"trl.trainer.{method.lower()}_trainer")
        except ImportError:
            pytest.skip("this release has no such trainer")
        trainer_class, config_class = trainer_and_config(module, method)
        if scorer not in vars(trainer_class):
            pytest.skip("this release scores by another method")
        self.model = Model() if model is None else model
        settings = default_arguments(config_class, report_to=[], temperature=1.0)
        self.trainer = stub_trainer(trainer_class, settings, model=self.model, _is_vlm=False)
        self.trainer.model_kwarg_keys = {"logits_to_keep"}
        self.trainer.accelerator.autocast = torch.enable_grad
        # TRL 0.27 labels the timing of the forward with the step.
        self.trainer.state = SimpleNamespace(global_step=0)
        self.scorer = scorer

    @property
    def score(self) -> Any:
        """TRL's method, patched or not."""
        return getattr(self.trainer, self.scorer)

    def scored(self, tokens: Any = BATCHES[0], mask: Any = MASK, *, model: Any = None, **settings: Any) -> Any:
        """Return the log-probs of the completions by TRL's method."""
        model = self.model if model is None else model
        outputs = self.score(model, tokens, mask, KEPT, **settings)
        outputs = outputs[0] if isinstance(outputs, tuple) else outputs
        # What is no log-prob yet is the hidden state before each token.
        return log_probs_of(model.get_output_embeddings().weight, outputs, tokens) if outputs.dim() == 3 else outputs

    def assert_is(self, kind: str, log_probs: Any, tokens: Any = BATCHES[0], model: Any = None) -> None:
        """Compare the log-probs of all rows, and their gradients, with those of the formula."""
        model = self.model if model is None else model
        trained_on = MASK[:, -KEPT:]
        expected = model.formula(tokens, POSITIONS[kind])
        torch.testing.assert_close(log_probs * trained_on, expected * trained_on)
        weights = list(model.parameters())
        weighted = trained_on * torch.linspace(0.1, 1.0, 12).view(4, KEPT)
        found = torch.autograd.grad((log_probs * weighted).sum(), weights)
        torch.testing.assert_close(found, torch.autograd.grad((expected * weighted).sum(), weights))


@scorers
@pytest.mark.parametrize("model_type", ["gpt2", "gpt_bigcode", "gpt_neo", "xglm"])
def test_log_probs_and_gradients_are_those_without_padding(method: str, scorer: str, model_type: str) -> None:
    case = Case(method, scorer, Model(model_type))
    case.assert_is("right", case.scored())


@scorers
def test_each_micro_batch_of_each_trainer_has_its_own_positions(method: str, scorer: str) -> None:
    cases = [Case(method, scorer), Case(method, scorer)]
    for tokens, step, training in zip(BATCHES, (0, 0, 1, 1), (True, False, True, False), strict=True):
        for case in cases:
            case.trainer.state.global_step = step
            case.model.train(training)
            case.assert_is("right", case.scored(tokens), tokens)


@scorers
def test_trl_counts_the_padding(method: str, scorer: str, switch: Any) -> None:
    case = Case(method, scorer)
    with switch.off():
        case.assert_is("wrong", case.scored())
        assert case.model.given == [None]


@scorers
def test_the_positions_count_from_the_first_token_and_are_0_before_it(method: str, scorer: str) -> None:
    case = Case(method, scorer)
    case.scored()
    (positions,) = case.model.given
    assert positions.dtype == torch.long
    assert positions.tolist() == [[0, 0, 0, 1, 2, 3], [0, 1, 2, 3, 4, 4], [0, 0, 1, 2, 3, 4], [0, 0, 1, 2, 2, 2]]


@scorers
def test_the_reference_has_the_same_positions(method: str, scorer: str) -> None:
    case, reference = Case(method, scorer), Model("xglm")
    case.model.config.model_type = "llama"
    case.assert_is("right", case.scored(model=reference), model=reference)
    assert not case.model.given


@scorers
def test_rows_that_are_scored_one_at_a_time_have_their_own_positions(method: str, scorer: str) -> None:
    case = Case(method, scorer)
    parameters = inspect.signature(case.score).parameters
    if "batch_size" not in parameters:
        pytest.skip("this method scores all rows at a time")
    case.assert_is("right", case.scored(batch_size=1))
    assert torch.cat(case.model.given).shape == (4, 6)


@scorers
def test_arguments_can_be_given_by_name(method: str, scorer: str) -> None:
    case = Case(method, scorer)
    names = list(inspect.signature(case.score).parameters)[:4]
    if any(inspect.signature(case.score).parameters[name].kind.name.startswith("VAR") for name in names):
        pytest.skip("this method takes all arguments but the model as they come")
    outputs = case.score(**dict(zip(names, (case.model, BATCHES[0], MASK, KEPT), strict=True)))
    outputs = outputs[0] if isinstance(outputs, tuple) else outputs
    assert outputs.shape[:2] == (4, KEPT)
    assert case.model.given[0] is not None


@scorers
@pytest.mark.parametrize(
    "model",
    [
        lambda: Model("llama"),
        lambda: Model("opt"),
        lambda: Model(None),
        lambda: Model(active_peft_config=SimpleNamespace(is_prompt_learning=True)),
    ],
    ids=["llama", "opt", "no type", "prompt learning"],
)
def test_other_models_are_given_no_positions(method: str, scorer: str, model: Any) -> None:
    case = Case(method, scorer, model())
    case.assert_is("wrong", case.scored())
    assert case.model.given == [None]


@scorers
def test_an_adapter_that_learns_no_prompt_is_given_positions(method: str, scorer: str) -> None:
    case = Case(method, scorer, Model(active_peft_config=SimpleNamespace(is_prompt_learning=False)))
    case.assert_is("right", case.scored())


@scorers
def test_rows_without_padding_have_the_log_probs_of_trl(method: str, scorer: str, switch: Any) -> None:
    case, mask = Case(method, scorer), torch.ones(4, 6, dtype=torch.long)
    patched = case.scored(mask=mask)
    with switch.off():
        assert patched.equal(case.scored(mask=mask))


@scorers
def test_a_model_that_is_wrapped_for_training_is_called_through_its_wrapper(method: str, scorer: str) -> None:
    case = Case(method, scorer)
    wrapped = wrapped_like_deepspeed(case.model)
    case.trainer.accelerator.unwrap_model = lambda model, *args, **kwargs: getattr(model, "module", model)
    if scorer in ("_get_last_hidden_state", "_chunked_logps"):
        wrapped = case.trainer.accelerator.unwrap_model(wrapped)  # as TRL does
    calls: list[Any] = []
    wrapped.register_forward_hook(lambda *args: calls.append(args))
    case.assert_is("right", case.scored(model=wrapped))
    assert len(calls) == (wrapped is not case.model)


class Adapter(torch.nn.Module):
    """An adapter, whose ``model`` and ``base_model`` are no decoder, and whose layers are within the decoder."""

    def __init__(self, plain: Model) -> None:
        super().__init__()
        self.plain, self.config = plain, plain.config

    model = base_model = property(lambda self: self.plain)

    def get_base_model(self) -> Model:
        return self.plain

    def get_output_embeddings(self) -> Any:
        return self.plain.get_output_embeddings()

    def forward(self, **inputs: Any) -> Any:
        return self.plain(**inputs)


@scorers
def test_beneath_an_adapter_the_decoder_is_given_positions(method: str, scorer: str) -> None:
    case = Case(method, scorer)
    case.assert_is("right", case.scored(model=Adapter(case.model)))
