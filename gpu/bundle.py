"""Make one archive for a machine that has a GPU, its own torch for CUDA, and no network: ``make gpu-bundle``.

    python -m gpu.bundle [--python 3.12] [--cuda 130] [--releases 0.11.4,1.16.0] [--preset 9] OUT.tar.xz

It holds trl_hotfix as its wheel has it, the tests of ``tests/gpu``, the releases of TRL that these name, the libraries
of their stacks for that Python, bitsandbytes with the one library for that CUDA, and flash-attn's source for one head
size and dtype. torch, numpy, pandas and pyarrow are the machine's own. ``gpu.py`` in it runs everything.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from bench.releases import layout
from gpu import build_flash_attn, places

CHECKOUT = Path(__file__).parents[1]
OF_THE_MACHINE = {
    "torch",
    "triton",
    "numpy",
    "pandas",
    "pyarrow",
    "setuptools",
    "sympy",
    "networkx",
    "mpmath",
    "hf-xet",
}
"""What a stack has and the bundle leaves out: it is large and the machine's own is as good, or nobody needs it."""

EVERY = ("wrapt==2.5.2", "msgspec==0.22.0", "click==8.3.0", "rich==15.0.0", "markdown-it-py==4.3.0", "mdurl==0.1.2",
    "pygments==2.21.0", "pyyaml==6.0.3", "packaging==26.3", "filelock==4.2.11", "pytest==8.4.2", "pluggy==1.6.0",
    "iniconfig==2.1.0")  # fmt: skip
"""What trl_hotfix and its tests need, in whatever stack."""

FLASH_ATTN = "flash-attn==2.8.3.post2"
FILES = ("tests/gpu", "tests/tiny", "gpu", "bench/__init__.py", "bench/releases", "bench/proving/__init__.py",
    "bench/proving/running.py", "bench/results/__init__.py", "bench/results/gpu_record.py", "benchmarks/__init__.py",
    "benchmarks/turns.py", "LICENSE")  # fmt: skip
SCRIPTS = ("gpu/gpu.py", "gpu/README.txt")
TOP = "trl-hotfix-gpu"


def releases_of_the_tests() -> tuple[str, ...]:
    """Return the releases that ``tests/gpu`` names, oldest first."""
    text = (CHECKOUT / "tests" / "gpu" / "test_on_gpu.py").read_text()
    named = set(re.findall(r'"(\d+\.\d+\.\d+)"', text))
    return tuple(release for release in layout.releases() if release in named)


def collect(root: Path, releases: Iterable[str], python: str, cuda: str) -> None:
    """Lay out in ``root`` what the archive holds."""
    _wheel(root)
    for name in FILES:
        _copy(CHECKOUT / name, root / name)
    for name in SCRIPTS:
        _copy(CHECKOUT / name, root / Path(name).name)
    (root / "pytest.ini").write_text(
        "[pytest]\npythonpath = . tests\naddopts = --import-mode=importlib --strict-markers -ra\n"
    )
    (root / "COMMIT").write_text(_git("describe", "--always", "--dirty", "--exclude=*") + "\n")
    record = CHECKOUT / "evidence" / "gpu.json"
    (root / "evidence").mkdir()
    if record.is_file():
        _copy(record, root / "evidence" / "gpu.json")
    libraries, overlay = root / ".bench" / "libraries", root / ".bench" / "overlay"
    _install(libraries / "every", EVERY, python)
    for stack in dict.fromkeys(layout.main_place(release).stack for release in releases):
        pinned = layout.versions(stack)
        _install(
            libraries / stack, [f"{name}=={pinned[name]}" for name in pinned if name not in OF_THE_MACHINE], python
        )
        _relax_numpy(libraries / stack)
    for release in releases:
        _install(overlay / release, [f"trl=={release}"], python)
    on_top = {**places.OVERLAYS, "deepspeed": tuple(layout.settings()["overlays"]["deepspeed"])}
    for name, packages in on_top.items():
        _install(overlay / name, packages, python)
    _one_library_of_bitsandbytes(overlay / "gpu-bitsandbytes", cuda)
    _flash_attn(root / "flash-attn")


def _wheel(root: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        layout.uv("build", "--wheel", "--out-dir", folder, str(CHECKOUT))
        (wheel,) = Path(folder).glob("*.whl")
        zipfile.ZipFile(wheel).extractall(root)


def _install(folder: Path, packages: Iterable[str], python: str) -> None:
    """Install packages for that Python, without what they require: the lock of a stack is complete."""
    # DeepSpeed has no wheel, and nothing to compile with DS_BUILD_OPS=0.
    source = ("--only-binary", ":all:", "--no-binary", "deepspeed", "--no-build-isolation-package", "deepspeed")
    layout.uv(
        "pip", "install", "--no-deps", "--target", str(folder), "--python-version", python,
        "--python-platform", "x86_64-manylinux_2_28", *source, *packages,
        DS_BUILD_OPS="0",
    )  # fmt: skip


def _relax_numpy(folder: Path) -> None:
    """Have an older transformers take the machine's numpy 2, with which its torch and pandas are built."""
    table = folder / "transformers" / "dependency_versions_table.py"
    table.write_text(re.sub(r'("numpy": "numpy>=[\d.]+),<2\.0"', r'\1"', table.read_text()))


def _one_library_of_bitsandbytes(folder: Path, cuda: str) -> None:
    kept = {f"libbitsandbytes_cuda{cuda}.so", "libbitsandbytes_cpu.so"}
    libraries = list((folder / "bitsandbytes").glob("libbitsandbytes_*.so"))
    missing = kept - {library.name for library in libraries}
    if missing:
        found = ", ".join(sorted(library.name for library in libraries))
        raise SystemExit(f"bitsandbytes has no {', '.join(sorted(missing))}; --cuda has to be one of: {found}")
    for library in libraries:
        if library.name not in kept:
            library.unlink()


def _flash_attn(folder: Path) -> None:
    """Take from flash-attn's archive what one head size and dtype need."""
    with tempfile.TemporaryDirectory() as downloads:
        # Its setup.py wants torch and, without this variable, a compiler.
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation", "--no-binary",
             ":all:", "--dest", downloads, FLASH_ATTN],
            env={**os.environ, "FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"}, check=True, capture_output=True,
        )  # fmt: skip
        (archive,) = Path(downloads).glob("*.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(downloads, filter="data")
        (source,) = Path(downloads).glob("flash_attn-*/")
        kernels = Path("csrc", "flash_attn")
        sources = [kernels / name for name in build_flash_attn.kernel_files()]
        for path in (Path("csrc", "cutlass", "include"), Path("flash_attn"), Path("LICENSE"), *sources):
            _copy(source / path, folder / path)
        for header in (*(source / kernels / "src").glob("*.h"), *(source / kernels / "src").glob("*.cuh")):
            _copy(header, folder / header.relative_to(source))


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, target)


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=CHECKOUT, capture_output=True, text=True, check=True).stdout.strip()


def pack(root: Path, archive: Path, preset: Any) -> None:
    """Pack a folder. A file that is there twice is stored once, and files of one name lie side by side."""
    stored: dict[str, str] = {}
    with tarfile.open(archive, "w:xz", preset=preset, format=tarfile.PAX_FORMAT) as packed:
        for path in sorted(_files(root), key=lambda path: (path.name, path.as_posix())):
            member = packed.gettarinfo(path, f"{TOP}/{path.relative_to(root)}")
            member.uid = member.gid = member.mtime = 0
            member.uname = member.gname = ""
            # What uv has linked is no link of this archive.
            member.type, member.linkname, member.size = tarfile.REGTYPE, "", path.stat().st_size
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            if digest in stored and member.size:
                member.type, member.linkname, member.size = tarfile.LNKTYPE, stored[digest], 0
                packed.addfile(member)
                continue
            stored[digest] = member.name
            with path.open("rb") as stream:
                packed.addfile(member, stream)


def _files(root: Path) -> Iterator[Path]:
    for path in root.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts and "bin" not in path.relative_to(root).parts:
            yield path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path, help="where the archive goes")
    parser.add_argument("--python", default="3.12", help="the Python of the machine (default: 3.12)")
    parser.add_argument("--cuda", default="130", help="the CUDA of its torch, for bitsandbytes (default: 130)")
    parser.add_argument("--releases", help="of TRL, with commas (default: those that tests/gpu names)")
    parser.add_argument("--preset", type=int, default=9, help="of xz: 1 is quick, 9 is small (default: 9)")
    given = parser.parse_args()
    releases = given.releases.split(",") if given.releases else releases_of_the_tests()
    given.archive.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, TOP)
        root.mkdir()
        collect(root, releases, given.python, given.cuda)
        pack(root, given.archive, given.preset)
    size = given.archive.stat().st_size / 2**20
    print(
        f"{given.archive}: {size:.1f} MiB, TRL {', '.join(releases)}, for Python {given.python} and CUDA {given.cuda}"
    )


if __name__ == "__main__":
    main()
