"""The output folder of a run, made without TRL."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

CARD = "---\ntags: [trl, dpo]\n---\n### Framework versions\n\n- TRL: 0.16.1\n- Transformers: 4.50.3\n- Pytorch: 2.6.0\n"


def pickled(class_name: str, state: dict[str, Any]) -> bytes:
    """Pickle an object of a class of TRL's that need not be installed."""
    arguments = SimpleNamespace(**state)
    # Protocol 2 writes the name of the class as text.
    text = pickle.dumps(arguments, protocol=2)
    module = f"trl.trainer.{class_name.removesuffix('Config').lower()}_config"
    assert text.count(b"ctypes\nSimpleNamespace\n") == 1
    return text.replace(b"ctypes\nSimpleNamespace\n", f"c{module}\n{class_name}\n".encode())


def output_folder(folder: Path, class_name: str = "DPOConfig", **state: Any) -> Path:
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / "training_args.bin", "w") as archive:
        archive.writestr("training_args/data.pkl", pickled(class_name, state))
    (folder / "README.md").write_text(CARD)
    return folder
