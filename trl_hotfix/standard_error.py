"""Write on standard error, on a line of its own: also where a progress bar of tqdm is on the current line.

Only the standard library is imported: the first lines are written before TRL is.
"""

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class BesideBars:
    """A stream for logging. It finds ``sys.stderr`` at each write, as a program may replace it."""

    def write(self, text: str) -> None:
        write(text)

    def flush(self) -> None:
        if sys.stderr is not None:
            sys.stderr.flush()


def write(text: str) -> None:
    """Write ``text``, which ends with a line break. Bars are drawn again below it."""
    stream = sys.stderr
    if stream is None:
        return
    tqdm = _with_bars_on(stream)
    if tqdm is None:
        stream.write(text)
        return
    # In a terminal tqdm clears the bar. In a file the bar stays where it is, so the text needs the next line.
    # Without tqdm's lock: after a fork, no thread may be there to release it.
    tqdm.write(text if stream.isatty() else f"\n{text}", file=stream, end="", nolock=True)


def _with_bars_on(stream: "Any") -> "Any":
    """Return tqdm's class if a bar of it is on ``stream``, or None. Bars of notebooks are widgets."""
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    bars = list(getattr(tqdm, "_instances", ()))
    drawn = (bar for bar in bars if hasattr(bar, "start_t") and not getattr(bar, "gui", False))
    return tqdm if any(bar.fp == stream for bar in drawn) else None
