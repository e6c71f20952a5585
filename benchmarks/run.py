"""Run the benchmarks, print a table, and write ``results.json`` and ``results.svg``.

``python benchmarks/run.py [--quick] [NAME...]``
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

import applying
import gain
import listing
import measure
import per_call
import plot
import start
import training

BENCHMARKS: dict[str, ModuleType] = {
    "start": start,
    "list": listing,
    "apply": applying,
    "call": per_call,
    "step": training,
    "gain": gain,
}


def machine() -> dict[str, Any]:
    """What it was measured on."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.is_file() else []
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
    """The commit that is checked out, with ``+`` if something is not committed."""
    said = []
    for words in (["rev-parse", "HEAD"], ["status", "--porcelain"]):
        done = subprocess.run(["git", *words], cwd=measure.CHECKOUT, capture_output=True, text=True, check=False)
        said.append(done.stdout.strip())
    return f"{said[0] or 'not a git checkout'}{'+' * bool(said[1])}"


def measured(name: str, *, quick: bool) -> dict[str, Any]:
    """One benchmark with all that ``results.json`` says of it."""
    import trl_hotfix

    about = {
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
            "what": each.what,
            "unit": each.unit,
            **dataclasses.asdict(each.estimate),
            "goal": each.goal,
            "verdict": each.verdict,
        }
        for each in result.findings
    ]
    return {**about, "findings": findings, "samples": result.samples}


def table(name: str, result: dict[str, Any]) -> Table:
    shown = Table(title=f"{name}{' (quick: rough figures)' * result['quick']}", title_justify="left")
    shown.add_column("what", overflow="fold")
    for heading in ("median", "interval", "n", "goal", "verdict"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for each in result["findings"]:
        short = f"[{each['low']:.4g}, {each['high']:.4g}]"
        unsure = "" if each["coverage"] >= measure.LEVEL else f" {each['coverage']:.0%}"
        goal = "" if each["goal"] is None else f"<= {each['goal']:g}"
        shown.add_row(
            each["what"],
            f"{each['median']:.4g} {each['unit']}".strip(),
            f"{short}{unsure}".replace("[", r"\["),
            str(each["n"]),
            goal,
            each["verdict"],
        )
    return shown


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(BENCHMARKS)))
@click.option("--quick", is_flag=True, help="Few repetitions, for a look whether all of it works; rough figures.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where results.json and results.svg go: benchmarks/, and with --quick build/benchmarks/quick/.",
)
def main(names: tuple[str, ...], quick: bool, out: Path | None) -> None:
    """Measure side by side: all benchmarks, or those of these names."""
    out = out or (measure.WORK / "quick" if quick else Path(__file__).parent)
    out.mkdir(parents=True, exist_ok=True)
    file = out / "results.json"
    known = json.loads(file.read_text(encoding="utf-8"))["benchmarks"] if file.is_file() else {}
    console = Console()
    console.width = max(console.width, 120)  # also where the table goes into a file
    for name in names or BENCHMARKS:
        known[name] = measured(name, quick=quick)
        console.print(table(name, known[name]))
        # After each: an hour's work is not to be lost with the last one.
        ordered = {each: known[each] for each in BENCHMARKS if each in known}
        file.write_text(json.dumps({"benchmarks": ordered}, indent=1) + "\n", encoding="utf-8")
        (out / "results.svg").write_text(plot.svg(ordered), encoding="utf-8", newline="\n")
    console.print(f"{file}\n{out / 'results.svg'}", soft_wrap=True)


if __name__ == "__main__":
    main()
