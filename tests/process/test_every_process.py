"""Every process of a job has the same repairs, however it is started."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Environment

SCRIPT = str(Path(__file__).with_name("every_process.py"))
LAUNCHERS = {
    "accelerate launch": (
        "-m",
        "accelerate.commands.launch",
        "--cpu",
        "--num_processes",
        "2",
        "--mixed_precision",
        "no",
    ),
    "torchrun": ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"),
    "deepspeed": ("-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--no_local_rank"),
}
WAYS = (
    "here",
    "fork",
    "spawn",
    "forkserver",
    "torch.multiprocessing.spawn",
    "DataLoader by fork",
    "DataLoader by spawn",
    "ProcessPoolExecutor by fork",
    "ProcessPoolExecutor by spawn",
    "joblib",
    pytest.param("Ray", marks=pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")),
    "a command",
)
CLEAN = "a command with a clean environment"
Answers = list[dict[str, Any]]


@pytest.fixture(scope="session")
def answers(installed: Environment) -> Mapping[str, Mapping[str, Answers]]:
    """For the variable, the call and neither: the ways to start processes, and the reports of the started ones."""
    runs = {
        "variable": ((SCRIPT, "all"), {"TRL_HOTFIX": "1"}),
        "call": ((SCRIPT, "all", "apply"), {}),
        "neither": ((SCRIPT, "here"), {}),
        **{name: ((*command, SCRIPT, "here"), {"TRL_HOTFIX": "1"}) for name, command in LAUNCHERS.items()},
    }

    def run(name: str) -> Any:
        arguments, variables = runs[name]
        process = installed.run(*arguments, cwd=None, **variables, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
        lines = [line for line in process.stdout.splitlines() if line.startswith("{")]
        assert process.returncode == 0, process.stderr
        return [json.loads(line) for line in lines]

    with ThreadPoolExecutor(2) as threads:
        answers = dict(zip(runs, threads.map(run, runs), strict=True))
    (variable,), (call,), neither = answers.pop("variable"), answers.pop("call"), answers.pop("neither")
    return {"variable": {**variable, **answers}, "call": call, "neither": {"here": neither}}


@pytest.mark.parametrize("way", [*WAYS, *LAUNCHERS])
def test_the_variable_gives_every_process_one_digest(answers: Any, way: str) -> None:
    (own,), reports = answers["variable"]["here"], answers["variable"][way]
    assert {(answer["digest"], answer["on"]) for answer in reports} == {(own["digest"], True)}
    assert own["digest"] != answers["neither"]["here"][0]["digest"]
    assert way == "here" or own["process"] not in {answer["process"] for answer in reports}
    # On a CPU accelerate starts one process, whatever number it is asked for, unless there is an MPI.
    if way in ("torchrun", "deepspeed"):
        assert len({answer["process"] for answer in reports}) == 2


def test_the_digest_tells_that_a_clean_environment_is_off(answers: Any) -> None:
    ((clean,), (neither,)) = answers["variable"][CLEAN], answers["neither"]["here"]
    assert (clean["digest"], clean["on"]) == (neither["digest"], False)


@pytest.mark.parametrize("way", ["fork", "DataLoader by fork"])
def test_a_call_in_the_parent_reaches_its_forks(answers: Any, way: str) -> None:
    (own,), (forked,) = answers["call"]["here"], answers["call"][way][:1]
    assert (forked["digest"], forked["on"]) == (own["digest"], True)
    assert own["digest"] == answers["variable"]["here"][0]["digest"]


@pytest.mark.parametrize("way", ["spawn", "forkserver", "a command"])
def test_a_call_in_the_parent_does_not_reach_a_new_python(answers: Any, way: str) -> None:
    ((new,), (neither,)) = answers["call"][way], answers["neither"]["here"]
    assert (new["digest"], new["on"]) == (neither["digest"], False)


def test_a_worker_has_the_patches_of_a_method_passed_to_it(answers: Any) -> None:
    (own,), (worker,), (neither,) = (
        answers["call"]["here"],
        answers["call"]["spawn, given a patched method"],
        answers["neither"]["here"],
    )
    assert worker["on"]
    # The worker has the patches of the method, and not the other patches of the parent.
    assert len({worker["digest"], own["digest"], neither["digest"]}) == 3
