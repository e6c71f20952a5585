"""Parts of everything that can be tested. A name is in the same part on every machine."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shard:
    """Part ``number`` of ``count``, from 1."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Return the shard of a text such as ``3/20``. Raises ``ValueError``."""
        match = re.fullmatch(r"(\d+)/(\d+)", text)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise ValueError(f"expected K/N with K from 1 to N, such as 3/20; found {text!r}")
        return cls(int(match[1]), int(match[2]))

    def has(self, name: str) -> bool:
        """Return whether the name is in this part."""
        digest = hashlib.sha256(name.encode()).digest()
        return int.from_bytes(digest[:8], "big") % self.count == self.number - 1
