"""Put a trainer back to where it was: what its step has changed in it, in its models, and in the random generators.

It keeps no copy of the weights. A step that changes weights cannot be taken back, and ``Moment.moved`` says so.
"""

from __future__ import annotations

import random
import sys
from collections import UserDict, deque
from collections.abc import Callable, Iterator
from typing import Any

from ..patching.generators import restorers_of_accelerators

LARGEST = 1 << 22
"""A tensor with more elements is not copied. If a step changes one in place, the step cannot be taken back."""

_PLAIN = (int, float, complex, bool, str, bytes, type(None))


class Generators:
    """The states of the global random generators of Python, NumPy and torch, on all devices."""

    def __init__(self) -> None:
        import torch

        numpy = sys.modules.get("numpy")
        self._python = random.getstate()
        self._numpy = numpy.random.get_state() if numpy is not None else None
        self._torch = torch.get_rng_state()
        self._devices = restorers_of_accelerators(torch)

    def restore(self) -> None:
        import torch

        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        for restore in self._devices:
            restore()


class Moment:
    """What a trainer and its models are at one moment, apart from weights and gradients."""

    def __init__(self, trainer: Any) -> None:
        self._undo: list[Callable[[], None]] = []
        self._seen: dict[int, Any] = {}
        self._fixed: dict[int, tuple[Any, int, str]] = {}
        self._generators = Generators()
        self._visit_contents(trainer, vars(trainer), type(trainer).__name__)

    def restore(self) -> None:
        """Put everything back that was copied."""
        for undo in self._undo:
            undo()
        self._generators.restore()

    def moved(self) -> str:
        """Return the name of a weight, or of another tensor without a copy, that has changed since; empty: none has."""
        return next((name for tensor, version, name in self._fixed.values() if tensor._version != version), "")

    def _visit(self, value: Any, name: str) -> None:
        """Note what ``value`` holds, if it can change in place."""
        if isinstance(value, _PLAIN) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        torch = sys.modules["torch"]
        if isinstance(value, torch.Tensor):
            self._visit_tensor(value, name)
        elif isinstance(value, torch.nn.Module):
            self._visit_model(value, name)
        elif isinstance(value, torch.Generator):
            state = value.get_state()
            self._undo.append(lambda: value.set_state(state) and None)
        elif isinstance(value, random.Random):
            of_python = value.getstate()
            self._undo.append(lambda: value.setstate(of_python))
        elif isinstance(value, dict):
            self._visit_dict(value, name)
        elif isinstance(value, (list, deque)):
            items = list(value)
            self._undo.append(lambda: _refill(value, items))
            for item in items:
                self._visit(item, name)
        elif isinstance(value, set):
            members = set(value)
            self._undo.append(lambda: _refill_set(value, members))
        elif isinstance(value, tuple):
            for item in value:
                self._visit(item, name)
        elif isinstance(value, UserDict):
            self._visit(value.data, name)
        elif _is_of_trainers(value):
            self._visit_contents(value, vars(value), name)

    def _visit_dict(self, value: dict[Any, Any], name: str) -> None:
        pairs = list(value.items())
        self._undo.append(lambda: _refill_dict(value, pairs))
        for key, item in pairs:
            self._visit(item, f"{name}[{key!r}]")

    def _visit_contents(self, value: Any, contents: dict[str, Any], name: str) -> None:
        """Note the attributes of an object. They are set one by one, since another thread may read them meanwhile."""
        before = dict(contents)
        self._seen[id(value)] = value
        self._undo.append(lambda: _set_attributes(contents, before))
        for key, item in before.items():
            self._visit(item, f"{name}.{key}")

    def _visit_model(self, model: Any, name: str) -> None:
        for path, module in model.named_modules():
            self._seen[id(module)] = module
            if type(module).__module__.startswith("torch.nn.parallel."):
                continue  # It keeps how the ranks share gradients now, which is another thing in each micro-batch.
            where = f"{name}.{path}".rstrip(".")
            contents = vars(module)
            before = {key: item for key, item in contents.items() if _is_simple(item)}
            self._undo.append(lambda contents=contents, before=before: _set_simple(contents, before))  # type: ignore[misc]
            for key, item in before.items():
                self._visit(item, f"{where}.{key}")
            self._visit_dict(module._buffers, where)
            for key, weight in module._parameters.items():
                if weight is not None:
                    self._fix(weight, f"{where}.{key}")

    def _visit_tensor(self, tensor: Any, name: str) -> None:
        if tensor.is_inference():
            return  # It cannot change in place.
        if tensor.numel() > LARGEST:
            self._fix(tensor, name)
            return
        torch = sys.modules["torch"]
        version, copy = tensor._version, tensor.detach().clone()

        def undo() -> None:
            if tensor._version != version:
                with torch.no_grad():
                    tensor.copy_(copy)

        self._undo.append(undo)

    def _fix(self, tensor: Any, name: str) -> None:
        if not tensor.is_inference():
            self._fixed[id(tensor)] = tensor, tensor._version, name


def copied(value: Any) -> Any:
    """Return a copy of the inputs of a step: containers and tensors are new, and everything else is the same."""
    torch = sys.modules["torch"]
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, UserDict):
        new = value.copy()
        new.data = copied(value.data)
        return new
    if type(value) is dict:
        return {key: copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copied(item) for item in value)
    return value


def weights_of(model: Any) -> Iterator[Any]:
    """Yield the weights that train."""
    return (weight for weight in model.parameters() if weight.requires_grad)


def _is_of_trainers(value: Any) -> bool:
    """Return whether a class of TRL, or the state of a trainer, keeps something there from step to step."""
    module = type(value).__module__
    return hasattr(value, "__dict__") and (module.startswith("trl.") or module == "transformers.trainer_callback")


def _is_simple(value: Any) -> bool:
    return isinstance(value, (*_PLAIN, sys.modules["torch"].Tensor))


def _set_attributes(contents: dict[str, Any], before: dict[str, Any]) -> None:
    for name in contents.keys() - before.keys():
        del contents[name]
    contents.update(before)


def _set_simple(contents: dict[str, Any], before: dict[str, Any]) -> None:
    for name in [name for name, value in contents.items() if name not in before and _is_simple(value)]:
        del contents[name]
    contents.update(before)


def _refill(value: Any, items: list[Any]) -> None:
    value.clear()
    value.extend(items)


def _refill_set(value: set[Any], members: set[Any]) -> None:
    value.clear()
    value.update(members)


def _refill_dict(value: dict[Any, Any], pairs: list[tuple[Any, Any]]) -> None:
    value.clear()
    value.update(pairs)
