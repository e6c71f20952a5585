"""Where a release is run on a device: on a stack of the bench, or on the Python of a machine without a network."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.releases import layout

OVERLAYS: dict[str, tuple[str, ...]] = {
    "gpu-bitsandbytes": ("bitsandbytes==0.50.2",),
    "gpu-liger": ("liger-kernel==0.6.5",),
    "gpu-deepspeed-0.17.5": ("deepspeed==0.17.5",),
}
"""Packages that only these tests need, on top of a stack, by the name of their folder.

Liger 0.8 refuses transformers below 5; 0.6 runs beside 4.57.
"""

OWN_PYTHON = "TRL_HOTFIX_GPU_PYTHON"
"""The variable with a Python that has torch. The libraries of a stack lie in ``.bench/libraries/STACK``, if they do."""


@dataclass(frozen=True, order=True)
class OnDevice(layout.Place):
    """A release on a GPU, or on the CPU for a rehearsal."""

    has_gpu: bool = False

    @property
    def python(self) -> Path:
        own = os.environ.get(OWN_PYTHON)
        return Path(own) if own else super().python

    def environment(self, *overlays: str) -> dict[str, str]:
        special = layout.settings()["special"].get(self.release, {})
        without = {"overlay", *special.get("environment", {})} if self.has_gpu else set()
        variables = super().environment(*overlays)
        folders = variables["PYTHONPATH"].split(os.pathsep)
        if without:
            folders = [folder for folder in folders if Path(folder).name != special.get("overlay")]
        libraries = layout.BENCH / "libraries" / self.stack
        folders += [str(libraries), str(libraries.with_name("every"))] if OWN_PYTHON in os.environ else []
        kept = {name: value for name, value in variables.items() if name not in without}
        # transformers imports these if they are there, and a machine's own may not fit the libraries of an older stack.
        other_frameworks = {"USE_FLAX": "0", "USE_JAX": "0", "USE_TF": "0", "USE_TORCH": "1"}
        return {**kept, **other_frameworks, "PYTHONPATH": os.pathsep.join(folders)}


def place_of(
    release: str, stack: str | None, overlays: tuple[str, ...], device: str
) -> tuple[OnDevice, tuple[str, ...]]:
    """Return where a release is run, laid out, and all folders that go on top of it."""
    place = OnDevice(release, stack or layout.main_place(release).stack, has_gpu=device == "cuda")
    if OWN_PYTHON in os.environ:
        if not place.overlay.is_dir():
            pytest.skip(f"{place.overlay} is not here: run `make bench RELEASES={release}` where there is a network")
        return place, tuple(name for name in overlays if (layout.BENCH / "overlay" / name).is_dir())
    layout.build([place], report=lambda _: None)
    for name in overlays:
        if name in OVERLAYS:
            layout.build_overlay(name, OVERLAYS[name], python=place.python, report=lambda _: None)
    installed = tuple(name for name in overlays if (layout.BENCH / "overlay" / name).is_dir())
    return place, (*installed, with_cuda(place)) if device == "cuda" else installed


def with_cuda(place: layout.Place) -> str:
    """Lay out torch with the libraries that it needs on a GPU. It finds them only beside itself."""
    torch = f"torch=={layout.versions(place.stack)['torch'].partition('+')[0]}"
    name = f"gpu-{torch.replace('==', '-')}"
    folder = layout.BENCH / "overlay" / name
    if not layout.is_ready(folder, torch):
        layout.uv("pip", "install", "--python", str(place.python), "--target", str(folder), torch)
        (folder / ".ready").write_text(torch)
    return name
