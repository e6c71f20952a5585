"""Train one step with SFTTrainer and one with DPOTrainer without Triton.

The bench installs Triton and its interpreter for 1.15.0. A process without either tells what the module has then, and
the proof gives the module the same.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

from trl_hotfix.authoring import absent, judge, shadowed

import tiny

OVERLAYS = ()
PARITY = True

EQUIVALENT = {
    "_TorchLogProbFunction: `checkpoint(scored, states, weight, bias, labels, use_reentrant=False, "
    "preserve_rng_state=False)` without `preserve_rng_state`": "no random number is drawn there: it only costs time",
    "_TorchLogProbFunction: `checkpoint(scored, states, weight, bias, labels, use_reentrant=False, "
    "preserve_rng_state=False)` -> `checkpoint(scored, states, weight, bias, labels, use_reentrant=False, "
    "preserve_rng_state=True)`": "no random number is drawn there: it only costs time",
}


def train() -> tiny.TrainingResult:
    import trl.trainer.utils

    if not hasattr(trl.trainer.utils, "_ChunkedLogProbFunction"):
        return tiny.TrainingResult(absent("this release scores tokens by other means"))
    errors: list[str] = []

    def record_crash(step: Any) -> tuple[float, dict[str, Any]]:
        try:
            return step()
        except AttributeError as error:
            if "'NoneType' object has no attribute 'apply'" not in str(error):
                raise
            errors.append(str(error))
            return 0.0, {}

    without_triton = shadowed(trl.trainer.utils, "_ChunkedLogProbFunction", None)
    with without_triton if _is_none_without_triton() else nullcontext():
        loss, gradients = record_crash(_sft)
        gradients |= record_crash(_dpo)[1]
    outcome = judge(float(len(errors)), right=0.0, wrong=2.0, errors=errors)
    return tiny.TrainingResult(outcome, None if errors else loss, gradients)


def unaffected() -> tiny.TrainingResult:
    """Train with Triton, or with its interpreter on the bench."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise AssertionError("on the bench, 1.15.0 has Triton's interpreter")
    loss, gradients = _sft()
    return tiny.TrainingResult(absent("Triton runs here"), loss, gradients | _dpo()[1])


@cache
def _is_none_without_triton() -> bool:
    """Return whether the function is None in a process with neither Triton's folder on the path nor its interpreter."""
    spec = importlib.util.find_spec("triton")
    folders = [str(Path(location).parent) for location in (spec.submodule_search_locations if spec else None) or ()]
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [path for path in paths if path and path not in folders]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    code = "import trl.trainer.utils as utils; print('is None:', utils._ChunkedLogProbFunction is None)"
    process = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=True,
    )
    return "is None: True" in process.stdout


def _step(trainer_class: Any, args: Any, dataset: Any) -> tuple[float, dict[str, Any]]:
    """Return loss and gradients of the first step."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = tiny.trainer(
            tiny.measured(trainer_class),
            model=tiny.llama(folder, seed=0),
            args=args,
            train_dataset=dataset,
            tokenizer=tiny.tokenizer(),
        )
        trainer.train()
    return trainer.losses[0], trainer.step.gradients


def _sft() -> tuple[float, dict[str, Any]]:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = [{"text": " ".join(f"w{index + step}" for step in range(4 + index % 3))} for index in range(8)]
    return _step(SFTTrainer, tiny.config(SFTConfig, max_length=16), Dataset.from_list(rows))


def _dpo() -> tuple[float, dict[str, Any]]:
    from trl import DPOConfig, DPOTrainer

    loss, gradients = _step(DPOTrainer, tiny.config(DPOConfig, max_length=16, beta=0.5), tiny.preferences())
    return loss, {f"dpo {name}": gradient for name, gradient in gradients.items()}
