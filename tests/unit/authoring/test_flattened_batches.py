from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from trl_hotfix.authoring import (
    MASKABLE,
    attention_keeps_apart,
    block_diagonal,
    flattened_batches,
    in_rows,
    isolated,
    places_in_rows,
    sequence_numbers,
    why_sequences_mix,
)
from trl_hotfix.testing import tiny_attention_model


def a_model(attention: str, model_type: str = "llama", **config: object) -> SimpleNamespace:
    return SimpleNamespace(config=SimpleNamespace(_attn_implementation=attention, model_type=model_type, **config))


@pytest.mark.parametrize("attention", ["flash_attention_2", "flash_attention_3", "kernels-community/flash-attn"])
def test_with_flash_attention_the_batch_is_unchanged(attention: str) -> None:
    assert attention_keeps_apart(a_model(attention)) == "flash"
    assert attention_keeps_apart(a_model(attention, "unheard_of")) == "flash"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_decoder_with_sdpa_or_eager_gets_a_mask(attention: str) -> None:
    assert "llama" in MASKABLE
    assert attention_keeps_apart(a_model(attention)) == "mask"
    assert attention_keeps_apart(a_model(attention, "qwen2", sliding_window=4, use_sliding_window=False)) == "mask"


@pytest.mark.parametrize(
    "model",
    [
        a_model("flex_attention"),
        a_model("sdpa", "mistral", sliding_window=4),
        a_model("sdpa", "gemma", layer_types=["full_attention", "sliding_attention"]),
        a_model("sdpa", "mamba"),
        a_model("sdpa", auto_map={}),
        SimpleNamespace(),
        SimpleNamespace(peft_config={"default": SimpleNamespace(is_prompt_learning=True)}, **vars(a_model("sdpa"))),
    ],
)
def test_any_other_model_is_padded(model: SimpleNamespace) -> None:
    assert attention_keeps_apart(model) == "pad"


def test_a_flattened_batch_has_a_mask() -> None:
    torch = pytest.importorskip("torch")
    positions = torch.tensor([[0, 1, 0, 0, 1], [0, 1, 2, 0, 0]])
    assert sequence_numbers(positions).tolist() == [[0, 0, 1, 2, 2], [0, 0, 0, 1, 2]]
    first, second = block_diagonal(positions, torch.float32)
    assert (first[0] == 0).long().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 1, 1],
    ]
    assert (second[0] == 0).long().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 0, 1],
    ]


def a_batch_of_four_sequences() -> dict[str, Any]:
    torch = pytest.importorskip("torch")
    positions = torch.tensor([[0, 1, 0, 0, 1, 2, 0]])
    return {
        "input_ids": torch.tensor([[3, 4, 5, 6, 7, 8, 9]]),
        "labels": torch.tensor([[-100, 4, -100, -100, 7, 8, -100]]),
        "position_ids": positions,
        "cu_seq_lens_q": positions,
        "max_length_q": 3,
        "num_items_in_batch": 3,
    }


def test_a_flattened_batch_has_rows_of_one_sequence() -> None:
    batch = a_batch_of_four_sequences()
    rows = in_rows(batch, places_in_rows(batch["position_ids"], several=False))
    assert rows.pop("num_items_in_batch") == 3
    assert {name: value.tolist() for name, value in rows.items()} == {
        "input_ids": [[3, 4, 0], [5, 0, 0], [6, 7, 8], [9, 0, 0]],
        "labels": [[-100, 4, -100], [-100, -100, -100], [-100, 7, 8], [-100, -100, -100]],
        "position_ids": [[0, 1, 0], [0, 0, 0], [0, 1, 2], [0, 0, 0]],
        "attention_mask": [[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 0, 0]],
    }


def test_a_flattened_batch_has_rows_of_several_sequences() -> None:
    batch = a_batch_of_four_sequences()
    places = places_in_rows(batch["position_ids"], several=True)
    rows = in_rows(batch, places)
    assert rows["input_ids"].tolist() == [[6, 7, 8], [3, 4, 5], [9, 0, 0]]
    assert rows["position_ids"].tolist() == [[0, 1, 2], [0, 1, 0], [0, 0, 0]]
    assert rows["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 1], [1, 0, 0]]
    assert rows["input_ids"][places].tolist() == batch["input_ids"][0].tolist()


def test_the_mask_does_not_grow_with_the_square_of_the_tokens() -> None:
    torch = pytest.importorskip("torch")
    positions = torch.arange(512).repeat(8)[None]
    batch = {"input_ids": positions, "position_ids": positions}
    rows = in_rows(batch, places_in_rows(positions, several=True))
    assert block_diagonal(rows["position_ids"], torch.bfloat16).numel() == positions.numel() * 512


def test_an_isolated_model_computes_each_sequence_alone() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    model = tiny_attention_model()
    ids, positions = torch.tensor([[3, 4, 5, 6, 7]]), torch.tensor([[0, 1, 0, 1, 2]])
    together = isolated(model, positions, torch.float32)(input_ids=ids, position_ids=positions).logits
    apart = [model(input_ids=ids[:, :2]).logits, model(input_ids=ids[:, 2:]).logits]
    assert torch.allclose(together, torch.cat(apart, dim=1), atol=1e-6)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (SimpleNamespace(_is_stateful=True), "carry a state"),
        (SimpleNamespace(active_peft_config=SimpleNamespace(is_prompt_learning=True)), "prompt tuning"),
    ],
)
def test_the_reason_why_sequences_mix_is_named(model: Any, reason: str) -> None:
    assert reason in str(why_sequences_mix(model))


def test_a_mask_separates_sequences_only_without_a_cache() -> None:
    transformers = pytest.importorskip("transformers")
    if hasattr(transformers, "DataCollatorWithFlattening"):
        assert why_sequences_mix(a_model("flash_attention_2")) is None
    model = tiny_attention_model()
    assert why_sequences_mix(model) is not None
    separates = hasattr(transformers, "masking_utils")
    assert (why_sequences_mix(model, no_cache=True) is None) == separates


class ModelOfLayers:
    """A model that counts how often its submodules are walked through."""

    def __init__(self, *layers: object) -> None:
        self.config = SimpleNamespace(_attn_implementation="sdpa")
        self.layers, self.walks = layers, 0

    def modules(self) -> tuple[object, ...]:
        self.walks += 1
        return self.layers


def test_the_submodules_of_a_model_are_walked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flattened_batches, "_mask_separates", lambda: True)
    model, other = ModelOfLayers(), ModelOfLayers()
    reasons = {why_sequences_mix(model, no_cache=True) for _ in range(3)}
    assert reasons == {"the model builds its attention mask itself"}
    assert model.walks == 1
    why_sequences_mix(other, no_cache=True)
    assert (model.walks, other.walks) == (1, 1)
    # What can change without another model is looked at in each call.
    model.config._attn_implementation = "flash_attention_2"
    assert why_sequences_mix(model, no_cache=True) not in reasons
    assert model.walks == 1


def test_a_model_is_not_kept_alive_by_what_is_known_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flattened_batches, "_mask_separates", lambda: True)
    model = ModelOfLayers()
    why_sequences_mix(model, no_cache=True)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_a_model_that_peft_has_wrapped_is_looked_at_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    peft = pytest.importorskip("peft")
    monkeypatch.setattr(flattened_batches, "_mask_separates", lambda: True)
    walks: list[object] = []
    model = tiny_attention_model()
    reason = why_sequences_mix(model, no_cache=True)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=1, target_modules=["q_proj"]))
    modules = type(wrapped).modules
    monkeypatch.setattr(type(wrapped), "modules", lambda self: walks.append(self) or modules(self))
    assert [why_sequences_mix(wrapped, no_cache=True) for _ in range(2)] == [reason] * 2
    assert len(walks) == 1
    monkeypatch.setattr(peft.LoraConfig, "is_prompt_learning", True)
    assert "prompt tuning" in str(why_sequences_mix(wrapped, no_cache=True))


WITH_POSITIONS = """
def forward(self, position_ids):
    return create_causal_mask(config=self.config, position_ids=position_ids)
"""
AMONG_OTHERS = """
def forward(self, position_ids):
    mask_kwargs = {"config": self.config, "position_ids": position_ids}
    return create_causal_mask(**mask_kwargs)
"""
WITHOUT_POSITIONS = """
def forward(self, position_ids):
    mask_kwargs = {"config": self.config}
    return create_causal_mask(**mask_kwargs), rotary(position_ids=position_ids)
"""
ONLY_CONFIG = """
def forward(self, position_ids):
    return create_causal_mask(config=self.config)
"""


@pytest.mark.parametrize(
    ("code", "is_given"),
    [
        (WITH_POSITIONS, True),
        (AMONG_OTHERS, True),
        (WITH_POSITIONS + AMONG_OTHERS, True),
        (WITHOUT_POSITIONS, False),
        (ONLY_CONFIG, False),
        (WITH_POSITIONS + ONLY_CONFIG, False),
        ("", False),
    ],
)
def test_a_mask_separates_sequences_only_where_it_is_made_with_their_positions(
    code: str, is_given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("modeling_made_up")
    if code:
        # Without a file there is no text, so nothing is known.
        module.__file__ = str(tmp_path / "modeling_made_up.py")
        Path(module.__file__).write_text(code)
    vars(module)["create_causal_mask"] = print
    monkeypatch.setitem(sys.modules, "modeling_made_up", module)
    monkeypatch.setattr(flattened_batches, "_mask_separates", lambda: True)
    model = ModelOfLayers(type("Layer", (), {"__module__": "modeling_made_up"})())
    reason = why_sequences_mix(model, no_cache=True)
    assert (reason is None) == is_given
    assert is_given or "without the position_ids" in str(reason)
