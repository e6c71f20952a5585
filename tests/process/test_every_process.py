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
def found(installed: Environment) -> Mapping[str, Mapping[str, Answers]]:
    """For the variable, the call and neither: each way to start a process, and what is on in those it started."""
    runs = {
        "variable": ((SCRIPT, "all"), {"TRL_HOTFIX": "1"}),
        "call": ((SCRIPT, "all", "apply"), {}),
        "neither": ((SCRIPT, "here"), {}),
        **{name: ((*command, SCRIPT, "here"), {"TRL_HOTFIX": "1"}) for name, command in LAUNCHERS.items()},
    }

    def run(name: str) -> Any:
        arguments, variables = runs[name]
        done = installed.run(*arguments, cwd=None, **variables, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in lines]

    with ThreadPoolExecutor(2) as threads:
        answers = dict(zip(runs, threads.map(run, runs), strict=True))
    (variable,), (call,), neither = answers.pop("variable"), answers.pop("call"), answers.pop("neither")
    return {"variable": {**variable, **answers}, "call": call, "neither": {"here": neither}}


@pytest.mark.parametrize("way", [*WAYS, *LAUNCHERS])
def test_with_the_variable_every_process_has_the_same_digest_and_is_patched(found: Any, way: str) -> None:
    (own,), answers = found["variable"]["here"], found["variable"][way]
    assert {(each["digest"], each["on"]) for each in answers} == {(own["digest"], True)}
    assert own["digest"] != found["neither"]["here"][0]["digest"]
    assert way == "here" or own["process"] not in {each["process"] for each in answers}
    # accelerate makes one process of ours on a CPU, whatever it is asked for, unless there is an MPI.
    if way in ("torchrun", "deepspeed"):
        assert len({each["process"] for each in answers}) == 2


def test_a_command_with_a_clean_environment_is_not_patched_and_its_digest_says_so(found: Any) -> None:
    ((clean,), (neither,)) = found["variable"][CLEAN], found["neither"]["here"]
    assert (clean["digest"], clean["on"]) == (neither["digest"], False)


@pytest.mark.parametrize("way", ["fork", "DataLoader by fork"])
def test_a_call_in_the_parent_reaches_what_is_forked_from_it(found: Any, way: str) -> None:
    (own,), (forked,) = found["call"]["here"], found["call"][way][:1]
    assert (forked["digest"], forked["on"]) == (own["digest"], True)
    assert own["digest"] == found["variable"]["here"][0]["digest"]


@pytest.mark.parametrize("way", ["spawn", "forkserver", "a command"])
def test_a_call_in_the_parent_alone_does_not_reach_a_new_python_and_its_digest_says_so(found: Any, way: str) -> None:
    ((new,), (neither,)) = found["call"][way], found["neither"]["here"]
    assert (new["digest"], new["on"]) == (neither["digest"], False)


def test_a_worker_that_is_given_a_patched_method_has_its_patches(found: Any) -> None:
    (own,), (worker,), (neither,) = (
        found["call"]["here"],
        found["call"]["spawn, given a patched method"],
        found["neither"]["here"],
    )
    assert worker["on"]
    # Those of the method, and not the others that are on in the parent.
    assert len({worker["digest"], own["digest"], neither["digest"]}) == 3
