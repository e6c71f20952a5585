"""A ``torch.nn.DataParallel`` of two GPUs on the CPU. torch's own functions split and join; the copies are slices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.parallel import scatter_gather


class TwoGpus(torch.nn.DataParallel):
    """Calls the model on the parts one after the other. ``rows`` are those of each part, call by call."""

    def __init__(self, module: Any, **options: Any) -> None:
        torch.nn.Module.__init__(self)
        self.module, self.device_ids, self.dim = module, [0, 1], 0
        self.rows: list[list[int]] = []

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        with _on_the_cpu():
            positional, named = scatter_gather.scatter_kwargs(inputs, keywords, self.device_ids)
            self.rows.append([len(part["input_ids"]) for part in named])
            parts = zip(positional, named, strict=True)
            return scatter_gather.gather([self.module(*args, **kwargs) for args, kwargs in parts], "cpu")


@contextmanager
def _on_the_cpu() -> Iterator[None]:
    """Take slices where torch copies to a GPU and back: it splits by ``chunk``, and joins single numbers to a row."""
    kept = scatter_gather.Scatter, scatter_gather.Gather
    scatter = lambda gpus, sizes, dim, tensor: tensor.chunk(len(gpus), dim)  # noqa: E731
    gather = lambda device, dim, *parts: torch.cat([torch.atleast_1d(part) for part in parts], dim)  # noqa: E731
    vars(scatter_gather).update(Scatter=SimpleNamespace(apply=scatter), Gather=SimpleNamespace(apply=gather))
    try:
        yield
    finally:
        vars(scatter_gather).update(Scatter=kept[0], Gather=kept[1])


@contextmanager
def several_gpus() -> Iterator[None]:
    """Let ``Trainer`` wrap its model as it does on a machine with two GPUs, if its ``args._n_gpu`` is 2."""
    kept, torch.nn.DataParallel = torch.nn.DataParallel, TwoGpus  # type: ignore[misc]
    try:
        yield
    finally:
        torch.nn.DataParallel = kept  # type: ignore[misc]
