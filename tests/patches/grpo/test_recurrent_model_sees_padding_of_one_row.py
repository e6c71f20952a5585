"""A recurrent model scores a row that is alone in its batch without its padding; all other calls stay as they are."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trl_hotfix.testing import default_arguments, stub_trainer, trainer_and_config

import tiny

ID = "recurrent-model-sees-padding-of-one-row"
NAMES = ("_full_logits_logps", "_get_per_token_logps", "_get_per_token_logps_and_entropies")
MODULES = {name: importlib.import_module(f"trl.trainer.{name.lower()}_trainer") for name in ("GRPO", "RLOO")}
TYPES = ["bamba", "falcon_h1", "granitemoehybrid", "lfm2", "lfm2_moe", "mamba2", "olmo_hybrid", "qwen3_5"]
TYPES += ["qwen3_5_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"]
PADDED, FULL, SHORT = [0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1]


class Model(torch.nn.Module):
    """A model that keeps what it is called with. A logit is the number of columns up to its token."""

    def __init__(self, model_type: str = "mamba2", *, text: str | None = None) -> None:
        super().__init__()
        self.config = SimpleNamespace(model_type=model_type, get_text_config=lambda: self.config)
        if text is not None:
            self.config.get_text_config = lambda: SimpleNamespace(model_type=text)
        self.head = torch.nn.Parameter(torch.tensor([[0.0], [1.0]]))
        self.calls: list[dict[str, Any]] = []

    def forward(self, logits_to_keep: int = 0, **arguments: Any) -> Any:
        self.calls.append(arguments)
        ids = arguments["input_ids"]
        logits = torch.ones(*ids.shape, 1).cumsum(1) @ self.head.T
        logits = logits[:, -logits_to_keep:]
        return SimpleNamespace(logits=logits, log_probs=logits[:, :-1].log_softmax(-1)[..., 1])

    def get_output_embeddings(self) -> Any:
        return SimpleNamespace(weight=self.head, bias=None)


def scorer_of(name: str) -> tuple[Any, Any, str]:
    trainer_class, config_class = trainer_and_config(MODULES[name], name)
    method = next((each for each in NAMES if each in vars(trainer_class)), None)
    if method is None:
        pytest.skip("in this release this trainer computes no log-probs by token")
    return trainer_class, config_class, method


def scored(model: Any, masks: list[list[int]], batch_size: int | None = None, name: str = "GRPO", **more: Any) -> Any:
    """Score the last two tokens of rows with these masks. Return the trainer, and the log-probs."""
    trainer_class, config_class, method = scorer_of(name)
    trainer = stub_trainer(
        trainer_class,
        default_arguments(config_class, report_to=[], temperature=1.0),
        model=model,
        model_kwarg_keys={"logits_to_keep"},
        _is_vlm=False,
        state=SimpleNamespace(global_step=0),
    )
    trainer.accelerator.autocast = torch.enable_grad
    mask = torch.tensor(masks)
    # The same tokens in each row, counted from the end.
    ids = torch.arange(mask.shape[1]).flip(0) % 2 * mask
    outputs = getattr(trainer, method)(model, ids, mask, 2, batch_size=batch_size, **more)
    return trainer, outputs[0] if isinstance(outputs, tuple) else outputs


def acts(trainer: Any, name: str = "GRPO") -> int | None:
    trainer_class, _, method = scorer_of(name)
    return tiny.acts(ID, f"{trainer_class.__module__}:{trainer_class.__name__}.{method}", trainer)


def widths(model: Model) -> list[int]:
    """Return the columns that each call of the model had."""
    for call in model.calls:
        assert call["input_ids"].shape == call["attention_mask"].shape
    return [call["input_ids"].shape[1] for call in model.calls]


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("batch_size", [None, 1])
def test_a_row_alone_loses_its_padding(name: str, batch_size: int | None) -> None:
    model = Model()
    trainer, log_probs = scored(model, [PADDED], batch_size, name)
    assert widths(model) == [3]
    assert model.calls[0]["attention_mask"].tolist() == [[1, 1, 1]]
    assert acts(trainer, name) == 1
    _, expected = scored(Model(), [[1, 1, 1]], batch_size, name)
    assert log_probs.equal(expected)


def test_without_the_patch_the_model_sees_the_padding(switch: Any) -> None:
    model = Model()
    with switch.off():
        scored(model, [PADDED])
    assert widths(model) == [5]


def test_each_row_of_batches_of_one_loses_its_own(switch: Any) -> None:
    model = Model()
    trainer, log_probs = scored(model, [PADDED, FULL, SHORT], 1)
    assert widths(model) == [3, 5, 4]
    assert acts(trainer) == 1
    for row, mask in enumerate(([1, 1, 1], FULL, [1, 1, 1, 1])):
        with switch.off():
            assert log_probs[row : row + 1].equal(scored(Model(), [mask])[1])


def test_the_last_row_that_no_batch_has_room_for_is_alone() -> None:
    model = Model()
    scored(model, [PADDED, SHORT, PADDED], 2)
    assert widths(model) == [5, 3]


@pytest.mark.parametrize(
    ("masks", "batch_size"),
    [
        ([PADDED, SHORT], None),
        ([PADDED, SHORT], 2),
        ([PADDED, SHORT, FULL, FULL], 2),
        ([FULL], None),
        ([FULL, FULL], 1),
    ],
)
def test_several_rows_and_rows_without_padding_stay(masks: list[list[int]], batch_size: int | None) -> None:
    model = Model()
    trainer, _ = scored(model, masks, batch_size)
    assert set(widths(model)) == {5}
    assert acts(trainer) == 0


def test_padding_behind_the_completion_stays() -> None:
    model = Model()
    scored(model, [[0, 1, 1, 1, 0]])
    assert model.calls[0]["attention_mask"].tolist() == [[1, 1, 1, 0]]


@pytest.mark.parametrize("model_type", TYPES)
def test_each_recurrent_model_is_known(model_type: str) -> None:
    model = Model(model_type)
    scored(model, [PADDED])
    assert widths(model) == [3]


def test_the_text_model_of_a_vision_model_is_asked() -> None:
    model = Model("lfm2_vl", text="lfm2")
    scored(model, [PADDED])
    assert widths(model) == [3]


@pytest.mark.parametrize("model", [Model("llama"), Model("mamba"), Model("lfm2", text="llama")])
def test_other_models_stay(model: Model) -> None:
    trainer, _ = scored(model, [PADDED])
    assert widths(model) == [5]
    assert acts(trainer) == 0


def test_a_config_without_a_text_config_is_its_own() -> None:
    model = Model()
    model.config = SimpleNamespace(model_type="mamba2")
    wrapper = importlib.import_module("trl_hotfix.patches.grpo.recurrent_model_sees_padding_of_one_row")
    assert wrapper._is_recurrent(model)
    assert not wrapper._is_recurrent(torch.nn.Linear(1, 1))


def test_what_is_given_for_each_token_is_cut_too() -> None:
    trainer_class, _, method = scorer_of("GRPO")
    import inspect

    name = "token_type_ids"
    if name not in inspect.signature(inspect.unwrap(getattr(trainer_class, method))).parameters:
        pytest.skip("this release passes no token types")
    model, types = Model(), torch.tensor([[0, 1, 2, 3, 4]])
    scored(model, [PADDED], **{name: types})
    assert model.calls[0][name].tolist() == [[2, 3, 4]]


def test_images_stay_whole() -> None:
    wrapper = importlib.import_module("trl_hotfix.patches.grpo.recurrent_model_sees_padding_of_one_row")
    mask, pixels = torch.tensor([PADDED]), torch.zeros(1, 3, 2, 2)
    found = wrapper._without_padding({"attention_mask": mask, "pixel_values": pixels, "use_cache": False})
    assert found["pixel_values"] is pixels
    assert found["use_cache"] is False
    assert found["attention_mask"].tolist() == [[1, 1, 1]]


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_it_holds_in_an_evaluation_and_for_a_wrapped_model(training: bool) -> None:
    inner = Model().train(training)

    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = inner

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.module(*args, **kwargs)

        def get_output_embeddings(self) -> Any:
            return inner.get_output_embeddings()

    trainer_class, config_class, method = scorer_of("GRPO")
    trainer = stub_trainer(
        trainer_class,
        default_arguments(config_class, report_to=[], temperature=1.0),
        model=inner,
        model_kwarg_keys={"logits_to_keep"},
        _is_vlm=False,
        state=SimpleNamespace(global_step=0),
    )
    trainer.accelerator.autocast = torch.enable_grad
    trainer.accelerator.unwrap_model = lambda model, *args, **kwargs: getattr(model, "module", model)
    wrapped = Wrapped()
    wrapped.config = inner.config
    getattr(trainer, method)(wrapped, torch.ones(1, 5, dtype=torch.long), torch.tensor([PADDED]), 2)
    assert widths(inner) == [3]
