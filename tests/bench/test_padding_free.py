"""A flattened batch trains as the padded one does, whatever the attention, the cache and checkpointing are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from trl_hotfix.authoring import attention_keeps_apart, block_diagonal, padded

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "bench"))
import layout  # noqa: E402


@pytest.mark.parametrize("release", ["0.16.1", "0.23.0"])
def test_a_flattened_batch_equals_the_padded_one(release: str, tmp_path: Path) -> None:
    (place,) = layout.places([release])
    layout.build([place])
    command = [str(place.python), "-W", "ignore", str(HERE / "train_padding_free.py"), str(tmp_path / "out.json")]
    subprocess.run(command, env=place.environment(), check=True, capture_output=True, text=True)
    differences = json.loads((tmp_path / "out.json").read_text())
    assert len(differences) >= 9
    # The tolerance is for a sum over 20 tokens.
    assert {name: difference for name, difference in differences.items() if max(difference.values()) > 2e-5} == {}


def model_with(attention: str, model_type: str = "llama", **config: object) -> SimpleNamespace:
    return SimpleNamespace(config=SimpleNamespace(_attn_implementation=attention, model_type=model_type, **config))


@pytest.mark.parametrize("attention", ["flash_attention_2", "flash_attention_3", "kernels-community/flash-attn"])
def test_flash_attention_keeps_the_batch(attention: str) -> None:
    assert attention_keeps_apart(model_with(attention)) == "flash"
    assert attention_keeps_apart(model_with(attention, "unheard_of")) == "flash"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_sdpa_and_eager_decoders_get_a_mask(attention: str) -> None:
    assert attention_keeps_apart(model_with(attention)) == "mask"
    assert attention_keeps_apart(model_with(attention, "qwen2", sliding_window=4, use_sliding_window=False)) == "mask"


@pytest.mark.parametrize(
    "model",
    [
        model_with("flex_attention"),
        model_with("sdpa", "mistral", sliding_window=4),
        model_with("sdpa", "gemma", layer_types=["full_attention", "sliding_attention"]),
        model_with("sdpa", "mamba"),
        model_with("sdpa", auto_map={}),
        SimpleNamespace(),
    ],
)
def test_other_models_are_padded(model: SimpleNamespace) -> None:
    assert attention_keeps_apart(model) == "pad"


def test_the_mask_and_the_padding_of_a_flattened_batch() -> None:
    torch = pytest.importorskip("torch")
    positions = torch.tensor([[0, 1, 0, 0, 1]])
    sees = block_diagonal(positions, torch.float32)[0, 0] == 0
    assert sees.long().tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]
    ids, labels = torch.tensor([[3, 4, 5, 6, 7]]), torch.tensor([[-100, 4, -100, -100, 7]])
    batch = padded({"input_ids": ids, "labels": labels, "position_ids": positions, "cu_seq_lens_q": positions})
    assert {name: value.tolist() for name, value in batch.items()} == {
        "input_ids": [[3, 4], [5, 0], [6, 7]],
        "labels": [[-100, 4], [-100, -100], [-100, 7]],
        "attention_mask": [[1, 1], [1, 0], [1, 1]],
    }
