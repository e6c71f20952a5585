"""The bundle for a machine with a GPU and no network: what is in it, and that it runs without this checkout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from bench.releases import layout
from gpu import build_flash_attn, bundle

CHECKOUT = Path(__file__).parents[2]

OF_TORCH = ("torch", "torchgen", "functorch", "sympy", "networkx", "mpmath", "typing_extensions.py")
OF_THE_MACHINE = (*OF_TORCH, "numpy", "numpy.libs", "pandas", "pyarrow", "dateutil", "pytz", "tzdata", "six.py")
"""What a machine has by itself: torch for its CUDA, and what datasets needs and is large."""


def gpu(*arguments: str, folder: Path = CHECKOUT / "gpu", python: str = sys.executable) -> tuple[int, str]:
    command = [python, "gpu.py", *arguments]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    finished = subprocess.run(command, cwd=folder, env=kept, capture_output=True, text=True, check=False)
    return finished.returncode, finished.stdout + finished.stderr


def test_each_group_says_what_it_lacks() -> None:
    code, output = gpu("--list")
    assert code == 0, output
    groups = re.findall(r"^([\w-]+): \d+ of \d+ passed on this device$", output, re.MULTILINE)
    assert groups[:2] == ["seeds", "liger"]
    assert groups[-1] == "costs"
    code, output = gpu("--list", "sedes")
    assert code == 1
    assert "no group sedes; there are: seeds, liger" in output


def test_the_releases_are_those_that_the_tests_name() -> None:
    releases = bundle.releases_of_the_tests()
    assert {"0.11.4", "0.12.2", "1.16.0"} <= set(releases)
    assert set(releases) <= set(layout.releases())


def test_a_file_that_is_there_twice_is_stored_once(tmp_path: Path) -> None:
    root, content = tmp_path / "root", os.urandom(100_000)
    for name in ("one/a.bin", "other/a.bin", "other/__pycache__/a.pyc"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    (root / "one" / "empty").touch()
    bundle.pack(root, tmp_path / "packed.tar.xz", 0)
    assert (tmp_path / "packed.tar.xz").stat().st_size < 110_000
    with tarfile.open(tmp_path / "packed.tar.xz") as packed:
        packed.extractall(tmp_path, filter="data")
    top = tmp_path / bundle.TOP
    unpacked = {path.relative_to(top) for path in top.rglob("*") if path.is_file()}
    assert unpacked == {Path("one/a.bin"), Path("other/a.bin"), Path("one/empty")}
    assert (top / "other" / "a.bin").read_bytes() == content


def test_an_older_transformers_takes_numpy_2(tmp_path: Path) -> None:
    table = tmp_path / "transformers" / "dependency_versions_table.py"
    table.parent.mkdir()
    table.write_text('deps = {\n    "numpy": "numpy>=1.17,<2.0",\n    "tokenizers": "tokenizers>=0.19,<0.20",\n}\n')
    bundle._relax_numpy(tmp_path)
    assert (
        table.read_text() == 'deps = {\n    "numpy": "numpy>=1.17",\n    "tokenizers": "tokenizers>=0.19,<0.20",\n}\n'
    )


def test_flash_attn_is_reduced_to_one_size_and_one_dtype() -> None:
    switch = "#define {}(COND, ...) \\\n  [&] {{ \\\n    return __VA_ARGS__(); \\\n  }}()\n"
    reduced = build_flash_attn.reduced(switch.format("FP16_SWITCH") + switch.format("HEADDIM_SWITCH") + "// the end\n")
    assert reduced == f"{build_flash_attn.ONE_DTYPE}\n{build_flash_attn.ONE_SIZE}\n// the end\n"
    with pytest.raises(ValueError, match="0 definitions of HEADDIM_SWITCH"):
        build_flash_attn.reduced(switch.format("FP16_SWITCH"))


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the folder of a bundle for this Python, and a Python that has torch, numpy, pandas and pyarrow alone."""
    folder = tmp_path_factory.mktemp("bundle")
    place = layout.main_place("0.22.0")
    layout.build([place], report=lambda _: None)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "clean"], check=True)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    source, target = (
        Path(venv, f"lib/python{version}/site-packages") for venv in (place.python.parents[1], folder / "clean")
    )
    metadata = [path.name for path in source.glob("*.dist-info") if path.name.partition("-")[0] in OF_THE_MACHINE]
    for name in (*OF_THE_MACHINE, *metadata):
        if (source / name).exists():
            (target / name).symlink_to(source / name)
    archive = folder / "bundle.tar.xz"
    command = [sys.executable, "-m", "gpu.bundle", "--python", version, "--preset", "0", str(archive)]
    finished = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    return folder / bundle.TOP, str(folder / "clean" / "bin" / "python")


@pytest.mark.matrix
def test_the_bundle_runs_what_a_cpu_can_and_names_the_rest(unpacked: tuple[Path, str]) -> None:
    folder, python = unpacked
    code, output = gpu(
        "--rehearse", "--jobs", "2", "seeds", "liger", "deepspeed", "heads", folder=folder, python=python
    )
    assert code == 0, output
    assert "failed" not in output
    ends = dict(re.findall(r"^[\w-]+: (test_\S+): (passed|skipped)", output, re.MULTILINE))
    assert {test.partition("[")[0] for test, end in ends.items() if end == "passed"} == {
        "test_a_precomputed_reference_is_in_the_loss",
        "test_the_auxiliary_loss_is_in_the_loss_under_zero",
        "test_accumulated_gradients_reach_an_offloaded_optimizer",
    }
    assert {test.partition("[")[0] for test, end in ends.items() if end == "skipped"} == {
        "test_ligers_cross_entropy_is_that_of_transformers",
        "test_ligers_dpo_loss_of_a_flattened_batch_is_a_number",
        "test_the_base_model_keeps_every_bit_beside_vllm",
        "test_trls_own_head_has_the_loss_of_the_models_logits",
    }
    code, output = gpu(folder=folder, python=python)
    assert code == 1
    assert "torch sees no CUDA device here; --rehearse runs on a CPU" in output


@pytest.mark.matrix
def test_all_headers_of_flash_attn_that_its_kernels_name_are_in_the_bundle(unpacked: tuple[Path, str]) -> None:
    source = unpacked[0] / "flash-attn" / "csrc" / "flash_attn"
    named = {
        header
        for path in source.rglob("*")
        if path.is_file()
        for header in re.findall(r'^\s*#include "(\w+\.(?:h|cuh))"', path.read_text(), re.MULTILINE)
    }
    beside = {path.name for path in source.rglob("*") if path.is_file()}
    # The first is CUDA's, the second stands in a branch for builds of another namespace.
    assert named - beside <= {"cuda_runtime.h", "flash_namespace_config.h"}
    assert {"philox.cuh", "philox_unpack.cuh", "static_switch.h"} <= beside
