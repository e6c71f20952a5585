"""Under strict all ranks end, or none: real processes, of which one has no repair, or dies."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from helpers import sharing
from launched import LAUNCHED, TESTS

if TYPE_CHECKING:
    from launched.environments import Environment

SCRIPT = str(LAUNCHED / "strict_ranks.py")
BUG = "moe-aux-loss-lost-under-deepspeed"
PATIENCE = 6

# What one rank does; the steps that the ranks take, None if they train; a line of rank 0.
CASES = {
    "nothing": (None, ""),
    "skips another": (None, ""),
    "skips it": (0, rf"rank {{it}}: {BUG} is r\d on rank 0, not on there"),
    "is off": (0, r"rank {it}: no answer within 6 s \(TRL_HOTFIX_PATIENCE\): no trl_hotfix is on there"),
    "only one is strict": (None, ""),
    "overrides it": (1, rf"rank {{it}}: {BUG}: unreached \(overridden\): .*Overrides.get_batch_loss_metrics"),
    "fails in a step": (4, rf"{BUG}: failed \(wrapper-error\)"),
    "two fail": (4, rf"{BUG}: failed \(wrapper-error\)"),
    "trained before": (None, ""),
    "dies at the beginning": (0, r"rank {it}: no answer within 6 s \(TRL_HOTFIX_PATIENCE\): no trl_hotfix is on there"),
}
RUNS = [(2, 1, case) for case in CASES] + [(4, 2, "skips it"), (4, 3, "overrides it"), (4, 1, "fails in a step")]
RUNS += [(2, 0, "skips it"), (2, 0, "overrides it"), (2, 0, "dies at the beginning"), (4, 2, "dies at the beginning")]
SMOKE = [(2, 1, "nothing"), (2, 1, "overrides it"), (4, 2, "skips it"), (2, 1, "fails in a step")]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.mark.parametrize(("world", "it", "case"), sharing.heavy(RUNS, smoke=SMOKE))
def test_all_ranks_end_or_none(installed: Environment, tmp_path: Path, world: int, it: int, case: str) -> None:
    steps, line = CASES[case]
    variables = {
        **os.environ,
        "PYTHONPATH": str(TESTS),
        "TRL_HOTFIX": "1" if case == "only one is strict" else "strict",
        "TRL_HOTFIX_PATIENCE": str(PATIENCE),
        "TRL_HOTFIX_LOG": "quiet",
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "ACCELERATE_USE_CPU": "true",
    }
    processes = [
        subprocess.Popen(
            [installed.python, SCRIPT, str(tmp_path), case, str(it)],
            env={**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        said = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    codes = [process.returncode for process in processes]
    taken = [re.findall(r"^steps: (\d+)$", out, re.MULTILINE) for out, _ in said]
    if steps is None:
        assert (codes, taken) == ([0] * world, [["6"]] * world), said
        assert "strict mode" not in "".join(err for _, err in said)
        return
    assert 0 not in codes, said
    hears = [rank for rank in range(world) if rank != it or case not in ("is off", "dies at the beginning")]
    for rank in hears:
        err = said[rank][1]
        assert taken[rank] == [str(steps)], said
        assert err.count("NotAppliedError: strict mode: training ") == 1, err
    if it == 0 and case == "skips it":
        line = rf"rank 1: {BUG} is not on on rank 0, r\d there"
    if 0 in hears:
        assert re.search(line.format(it=it), said[0][1]), said[0][1]
