"""A flattened batch is worth what the padded one is, whatever the attention, the cache and checkpointing are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "bench"))
import layout  # noqa: E402


@pytest.mark.parametrize("release", ["0.16.1", "0.23.0"])
def test_loss_gradients_and_tokens_are_those_of_the_padded_batch(release: str, tmp_path: Path) -> None:
    (place,) = layout.places([release])
    layout.build([place])
    command = [str(place.python), "-W", "ignore", str(HERE / "train_padding_free.py"), str(tmp_path / "out.json")]
    subprocess.run(command, env=place.environment(), check=True, capture_output=True, text=True)
    differences = json.loads((tmp_path / "out.json").read_text())
    assert len(differences) >= 9
    # A sum over 20 tokens.
    assert {name: values for name, values in differences.items() if max(values.values()) > 2e-5} == {}
