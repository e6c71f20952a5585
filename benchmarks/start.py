"""Measure an interpreter's start with the package installed, and with the start hooks of coverage, autowrapt, ddtrace.

Each variant has a virtual environment of its own. All but two have a ``.pth`` file that does nothing, since every
environment with setuptools or torch has one, and the first ``.pth`` with code costs more than the next.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import measure
from benchmarks.measure import Finding, Result

OTHERS = {"coverage": "7.17.3", "autowrapt": "2.0.0", "ddtrace": "4.16.0"}
BARE, IDLE, OFF, ON, ALONE = "nothing", "another .pth", "unset", "=1", "alone, unset"

FINDERS = "sum('trl_hotfix' in type(finder).__module__ for finder in sys.meta_path)"
LOADED = "any(name.partition('.')[0] == 'trl_hotfix' for name in sys.modules)"


@dataclass(frozen=True)
class Variant:
    """An environment to start Python in. The expression ``proof`` is true if the environment matches its name."""

    packages: tuple[str, ...]
    proof: str
    idle: bool = True
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        return "-".join([*(name.partition("=")[0] for name in self.packages), *["idle"] * self.idle]) or "nothing"


def own_variants() -> dict[str, Variant]:
    """Return the variants that need no packages from an index."""
    off, on = {}, {"TRL_HOTFIX": "1"}
    return {
        BARE: Variant((), "not hasattr(sys, 'idle_pth')", idle=False),
        IDLE: Variant((), "sys.idle_pth"),
        OFF: Variant(("trl-hotfix",), f"sys.idle_pth and has_pth and not {LOADED} and not {FINDERS}", variables=off),
        ON: Variant(("trl-hotfix",), f"sys.idle_pth and {FINDERS} == 1 and 'trl' not in sys.modules", variables=on),
        ALONE: Variant(("trl-hotfix",), f"has_pth and not {LOADED}", idle=False),
    }


def other_hooks() -> dict[str, Variant]:
    """Return the start hooks of other packages, switched off and on."""
    coverage, autowrapt, ddtrace = (f"{name}=={version}" for name, version in OTHERS.items())
    settings = str(measure.WORK / "start" / "coveragerc")
    return {
        "coverage, off": Variant((coverage,), "'coverage' not in sys.modules"),
        "coverage, on": Variant(
            (coverage,),
            "__import__('coverage').Coverage.current() is not None",
            variables={"COVERAGE_PROCESS_START": settings},
        ),
        "autowrapt, off": Variant((autowrapt,), "'autowrapt' in sys.modules and 'wrapt' not in sys.modules"),
        "autowrapt, on": Variant(
            (autowrapt,), "'wrapt' in sys.modules", variables={"AUTOWRAPT_BOOTSTRAP": "nobody_has_this_group"}
        ),
        # ddtrace-run sets these variables before it starts the program. There is no agent.
        "ddtrace-run": Variant(
            (ddtrace,),
            "'ddtrace' in sys.modules",
            variables={"DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false", "DD_REMOTE_CONFIGURATION_ENABLED": "false"},
        ),
    }


class Start:
    """New environments with the wheel of this checkout and the wheels of the other packages."""

    def __init__(self, variants: dict[str, Variant]) -> None:
        self.variants = variants
        self.folder = measure.fresh_folder("start")
        (self.folder / "coveragerc").write_text(f"[run]\ndata_file = {self.folder / 'coverage.data'}\n")
        wheel = build_wheel(self.folder / "dist")
        for variant in variants.values():
            if not (self.folder / variant.folder).exists():
                self._make(variant, wheel)

    def _make(self, variant: Variant, wheel: Path) -> None:
        folder = self.folder / variant.folder
        measure.uv("venv", "--no-project", "--python", sys.executable, str(folder))
        # Our dependencies are left out, since no start loads them. So only the hook differs.
        for package in variant.packages:
            requirement = ["--no-deps", str(wheel)] if package == "trl-hotfix" else [package]
            measure.uv("pip", "install", "--compile-bytecode", "--python", str(self.python(variant)), *requirement)
        for hook in self.packages(variant).glob("_virtualenv.*"):
            hook.unlink()  # This start hook is of uv.
        if variant.idle:
            (self.packages(variant) / "idle.pth").write_text("import sys; sys.idle_pth = True\n")

    def python(self, variant: Variant) -> Path:
        return self.folder / variant.folder / "bin" / "python"

    def packages(self, variant: Variant) -> Path:
        return self.folder / variant.folder / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"

    def environment(self, variant: Variant) -> dict[str, str]:
        variables = dict(variant.variables)
        if variant.packages and variant.packages[0].startswith("ddtrace"):
            variables["PYTHONPATH"] = str(self.packages(variant) / "ddtrace" / "bootstrap")
        return measure.bare_environment(**variables)

    def run(self, name: str, code: str = "pass") -> dict[str, float]:
        variant = self.variants[name]
        return measure.process([self.python(variant), "-c", code], self.environment(variant))

    def check(self, name: str) -> None:
        """Raise ``RuntimeError`` if the variant does not match its name."""
        hook = self.packages(self.variants[name]) / "trl_hotfix_autoapply.pth"
        proof = self.variants[name].proof
        code = f"import os, sys; has_pth = os.path.isfile({str(hook)!r}); sys.exit(0 if {proof} else {proof!r})"
        self.run(name, code)


def build_wheel(folder: Path) -> Path:
    """Build the wheel of this checkout as it would be published, and return its path."""
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(folder),
        measure.CHECKOUT,
    ]
    measure.run(command)
    (wheel,) = folder.glob("*.whl")
    return wheel


def run(*, quick: bool) -> Result:
    start = Start({**own_variants(), **other_hooks()})
    for name in start.variants:
        start.check(name)
    # ddtrace takes a second and empties the processor's caches, so our variants are first measured without it.
    plans = {
        "ours": (list(own_variants()), 30 if quick else 800),
        "others": ([OFF, ON, IDLE, *other_hooks()], 5 if quick else 100),
    }
    goals = {OFF: 0.2, ON: 1.0}
    result = Result(versions=dict(OTHERS))
    for plan, (names, repetitions) in plans.items():
        rounds = measure.run_rounds({name: functools.partial(start.run, name) for name in names}, repetitions)
        result.samples[plan] = measure.as_plain_data(rounds)
        for name in names:
            if name == BARE or (plan == "others" and name == IDLE):
                continue
            base = BARE if name in (IDLE, ALONE) else IDLE
            label = f"{f'trl_hotfix {name}' if name in (OFF, ON, ALONE) else name}, over {base}"
            label += ", beside the others" * (plan == "others" and name in goals)
            goal = goals.get(name) if plan == "ours" else None
            wall, cpu = (measure.difference(rounds, name, base, quantity) for quantity in ("wall_ms", "cpu_ms"))
            result.findings += [Finding(label, wall, "ms", goal), Finding(f"{label}, CPU time", cpu, "ms")]
    return result
