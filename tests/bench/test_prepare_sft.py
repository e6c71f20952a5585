"""Three patches wrap ``SFTTrainer._prepare_dataset`` without disturbing each other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "bench"))
import layout  # noqa: E402


@pytest.mark.parametrize("release", ["0.17.0", "1.14.1"])
def test_the_data_are_the_same_in_every_order(release: str, tmp_path: Path) -> None:
    place, *_ = layout.places([release])
    layout.build([place])
    command = [str(place.python), "-W", "ignore", str(HERE / "prepare_sft.py"), str(tmp_path / "out.json")]
    subprocess.run(command, env=place.environment(), check=True, capture_output=True, text=True)
    # Token ids, then the number of them that are trained. 1 is the end of sequence, 3 + n is the word n.
    assert json.loads((tmp_path / "out.json").read_text()) == [
        {
            "messages, formatted": [[[5, 4, 1], 3]],
            "another field, formatted": [[[5, 4, 7, 1], 4]],
            "another field": [[[4, 7, 1], 3]],
            "a pair, formatted": [[[5, 4, 1], 3]],
            "a pair, whose tokenizer ends texts": [[[4, 7, 8, 1, 1], 4]],
            "texts, whose tokenizer ends them": [[[4, 1, 1], 3], [[4, 5, 1, 1], 4]],
        }
    ]
