"""Every process of a job has the same repairs, however it is started."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

from helpers import sharing
from launched import LAUNCHED

if TYPE_CHECKING:
    from launched.environments import Environment

SCRIPT = str(LAUNCHED / "every_process.py")
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
COMMON = ("here", "fork", "spawn", "forkserver", "DataLoader by fork", "a command", "torchrun")
RARE = (
    "torch.multiprocessing.spawn",
    "DataLoader by spawn",
    "ProcessPoolExecutor by fork",
    "ProcessPoolExecutor by spawn",
    "joblib",
    # Few have it.
    *(("Ray",) if find_spec("ray") else ()),
    "accelerate launch",
    "deepspeed",
)
CLEAN, PASSED = "a command with a clean environment", "spawn, given a patched method"
Answers = list[dict[str, Any]]


def started(start: str, *ways: str, rare: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """Return the parameters ``start`` and ``way``. Rare ways belong to the matrix."""
    common = [(start, way) for way in ways]
    return pytest.mark.parametrize(
        ("start", "way"), sharing.heavy([*common, *((start, way) for way in rare)], smoke=common)
    )


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest, installed: Environment) -> Mapping[str, Mapping[str, Answers]]:
    """For the variable, the call and neither: the ways to start processes, and the reports of the started ones."""
    selected = [(case["start"], case["way"]) for case in sharing.parameters(request)]
    ways = sharing.by_place([*((start, "here") for start in ("neither", "variable", "call")), *selected])
    launched = [way for way in ways["variable"] if way in LAUNCHERS]

    def lines(*arguments: str, **variables: str) -> list[Any]:
        process = installed.run(*arguments, cwd=None, **variables, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
        assert process.returncode == 0, process.stderr
        return [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]

    def run(name: str) -> Any:
        variables = {} if name in ("neither", "call") else {"TRL_HOTFIX": "1"}
        if name in LAUNCHERS:
            return lines(*LAUNCHERS[name], SCRIPT, **variables)
        (answer,) = lines(SCRIPT, name, *(way for way in ways[name] if way not in launched), **variables)
        return answer

    answers = sharing.side_by_side(run, [*ways, *launched])
    return {**answers, "variable": {**answers["variable"], **{name: answers[name] for name in launched}}}


@started("variable", *COMMON, rare=RARE)
def test_the_variable_gives_every_process_one_digest(answers: Any, start: str, way: str) -> None:
    (own,), reports = answers[start]["here"], answers[start][way]
    assert {(answer["digest"], answer["on"]) for answer in reports} == {(own["digest"], True)}
    assert own["digest"] != answers["neither"]["here"][0]["digest"]
    assert way == "here" or own["process"] not in {answer["process"] for answer in reports}
    # On a CPU accelerate starts one process, whatever number it is asked for, unless there is an MPI.
    if way in ("torchrun", "deepspeed"):
        assert len({answer["process"] for answer in reports}) == 2


@started("variable", CLEAN)
def test_the_digest_tells_that_a_clean_environment_is_off(answers: Any, start: str, way: str) -> None:
    ((clean,), (neither,)) = answers[start][way], answers["neither"]["here"]
    assert (clean["digest"], clean["on"]) == (neither["digest"], False)


@started("call", "fork", rare=("DataLoader by fork",))
def test_a_call_in_the_parent_reaches_its_forks(answers: Any, start: str, way: str) -> None:
    (own,), (forked,) = answers[start]["here"], answers[start][way][:1]
    assert (forked["digest"], forked["on"]) == (own["digest"], True)
    assert own["digest"] == answers["variable"]["here"][0]["digest"]


@started("call", "spawn", rare=("forkserver", "a command"))
def test_a_call_in_the_parent_does_not_reach_a_new_python(answers: Any, start: str, way: str) -> None:
    ((new,), (neither,)) = answers[start][way], answers["neither"]["here"]
    assert (new["digest"], new["on"]) == (neither["digest"], False)


@started("call", PASSED)
def test_a_worker_has_the_patches_of_a_method_passed_to_it(answers: Any, start: str, way: str) -> None:
    (own,), (worker,), (neither,) = answers[start]["here"], answers[start][way], answers["neither"]["here"]
    assert worker["on"]
    # The worker has the patches of the method, and not the other patches of the parent.
    assert len({worker["digest"], own["digest"], neither["digest"]}) == 3
