"""The digest of a set of repairs: equal if and only if the sets are."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any


def digest_of(trl: str | None, entries: Iterable[Mapping[str, Any]]) -> str:
    """Return the digest of a set of repairs, each with its ``id``, ``revision`` and ``options``."""
    on = [
        (entry["id"], entry["revision"], *([dict(entry["options"])] if entry["options"] else [])) for entry in entries
    ]
    on.sort(key=lambda entry: entry[:2])
    text = json.dumps({"trl": trl, "on": on}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
