"""The proof: one step of SFTTrainer and one of DPOTrainer where there is no Triton.

The bench has Triton for 1.15.0, and its interpreter. A process without either says what the module has then; here it is
given the same.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

from trl_hotfix.authoring import absent, judge, shadowed

import tiny

OVERLAYS = ()
PARITY = True


def train() -> tiny.TrainingResult:
    import trl.trainer.utils as leaf

    if not hasattr(leaf, "_ChunkedLogProbFunction"):
        return tiny.TrainingResult(absent("this release scores tokens by other means"))
    errors: list[str] = []

    def tried(step: Any) -> tuple[float, dict[str, Any]]:
        try:
            return step()
        except AttributeError as error:
            if "'NoneType' object has no attribute 'apply'" not in str(error):
                raise
            errors.append(str(error))
            return 0.0, {}

    with shadowed(leaf, "_ChunkedLogProbFunction", None) if _is_none_without_triton() else nullcontext():
        loss, gradients = tried(_sft)
        gradients |= tried(_dpo)[1]
    outcome = judge(float(len(errors)), right=0.0, wrong=2.0, errors=errors)
    return tiny.TrainingResult(outcome, None if errors else loss, gradients)


def unaffected() -> tiny.TrainingResult:
    """Where Triton runs: on the bench, its interpreter."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise AssertionError("on the bench, 1.15.0 has Triton's interpreter")
    loss, gradients = _sft()
    return tiny.TrainingResult(absent("Triton runs here"), loss, gradients | _dpo()[1])


@cache
def _is_none_without_triton() -> bool:
    """What a process says that has no Triton: neither its folder on the path, nor its interpreter."""
    spec = importlib.util.find_spec("triton")
    folders = [str(Path(where).parent) for where in (spec.submodule_search_locations if spec else None) or ()]
    kept = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each and each not in folders]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    code = "import trl.trainer.utils as leaf; print('is None:', leaf._ChunkedLogProbFunction is None)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "PYTHONPATH": os.pathsep.join(kept)},
        capture_output=True,
        text=True,
        check=True,
    )
    return "is None: True" in done.stdout


def _step(trainer_class: Any, args: Any, data: Any, **others: Any) -> tuple[float, dict[str, Any]]:
    import tempfile

    losses: list[float] = []

    class Measured(trainer_class):
        def compute_loss(self, *args, **kwargs):
            result = super().compute_loss(*args, **kwargs)
            losses.append(float((result[0] if isinstance(result, tuple) else result).detach()))
            return result

    with tempfile.TemporaryDirectory() as folder:
        model = tiny.llama(folder, seed=0)
        trainer = tiny.trainer(Measured, model=model, args=args, train_dataset=data, tokenizer=tiny.tokenizer())
        seen = tiny.FirstStep(trainer.model)
        trainer.train()
    return losses[0], seen.gradients


def _sft() -> tuple[float, dict[str, Any]]:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = [{"text": " ".join(f"w{index + step}" for step in range(4 + index % 3))} for index in range(8)]
    return _step(SFTTrainer, tiny.config(SFTConfig, max_length=16), Dataset.from_list(rows))


def _dpo() -> tuple[float, dict[str, Any]]:
    from trl import DPOConfig, DPOTrainer

    loss, gradients = _step(DPOTrainer, tiny.config(DPOConfig, max_length=16, beta=0.5), tiny.preferences())
    return loss, {f"dpo {name}": gradient for name, gradient in gradients.items()}
