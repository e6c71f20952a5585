"""Records of applied patches, right ones and any others."""

from __future__ import annotations

import logging

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

RIGHT = {"trl": "0.11.4", "patches": [{"id": "some-patch", "revision": 1, "options": {"over": "all"}}]}
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.just("some-patch"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["trl", "patches", "id", "revision", "options", "over"]), inner)
    ),
    max_leaves=8,
)
records = json_values | json_values.map(lambda patches: {**RIGHT, "patches": patches})
like_a_function = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def warning_messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message.getMessage() for message in caplog.records if message.levelno >= logging.WARNING]
