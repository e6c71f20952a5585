"""Run inside one release: one case on a GPU, or on the CPU for a rehearsal.

    python -m gpu.train_on_device OUT.json CASE cuda|cpu on|all|off PATCH... NAME=VALUE...

``on`` applies the patches that are named, ``all`` every patch. OUT.json has what the case measured and the versions of
what it used, or ``skip``: why the case cannot run here.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trl_hotfix

from gpu import cases_adapters, cases_costs, cases_losses, cases_steps
from gpu.runs import CannotRun

PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "trl",
    "deepspeed",
    "flash-attn",
    "bitsandbytes",
    "triton",
    "liger-kernel",
    "vllm",
)

CASES: dict[str, Callable[..., dict[str, Any]]] = {
    case.__name__: case
    for case in (
        cases_adapters.dora,
        cases_adapters.grpo_qlora,
        cases_adapters.qlora,
        cases_adapters.vllm,
        cases_costs.turns,
        cases_losses.compiled,
        cases_losses.flattened,
        cases_losses.fused_head,
        cases_losses.liger_dpo,
        cases_losses.liger_sft,
        cases_losses.precomputed,
        cases_losses.zero,
        cases_steps.grpo_losses,
        cases_steps.offloaded,
    )
}


def versions() -> dict[str, str]:
    """Return the versions of what a case may use, as far as it is installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def main(out: str, case: str, device: str, switch: str, *given: str) -> None:
    patches = [name for name in given if "=" not in name]
    settings = dict(setting.split("=", 1) for setting in given if "=" in setting)
    if switch == "on":
        trl_hotfix.apply(only=patches, strict=True, unknown_body="try")
    elif switch == "all":
        trl_hotfix.apply()
    with tempfile.TemporaryDirectory() as folder:
        try:
            answer = {**CASES[case](folder, device, **settings), "versions": versions()}
        except CannotRun as reason:
            answer = {"skip": str(reason)}
    # A NaN is no JSON.
    strict = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in answer.items()
    }
    Path(out).write_text(json.dumps(strict))


if __name__ == "__main__":
    main(*sys.argv[1:])
