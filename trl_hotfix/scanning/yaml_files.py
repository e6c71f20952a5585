"""Read a YAML file of a stranger. Its size is bounded, also that of what its aliases and merges expand to."""

from __future__ import annotations

from typing import Any

import yaml

from ..errors import ScriptError, reason

LARGEST = 1 << 16
"""The largest size in bytes of a file. A config has some kilobytes, and PyYAML reads 64 in a second."""

_MOST_NODES = 100_000
"""At most so many values, with each alias counted as often as it is used. Nine aliases of nine can be a billion."""


def load(
    source: str | bytes, file: str, expected: str, reader: type[yaml.SafeLoader] = yaml.SafeLoader
) -> tuple[yaml.Node | None, Any]:
    """Return the node and the value of a document. Raises ``ScriptError``."""
    loader = None
    try:
        # To begin is to read the first bytes, and to raise for characters that YAML does not have.
        loader = reader(source)
        node = loader.get_single_node()
        if node is None:
            return None, None
        if _expanded(node, {}) > _MOST_NODES:
            raise ValueError(f"its aliases expand to more than {_MOST_NODES} values")
        return node, loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        location = f", line {error.problem_mark.line + 1}" if error.problem_mark is not None else ""
        found = reason(ValueError(error.problem or error.context))
        raise ScriptError(f"{file}{location} is not YAML: {found}; expected {expected}") from None
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise ScriptError(f"{file} is not YAML: {reason(error)}; expected {expected}") from None
    finally:
        if loader is not None:
            loader.dispose()


def _expanded(node: yaml.Node, counts: dict[int, int]) -> int:
    """Return the number of nodes, with those below an alias counted each time."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in counts:
        # This is what counts if the node is within itself.
        counts[id(node)] = _MOST_NODES + 1
        pairs = node.value if isinstance(node, yaml.SequenceNode) else [part for pair in node.value for part in pair]
        counts[id(node)] = 1 + sum(_expanded(part, counts) for part in pairs)
    return counts[id(node)]
