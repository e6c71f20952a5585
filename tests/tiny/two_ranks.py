"""Two processes of one run, in which the first is this one, so that what acts is seen; the second is a fork of it."""

from __future__ import annotations

import datetime
import gc
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

RANKS, SECONDS = 2, 30


@contextmanager
def rank_of_two(rank: int, folder: str) -> Iterator[None]:
    """Have this process be one of two inside the block."""
    import torch
    from transformers import PreTrainedModel

    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
    # The processes meet in a file. accelerate wants an address nevertheless.
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
    with (
        mock.patch.dict(os.environ, {name: str(value) for name, value in names.items()}),
        # Each rank has a folder of its own, and later releases would write its model on one of them only.
        mock.patch.object(PreTrainedModel, "should_save_on_this_rank", create=True, return_value=True),
    ):
        forget_processes()
        store = torch.distributed.FileStore(str(Path(folder, "store")), RANKS)
        limit = datetime.timedelta(seconds=SECONDS)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=limit)
        try:
            yield
            # Whoever ends first would cut off what the other still reads.
            store.set(f"{rank} has ended", "")
            store.wait([f"{1 - rank} has ended"], limit)
        finally:
            torch.distributed.destroy_process_group()
            forget_processes()


def forget_processes() -> None:
    """Have accelerate ask anew how many processes there are."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    GradientState._reset_state()


def on_two_ranks(work: Callable[[], Any]) -> list[Any]:
    """Return what ``work`` returns in this process, and in another one at the same time."""
    import torch

    def in_fork() -> None:
        # The groups of earlier trainers have no threads here, which their end would wait for.
        gc.freeze()
        with rank_of_two(1, folder):
            torch.save(work(), answer)

    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.pt")
        gc.collect()
        process = multiprocessing.get_context("fork").Process(target=in_fork)
        process.start()
        try:
            with rank_of_two(0, folder):
                own = work()
            process.join(SECONDS)
            return [own, torch.load(answer, weights_only=False)]
        finally:
            process.kill()
            process.join()
