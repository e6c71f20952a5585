"""Each micro-batch of a trainer with a step of its own is divided once, and accelerate knows later what it knew."""

from __future__ import annotations

from typing import Any

import pytest

from trl_hotfix.catalogue import loading
from trl_hotfix.matching import gates
from trl_hotfix.patches.beneath import transformers_divides_gradients_twice

from tiny.divided_once import DividedOnce

(PATCH,) = (patch for patch in loading.load() if patch.id == "transformers-divides-gradients-twice")


@pytest.fixture(params=gates.targets_here(PATCH), ids=lambda target: str(target.attribute.partition(".")[0]))
def target(request: pytest.FixtureRequest) -> Any:
    return request.param


class TestTheStep(DividedOnce):
    wrapper = staticmethod(transformers_divides_gradients_twice.have_accelerate_divide_by_one)
