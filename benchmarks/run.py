"""Run the benchmarks, print a table, and write ``results.json``.

``python -m benchmarks.run [--quick] [NAME...]``. The samples and the picture go to build/, and are not committed.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import subprocess
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks import applying, costs, gain, importing, listing, measure, per_call, plot, proving, start, training

BENCHMARKS: dict[str, ModuleType] = {
    "start": start,
    "list": listing,
    "import": importing,
    "apply": applying,
    "call": per_call,
    "step": training,
    "gain": gain,
    "costs": costs,
    "proving": proving,
}


def machine() -> dict[str, Any]:
    """Return the machine that the benchmarks run on."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def commit() -> str:
    """Return the commit that is checked out, with ``+`` if there are uncommitted changes."""
    outputs = []
    for arguments in (["rev-parse", "HEAD"], ["status", "--porcelain"]):
        git = subprocess.run(["git", *arguments], cwd=measure.CHECKOUT, capture_output=True, text=True, check=False)
        outputs.append(git.stdout.strip())
    return f"{outputs[0] or 'not a git checkout'}{'+' * bool(outputs[1])}"


def measured(name: str, *, quick: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run a benchmark and return its record for ``results.json``, and its samples."""
    import trl_hotfix

    about = {
        "command": f"python -m benchmarks.run{' --quick' * quick} {name}",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "quick": quick,
        "machine": machine(),
        "versions": {"trl_hotfix": trl_hotfix.__version__, "commit": commit()},
    }
    begin = time.monotonic()
    result = BENCHMARKS[name].run(quick=quick)
    about["versions"] |= result.versions
    about["minutes"] = round((time.monotonic() - begin) / 60, 1)
    findings = [
        {
            "what": finding.label,
            "unit": finding.unit,
            **measure.short(dataclasses.asdict(finding.estimate)),
            "goal": finding.goal,
            "verdict": finding.verdict,
        }
        for finding in result.findings
    ]
    summary = {"summary": measure.short(result.summary)} if result.summary else {}
    return {**about, "findings": findings, **summary}, result.samples


def table(name: str, result: dict[str, Any]) -> Table:
    figures = Table(title=f"{name}{' (quick: rough figures)' * result['quick']}", title_justify="left")
    figures.add_column("what", overflow="fold")
    for heading in ("median", "interval", "n", "goal", "verdict"):
        figures.add_column(heading, justify="right", no_wrap=True)
    for finding in result["findings"]:
        interval = f"[{finding['low']:.4g}, {finding['high']:.4g}]"
        coverage = "" if finding["coverage"] >= measure.LEVEL else f" {finding['coverage']:.0%}"
        goal = "" if finding["goal"] is None else f"<= {finding['goal']:g}"
        figures.add_row(
            finding["what"],
            f"{finding['median']:.4g} {finding['unit']}".strip(),
            f"{interval}{coverage}".replace("[", r"\["),
            str(finding["n"]),
            goal,
            finding["verdict"],
        )
    return figures


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(BENCHMARKS)))
@click.option("--quick", is_flag=True, help="Few repetitions, for a look whether all of it works; rough figures.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where all files go. By default results.json goes to benchmarks/, and the samples and the picture to "
    "build/benchmarks/; with --quick all go to build/benchmarks/quick/.",
)
def main(names: tuple[str, ...], quick: bool, out: Path | None) -> None:
    """Measure side by side: all benchmarks, or those of these names."""
    others = out or (measure.WORK / "quick" if quick else measure.WORK)
    out = others if quick else out or Path(__file__).parent
    for folder in (out, others):
        folder.mkdir(parents=True, exist_ok=True)
    file, samples_file = out / "results.json", others / "samples.json"
    known, samples = (
        json.loads(path.read_text(encoding="utf-8"))["benchmarks"] if path.is_file() else {}
        for path in (file, samples_file)
    )
    console = Console()
    console.width = max(console.width, 120)  # This holds for a table that goes into a file, too.
    for name in names or BENCHMARKS:
        known[name], samples[name] = measured(name, quick=quick)
        console.print(table(name, known[name]))
        # The files are written after each benchmark, so that a failure of a later one does not lose the results.
        ordered = {key: known[key] for key in BENCHMARKS if key in known}
        file.write_text(json.dumps({"benchmarks": ordered}, indent=1) + "\n", encoding="utf-8", newline="\n")
        samples_file.write_text(json.dumps({"benchmarks": samples}) + "\n", encoding="utf-8")
        picture = plot.draw(ordered, others)
    console.print(f"{file}\n{samples_file}\n{picture}", soft_wrap=True)


if __name__ == "__main__":
    main()
