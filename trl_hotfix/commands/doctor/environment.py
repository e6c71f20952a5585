"""Inspect this Python: its TRL and the packages beside it, its ``.pth`` files and its packs."""

from __future__ import annotations

import os
import platform
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from packaging.version import InvalidVersion, Version

from ...catalogue import packs
from ...errors import plain
from ...matching import installation, versions
from ...settings import site_folders
from ..common import unsupported
from .answer import Pack, Problems, PthFile, Python, Trl

PACKAGES = (
    *("torch", "transformers", "accelerate", "peft", "deepspeed", "vllm", "flash-attn", "liger-kernel", "datasets"),
    "wrapt",
)


PATCHERS = {
    "unsloth": "generates trainers again from TRL's source text, without our patches",
    "unsloth-zoo": "replaces methods of TRL's trainers when unsloth is imported",
    "axolotl": "wraps methods of trainers, and has trainers of its own",
    "liger-kernel": "replaces the forward and the loss of transformers' models",
    "llamafactory": "has trainers of its own that override TRL's methods",
    "ms-swift": "deletes and overrides methods of TRL's trainers",
}
"""Distributions that change TRL or transformers when they are imported."""


LOOK = "states conflicted, displaced and unreached in trl_hotfix.status() after it was imported"


def this_python() -> Python:
    flags = {
        "-S": sys.flags.no_site,
        "-E": sys.flags.ignore_environment,
        "-I": sys.flags.isolated,
        "-P": getattr(sys.flags, "safe_path", False),
        "-s": sys.flags.no_user_site,
    }
    return Python(
        version=f"{platform.python_implementation()} {platform.python_version()}",
        executable=sys.executable,
        platform=platform.platform(),
        flags=[flag for flag, is_set in flags.items() if is_set],
    )


def installed_trl(problems: Problems) -> Trl:
    version = versions.installed("trl")
    if version is None:
        problems.add(
            f"TRL is not installed in the environment of {sys.executable}",
            f"install TRL {versions.SUPPORTED} there, or run trl_hotfix with the Python that has it",
        )
        return Trl(version=None, supported=False, kind=None, folder=None, others=[])
    supported, kinds = False, []
    try:
        parsed = Version(version)
        supported = not unsupported(version)
        kinds = ["development version"] * parsed.is_devrelease + ["fork"] * (parsed.local is not None)
    except InvalidVersion:
        kinds = ["not a version"]
    if not supported:
        problems.add(f"TRL {plain(version)} is not supported", f"install TRL {versions.SUPPORTED}")
    # The folder that `import trl` would take is looked up, and TRL is not imported.
    folder, checkout = installation.folder_of(installation.imported_spec()), None
    with suppress(metadata.PackageNotFoundError):
        checkout = installation.editable_checkout(metadata.distribution("trl"))
    if checkout is not None:
        kinds.append("editable checkout")
    mismatch = installation.mismatch()
    if mismatch is not None:
        problems.add(
            mismatch,
            "one of the two is on the path by mistake: look at PYTHONPATH, the working folder, and for two installs",
        )
    if folder is None:
        problems.add(f"TRL {version} has metadata, but `import trl` finds no package", "install TRL again")
    kind = ", ".join(kinds) or "release"
    return Trl(version=version, supported=supported, kind=kind, folder=folder, others=_other_installations(folder))


def _other_installations(folder: str | None) -> list[str]:
    """Return the folders of all further TRLs on the path, and those that metadata describe."""
    described = [str(distribution.locate_file("trl")) for distribution in metadata.distributions(name="trl")]
    on_path = [
        str(Path(entry or os.curdir, "trl")) for entry in sys.path if Path(entry, "trl", "__init__.py").is_file()
    ]
    real = {os.path.realpath(other): other for other in reversed([*on_path, *described])}
    return [other for path, other in real.items() if folder is None or path != os.path.realpath(folder)][::-1]


def pth_files() -> list[PthFile]:
    """Return the names of the files that run, or add to the path, at every start of this Python."""
    return [
        PthFile(folder=folder, name=path.name, ours="trl_hotfix" in path.name)
        for folder in dict.fromkeys(site_folders())
        for path in sorted(Path(folder).glob("*.pth"))
    ]


def installed_packs(pack_names: str | None) -> list[Pack]:
    """Return the installed packs. We import nothing of them."""
    named = packs.named(pack_names, os.environ)
    releases = {
        (pack.name, f"{pack.dist.name}=={pack.dist.version}" if pack.dist is not None else "?")
        for pack in metadata.entry_points(group=packs.GROUP)
    }
    return [Pack(name=plain(name), release=plain(release), named=name in named) for name, release in sorted(releases)]
