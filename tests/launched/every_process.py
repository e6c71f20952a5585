"""Report the patches in this process, and in processes started in every way that Python and torch have.

python every_process.py                # one line of JSON; what launchers run
python every_process.py START WAY...   # {way: [one report for each process]}; START ``call``: apply() in this process
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from torch.utils.data import DataLoader, Dataset


def report(_: Any = None) -> dict[str, Any]:
    from trl import DPOTrainer

    import trl_hotfix

    on = vars(DPOTrainer)["get_batch_loss_metrics"].__module__ == "trl_hotfix.patching.pickled"
    return {"digest": trl_hotfix.status().digest, "on": on, "process": os.getpid()}


class Rows(Dataset):  # type: ignore[misc, type-arg]
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return report()


def pool(method: str) -> list[Any]:
    with multiprocessing.get_context(method).Pool(1) as workers:
        return workers.map(report, [0])


def executor(method: str) -> list[Any]:
    with ProcessPoolExecutor(1, multiprocessing.get_context(method)) as workers:
        return list(workers.map(report, [0]))


def loader(method: str) -> list[Any]:
    return list(DataLoader(Rows(), batch_size=None, num_workers=1, multiprocessing_context=method))


def torch_spawn() -> list[Any]:
    import torch.multiprocessing as torch_multiprocessing

    answers = multiprocessing.get_context("spawn").SimpleQueue()
    torch_multiprocessing.spawn(send_report, (answers,), nprocs=1)
    return [answers.get()]


def send_report(rank: int, answers: Any) -> None:
    answers.put(report())


def loky() -> list[Any]:
    from joblib import Parallel, delayed

    return list(Parallel(n_jobs=2)(delayed(report)(index) for index in range(2)))


def ray_task_and_actor() -> list[Any]:
    import ray

    ray.init(num_cpus=1, include_dashboard=False, object_store_memory=100_000_000)
    task, actor = ray.remote(report), ray.remote(type("Actor", (), {"look": report}))
    return [ray.get(task.remote()), ray.get(actor.remote().look.remote())]


def command(**environment: str) -> list[Any]:
    process = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, check=True)
    # DeepSpeed first prints which accelerator it found, unless the environment names one.
    return [json.loads(process.stdout.splitlines()[-1])]


WAYS: dict[str, Callable[[], list[Any]]] = {
    "here": lambda: [report()],
    "fork": lambda: pool("fork"),
    "spawn": lambda: pool("spawn"),
    "forkserver": lambda: pool("forkserver"),
    "torch.multiprocessing.spawn": torch_spawn,
    "DataLoader by fork": lambda: loader("fork"),
    "DataLoader by spawn": lambda: loader("spawn"),
    "ProcessPoolExecutor by fork": lambda: executor("fork"),
    "ProcessPoolExecutor by spawn": lambda: executor("spawn"),
    "joblib": loky,
    "Ray": ray_task_and_actor,
    "a command": lambda: command(**os.environ),
    "a command with a clean environment": lambda: command(PATH=os.environ["PATH"]),
}


def report_in_worker(method: Any) -> dict[str, Any]:
    return report()


def spawned_with_a_patched_method() -> list[Any]:
    from trl import DPOTrainer

    with multiprocessing.get_context("spawn").Pool(1) as workers:
        # A bound method is pickled as its instance and its name: Python looks it up in the worker.
        return workers.map(report_in_worker, [DPOTrainer.get_batch_loss_metrics])


WAYS["spawn, given a patched method"] = spawned_with_a_patched_method


def main(start: str = "", *ways: str) -> None:
    if not start:
        # One write, since two ranks share one standard output.
        os.write(1, f"{json.dumps(report())}\n".encode())
        return
    if start == "call":
        import trl_hotfix

        trl_hotfix.apply()
    print(json.dumps({way: WAYS[way]() for way in ways}))


if __name__ == "__main__":
    main(*sys.argv[1:])
