"""Build flash-attn's kernels for one head size and dtype, from the part of its source that the bundle carries.

    python -m gpu.build_flash_attn SOURCE FOLDER

SOURCE has ``csrc`` and ``flash_attn`` of the archive on PyPI; into FOLDER goes what ``import flash_attn`` needs. For
heads of 64 dimensions in bfloat16, on the device that is here, it takes 90 s on 16 cores; all of it takes an hour.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

ONE_DTYPE = "#define FP16_SWITCH(COND, ...) [&] { using elem_type = cutlass::bfloat16_t; return __VA_ARGS__(); }()"
ONE_SIZE = "#define HEADDIM_SWITCH(HEADDIM, ...) [&] { constexpr static int kHeadDim = 64; return __VA_ARGS__(); }()"
LEFT_OUT = ("DROPOUT", "ALIBI", "SOFTCAP", "LOCAL", "UNEVEN_K")
KERNELS = tuple(
    f"flash_{way}_hdim64_bf16{mask}_sm80.cu" for way in ("fwd", "fwd_split", "bwd") for mask in ("", "_causal")
)


def kernel_files() -> tuple[str, ...]:
    """Return the files of the source that are needed, beside headers, in ``csrc/flash_attn``."""
    return ("flash_api.cpp", *(f"src/{name}" for name in KERNELS))


def reduced(switches: str) -> str:
    """Return ``static_switch.h`` with one dtype and one head size. Raises ``ValueError`` for one of another form."""
    for name, one in (("FP16_SWITCH", ONE_DTYPE), ("HEADDIM_SWITCH", ONE_SIZE)):
        switches, count = re.subn(rf"#define {name}\(.*?\}}\(\)", lambda _, one=one: one, switches, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"static_switch.h has {count} definitions of {name}, and not one")
    return switches


def build(source: Path, folder: Path) -> None:
    import torch
    from torch.utils import cpp_extension

    kernels = source / "csrc" / "flash_attn"
    switch = kernels / "src" / "static_switch.h"
    switch.write_text(reduced(switch.read_text()))
    folder.mkdir(parents=True, exist_ok=True)
    work = folder.with_name(f"{folder.name}-build")
    work.mkdir(exist_ok=True)
    major, minor = torch.cuda.get_device_capability()
    disabled = [f"-DFLASHATTENTION_DISABLE_{name}" for name in LEFT_OUT]
    cpp_extension.load(
        name="flash_attn_2_cuda",
        sources=[str(kernels / name) for name in kernel_files()],
        extra_include_paths=[str(kernels), str(kernels / "src"), str(source / "csrc" / "cutlass" / "include")],
        extra_cflags=["-O2", *disabled],
        extra_cuda_cflags=[
            "-O3",
            "-U__CUDA_NO_HALF_OPERATORS__",
            "-U__CUDA_NO_HALF_CONVERSIONS__",
            "-U__CUDA_NO_HALF2_OPERATORS__",
            "-U__CUDA_NO_BFLOAT16_CONVERSIONS__",
            "--expt-relaxed-constexpr",
            "--expt-extended-lambda",
            "--use_fast_math",
            f"-gencode=arch=compute_{major}{minor},code=sm_{major}{minor}",
            *disabled,
        ],
        build_directory=str(work),
    )
    (library,) = work.glob("flash_attn_2_cuda*.so")
    shutil.copytree(source / "flash_attn", folder / "flash_attn", dirs_exist_ok=True)
    version = re.search(r'__version__ = "(.*?)"', (source / "flash_attn" / "__init__.py").read_text())
    assert version is not None
    metadata = folder / f"flash_attn-{version[1]}.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: flash-attn\nVersion: {version[1]}\n")
    # Last: a folder without it is not whole.
    shutil.copy(library, folder / "flash_attn_2_cuda.so")


if __name__ == "__main__":
    build(*(Path(argument).resolve() for argument in sys.argv[1:]))
