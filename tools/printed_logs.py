"""Train with ``TRL_HOTFIX=1`` in real releases, and put what the log prints into docs/log.md.

``python -m tools.printed_logs`` runs it. A comment names the place, the trainer and its settings, and the block after
it is replaced. Runs that no reader needs are beside the test of the page. The pages change when lines of the log
change, or the known bugs of the release.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bench.releases import layout

CHECKOUT = Path(__file__).parents[1]
PAGE = CHECKOUT / "docs" / "log.md"
PAGES = (PAGE, CHECKOUT / "tests" / "docs" / "printed_logs.md")
PRINTED = re.compile(
    r"<!-- printed: (?P<place>\S+) (?P<trainer>\S+) (?P<settings>\{.*?\}) -->\n```text\n(?P<log>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
SETTINGS = {"max_steps": 2, "learning_rate": 1e-3, "output_dir": "out", "save_strategy": "no", "report_to": []}
SCRIPT = """\
import json, sys
from trl_hotfix import autostart
autostart.start()
_, name, settings = sys.argv
from bench.inside.trainers import TRAINERS
TRAINERS[name](**json.loads(settings)).train()
"""


class Run(NamedTuple):
    """A run of the page, by the text of its place, such as ``1.16.0@tf5.2``, and its lines there."""

    place: str
    trainer: str
    settings: str
    lines: tuple[str, ...] = ()


def of_the_pages() -> list[Run]:
    """Return the runs of the pages, in order."""
    return [_run(match) for page in PAGES for match in PRINTED.finditer(page.read_text(encoding="utf-8"))]


def _run(match: re.Match[str]) -> Run:
    return Run(match["place"], match["trainer"], match["settings"], tuple(match["log"].splitlines()))


def printed(run: Run, **variables: str) -> list[str]:
    """Train in a process of its own, and return the lines of the log on its standard error."""
    (place,) = (place for place in layout.places() if str(place) == run.place)
    layout.build([place])
    settings: Mapping[str, Any] = {**SETTINGS, **json.loads(run.settings)}
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.run(
            [str(place.python), "-c", SCRIPT, run.trainer, json.dumps(settings)],
            cwd=folder,
            env={**place.environment(), "TRL_HOTFIX": "1", **variables},
            capture_output=True,
            check=False,
        )
    text = process.stderr.decode()
    if process.returncode:
        raise RuntimeError(f"{run.trainer} in {run.place}: {text[-2000:]}")
    return [line for line in text.split("\n") if line.startswith(("trl_hotfix: ", "{"))]


def main() -> None:
    def again(match: re.Match[str]) -> str:
        head = match[0].partition("```text\n")[0]
        return f"{head}```text\n" + "".join(f"{line}\n" for line in printed(_run(match))) + "```"

    for page in PAGES:
        page.write_text(PRINTED.sub(again, page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
