"""With TRL_HOTFIX=1 alone, two steps of SGD move the weights under DeepSpeed as they do without it."""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch

from trl_hotfix.relations.engines import deepspeed_config

from bench.releases import layout
from launched import LAUNCHED

SCRIPT = LAUNCHED / "train_under_deepspeed.py"
START_HOOK = layout.CHECKOUT / "trl_hotfix" / "trl_hotfix_autoapply.pth"
MICRO_BATCHES = 4
"""On each rank."""

DROPPED, DIVIDED = "deepspeed-offload-drops-micro-batches", "deepspeed-divides-by-accumulation-twice"


class Run(NamedTuple):
    """How the weights have moved, and the patches of the record by their ids, or what it has as observed."""

    moved: dict[str, torch.Tensor]
    patches: dict[str, Any]


@cache
def run(
    release: str, deepspeed: str = "", stage: int = 0, *, offloads: bool = False, ranks: int = 1, hotfix: str = "0"
) -> Run:
    place = layout.main_place(release)
    overlays = [deepspeed] if deepspeed else []
    layout.build([place], beside=overlays)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks > 1 else []
    with TemporaryDirectory() as folder:
        file = Path(folder, "deepspeed.json")
        file.write_text(json.dumps(deepspeed_config(stage, offloads=offloads)))
        words = [str(SCRIPT), folder, str(MICRO_BATCHES), *([str(file)] if deepspeed else [])]
        environment = place.environment(*overlays)
        # Two builds of DeepSpeed give an extension the same name.
        environment |= {"TORCH_EXTENSIONS_DIR": str(layout.BENCH / f"extensions-{deepspeed}"), "TRL_HOTFIX": hotfix}
        # Python runs no .pth from a folder on PYTHONPATH.
        Path(folder, "sitecustomize.py").write_text(START_HOOK.read_text())
        environment["PYTHONPATH"] = os.pathsep.join([folder, environment["PYTHONPATH"]])
        command = [str(place.python), *launcher, *words]
        process = subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, text=True, timeout=600, check=False
        )
        assert process.returncode == 0, process.stderr
        record = Path(folder, "checkpoint-2", "trl_hotfix.json")
        part = "observed" if hotfix == "observe" else "patches"
        entries = json.loads(record.read_text())[part] if hotfix != "0" else []
        return Run(torch.load(Path(folder, "moved.pt")), {entry["id"]: entry for entry in entries})


def difference(one: Run, other: Run) -> float:
    return max(float((value - other.moved[name]).abs().max()) for name, value in one.moved.items())


@pytest.mark.parametrize(
    ("release", "ranks"),
    [
        ("0.19.1", 1),
        *(
            pytest.param(release, ranks, marks=pytest.mark.matrix)
            for release, ranks in (("1.16.0", 1), ("0.19.1", 2), ("1.16.0", 2))
        ),
    ],
)
def test_no_micro_batch_is_dropped_where_the_optimizer_is_offloaded(release: str, ranks: int) -> None:
    offloaded = {"release": release, "deepspeed": "deepspeed-0.17.5", "stage": 2, "offloads": True, "ranks": ranks}
    patched = run(**offloaded, hotfix="1")
    assert difference(run(**offloaded), run(release, ranks=ranks)) > 1e-3
    assert difference(patched, run(release, ranks=ranks, hotfix="1")) < 1e-6
    entry = patched.patches[DROPPED]
    assert (entry["word"], entry["called"], entry["acted"]) == ("repaired", 2 * MICRO_BATCHES, 2 * (MICRO_BATCHES - 2))


@pytest.mark.matrix
@pytest.mark.parametrize("release", ["0.19.1", "1.16.0"])
def test_an_inherited_step_is_observed_and_left_alone(release: str) -> None:
    offloaded = {"release": release, "deepspeed": "deepspeed-0.17.5", "stage": 2, "offloads": True}
    observed = run(**offloaded, hotfix="observe")
    assert difference(observed, run(**offloaded)) == 0
    entry = observed.patches[DROPPED]
    assert (entry["answer"], sum(entry["called"].values())) == ("hit", 2 * MICRO_BATCHES)


@pytest.mark.matrix
@pytest.mark.parametrize("release", ["0.19.1", "1.16.0"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("stage", "offloads"), [(1, True), (3, True), (1, False), (2, False), (3, False)])
def test_other_stages_are_left_alone(release: str, ranks: int, stage: int, offloads: bool) -> None:
    patched = run(release, "deepspeed-0.17.5", stage, offloads=offloads, ranks=ranks, hotfix="1")
    assert difference(patched, run(release, ranks=ranks, hotfix="1")) < 1e-6
    assert patched.patches[DROPPED]["word"] == "called"


@pytest.mark.matrix
@pytest.mark.parametrize("release", ["0.19.1", "1.16.0"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("stage", "offloads"), [(0, False), (1, False), (2, False), (2, True), (3, False)])
def test_gradients_are_divided_once(release: str, ranks: int, stage: int, offloads: bool) -> None:
    engine = {"deepspeed": "deepspeed-0.18.3", "stage": stage, "offloads": offloads, "ranks": ranks}
    patched = run(release, **engine, hotfix="1")
    assert difference(run(release, **engine), run(release, ranks=ranks)) > 1e-3
    assert difference(patched, run(release, ranks=ranks, hotfix="1")) < 1e-6
    assert patched.patches[DIVIDED]["word"] == "repaired"
    assert patched.patches[DIVIDED]["acted"] == patched.patches[DIVIDED]["called"]
