"""Say what a patch costs, from ``benchmarks/results.json``: a line on its page, and a table of all patches."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trl_hotfix.model import Patch

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results.json"
NOT_MEASURED = "not measured"
LINK = "[how we measure](costs.md)"


@functools.cache
def costs() -> Mapping[str, Any]:
    """Return the costs by patch. Empty if they have not been measured."""
    benchmarks = json.loads(RESULTS.read_text(encoding="utf-8"))["benchmarks"]
    by_patch: Mapping[str, Any] = benchmarks.get("costs", {}).get("summary", {}).get("patches", {})
    return by_patch


def line(patch: Patch) -> str:
    """Return what the patch costs, for its page."""
    cost = costs().get(patch.id)
    return f"{NOT_MEASURED} ({LINK})" if cost is None else f"{'; '.join(_parts(cost))} ({LINK})"


def _parts(cost: Mapping[str, Any]) -> Iterator[str]:
    if cost["micro_batch_us"] is not None:
        yield f"{_microseconds(cost['micro_batch_us'])} in a micro-batch in which it runs"
        shares = [f"{_percent(share)} of a step of {int(size):,} tokens" for size, share in cost["share"].items()]
        if shares:
            yield f"by estimate {' and '.join(shares)} of a 1B model on a GPU"
    if cost["once_ms"] is not None:
        yield f"{_number(cost['once_ms'])} ms once"
    if cost["micro_batch_us"] is None and cost["once_ms"] is None:
        yield "the proof does not come to it"
    if cost.get("walks_each_time"):
        yield f"it visits every module: {_walk(cost, 'later')}"
    elif "mixture" in cost.get("walk_ms", {}):
        yield f"it visits every module once: {_walk(cost, 'first')}"
    if any(cost.get("bytes", {}).values()):
        sizes = [f"{_bytes(allocated)} for {int(size):,} tokens" for size, allocated in cost["bytes"].items()]
        yield f"it allocates {' and '.join(sizes)}"
    if cost["tokens"] is not None and abs(cost["tokens"] - 1) > 0.005:
        yield f"the model gets {cost['tokens']:.2f} times the tokens, with the rows of the proof"
    if "not_on_a_gpu" in cost:
        yield cost["not_on_a_gpu"]
    if cost["above_goal"]:
        yield "**this is more than 1 % of a step**"


def _walk(cost: Mapping[str, Any], when: str) -> str:
    parts = [
        f"{_number(milliseconds[when])} ms with {cost['modules'][name]:,} modules"
        for name, milliseconds in cost["walk_ms"].items()
    ]
    share = cost.get("share_of_mixture")
    return ", ".join(parts) + (f", {_percent(share)} of a step of 1,000 tokens" if share else "")


def table(patches: Sequence[Patch]) -> str:
    """Return the page with a row for each patch."""
    measured = [costs()[patch.id] for patch in patches if patch.id in costs()]
    above = sum(cost["above_goal"] for cost in measured)
    lines = [
        "# What they cost",
        "",
        "The time of a patch's own code, without TRL's method, while its proof trains a tiny model with the real "
        "trainer (`make benchmarks NAMES=costs`), on the oldest release with the bug or on the newest, whichever takes "
        "longer. Some run in a few micro-batches only, such as those that generate; the figures are of these. *Share*: "
        "of a step of a dense model with a billion parameters on an H100, at 6 FLOP a parameter and "
        "token and 40 % of the peak. All of our time counts, as if the GPU waited for it, and what our code writes and "
        "reads of the GPU's memory. *Memory*: the most that is allocated at a time, with sequences of 500 tokens. "
        "*Mixture*: the time in a micro-batch with a mixture of experts of about 30,000 modules, where the patch "
        "visits each of them in every call. *Tokens*: how many the model is given, padding among them, over those "
        "without the patch, with the rows of the proof.",
        "",
        f"{len(measured)} of {len(patches)} patches are measured. {above} of them take more than 1 % of a step.",
        "",
        "| patch | a micro-batch | share, 1,000 tokens | share, 100,000 tokens | memory, 1,000 | memory, 100,000 "
        "| mixture | once | tokens |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for patch in sorted(patches, key=lambda patch: patch.id):
        lines.append(f"| [`{patch.id}`]({patch.id}.md) | {' | '.join(_cells(costs().get(patch.id)))} |")
    return "\n".join([*lines, ""])


def _cells(cost: Mapping[str, Any] | None) -> list[str]:
    if cost is None:
        return [NOT_MEASURED, *[""] * 7]
    sizes = ("1000", "100000")
    walks = cost.get("walks_each_time") and cost["micro_batch_us"] is not None
    return [
        _microseconds(cost["micro_batch_us"]) if cost["micro_batch_us"] is not None else "",
        *(_percent(cost["share"][size]) if size in cost["share"] else "" for size in sizes),
        *(_bytes(cost["bytes"][size]) if cost.get("bytes", {}).get(size) else "" for size in sizes),
        f"{_number(cost['walk_ms']['mixture']['later'])} ms" if walks else "",
        f"{_number(cost['once_ms'])} ms" if cost["once_ms"] is not None else "",
        f"{cost['tokens']:.2f}" if cost["tokens"] is not None else "",
    ]


def _number(value: float) -> str:
    """Return two digits, or more of a number of more."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _microseconds(value: float) -> str:
    return f"{value:.0f} µs" if value < 1000 else f"{value / 1000:.1f} ms"


def _percent(share: float) -> str:
    text = "less than 0.01 %" if share < 1e-4 else f"{_number(100 * share)} %"
    return f"**{text}**" if share > 0.01 else text


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"
