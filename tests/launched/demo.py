"""The main job: the router auxiliary loss of a MoE model under DPO and DeepSpeed, without and with the patch."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from launched.moe_dpo import train


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            "one process, no DeepSpeed, unpatched": train(Path(folder, "plain.json"), hotfix="0"),
            "DeepSpeed, unpatched": train(Path(folder, "unpatched.json"), "--deepspeed", "0", hotfix="0"),
            "DeepSpeed, TRL_HOTFIX=1": train(Path(folder, "patched.json"), "--deepspeed", "0", hotfix="1"),
        }
    view = Table(title="DPOTrainer, TRL 0.11.4, tiny Mixtral, first training step")
    for column in ("run", "model is a", "loss", "aux_loss", "coefficient", "router gradient norm"):
        view.add_column(column)
    for name, run in runs.items():
        step = run["steps"][0]
        numbers = (step["loss"], step["aux_loss"], run["coefficient"], step["router_gradient"])
        view.add_row(name, step["wrapped_as"], *(f"{number:.7f}" for number in numbers))
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(view)

    unpatched, patched = (runs[name]["steps"][0] for name in ("DeepSpeed, unpatched", "DeepSpeed, TRL_HOTFIX=1"))
    difference = patched["loss"] - unpatched["loss"]
    term = runs["DeepSpeed, TRL_HOTFIX=1"]["coefficient"] * patched["aux_loss"]
    right = abs(difference - term) < 1e-6
    console.print(f"patched - unpatched       {difference:.7f}")
    console.print(f"coefficient * aux_loss    {term:.7f}")
    console.print(f"equal to 1e-6             {right}")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
