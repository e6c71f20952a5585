"""A freeze file is a selection, or one error that names the file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from trl_hotfix.errors import SettingError
from trl_hotfix.model import Option, Patch, Severity, Target, Upstream
from trl_hotfix.patching import engine
from trl_hotfix.selection import freeze_files
from trl_hotfix.selection.selection import Selection
from trl_hotfix.selection.set_digest import digest_of

PATCH = Patch(
    id="some-patch",
    revision=2,
    title="",
    severity=Severity.CRASH,
    trl=">=0.11.0",
    upstream=Upstream(),
    why="",
    how="",
    targets=(Target("trl.trainer.dpo_trainer", "DPOTrainer.step", "wrapper"),),
    self_test="self_test",
    options={"over": Option({"all": "", "none": ""}, "all")},
)
RIGHT = {"id": "some-patch", "revision": 2, "options": {"over": "none"}}


def file(folder: Path, content: Any) -> str:
    path = folder / "trl_hotfix.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_a_freeze_file_gives_the_ids_and_the_options(tmp_path: Path) -> None:
    digest = digest_of("0.11.4", [RIGHT])
    path = file(tmp_path, {"trl": "0.11.4", "trl_hotfix": "0.1.0", "digest": digest, "patches": [RIGHT]})
    for only, environment in ((f"@{path}", {}), (None, {"TRL_HOTFIX_ONLY": f"@{path}", "TRL_HOTFIX_SKIP": " ,"})):
        selection = Selection.of(only, None, environment, [PATCH])
        assert selection.only == {"some-patch"}
        assert selection.skip == frozenset()
        assert selection.options_of(PATCH) == {"over": "none"}


KNOWN = {"some-patch": PATCH}


def test_a_record_and_a_freeze_file_give_the_same_patches(tmp_path: Path) -> None:
    """What did not reach the run, was taken off or was observed is in the record, and is not selected."""
    head = {"trl": "0.11.4", "trl_hotfix": "0.1.0", "digest": digest_of("0.11.4", [RIGHT])}
    apart = {"id": "another-patch", "revision": 1, "options": {}}
    counts = {"word": "repaired", "called": 4, "acted": 2}
    record = {
        "schema": 2,
        **head,
        "patches": [{**RIGHT, **counts}],
        "unreached": [{**apart, "reason": "made-before"}],
        "reverted": [{**apart, **counts}],
        "observed": [{"id": "third-patch", "severity": "crash", "answer": "hit", "because": ["x=1"], "called": {}}],
    }
    selections = []
    for content in ({**head, "patches": [RIGHT]}, record):
        selection = Selection.of(f"@{file(tmp_path, content)}", None, {}, [PATCH])
        selections.append((selection.only, selection.skip, selection.options_of(PATCH)))
    assert selections == [({"some-patch"}, frozenset(), {"over": "none"})] * 2


def test_a_record_of_a_newer_schema_is_refused_before_its_fields_are_looked_at(tmp_path: Path) -> None:
    record = {"schema": 3, "patches": [{**RIGHT, "a_new_field": 1}], "another": {}}
    path = file(tmp_path, record)
    with pytest.raises(SettingError) as caught:
        freeze_files.read(path, KNOWN)
    assert str(caught.value) == (
        f"the freeze file {path!r} cannot be used: "
        "its schema is 3, and this trl_hotfix reads up to 2; install a newer one"
    )


@pytest.mark.parametrize("schema", ["3", None, 2.5, [], {}, "x" * 1000])
def test_a_schema_that_is_no_number_is_one_error(schema: Any, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"cannot be used: Expected `int`"):
        freeze_files.read(file(tmp_path, {"schema": schema, "patches": [RIGHT]}), KNOWN)


def test_a_freeze_file_beside_a_checkpoint_has_every_field() -> None:
    first = freeze_files.record({"trl": "0.11.4", "patches": [RIGHT]})
    second = freeze_files.record({"schema": 2, "trl": "0.11.4", "patches": [{**RIGHT, "word": "called"}]})
    assert first is not None
    assert second is not None
    assert first.keys() == second.keys()
    assert [entry["id"] for entry in first["patches"]] == [entry["id"] for entry in second["patches"]]
    assert freeze_files.record({"schema": 3, "patches": [], "new": 1}) is None


@pytest.mark.parametrize(
    ("patches", "message"),
    [
        ([{**RIGHT, "id": "some-pach"}], "unknown patch 'some-pach'; did you mean 'some-patch'?"),
        ([{**RIGHT, "revision": 1}], "some-patch is revision 1 there, 2 in this trl_hotfix"),
        ([{**RIGHT, "options": {}}], "some-patch has the options none there, over in this trl_hotfix"),
        ([{**RIGHT, "options": {"over": "some"}}], "some-patch.over is 'some', expected all, none"),
        ([RIGHT, RIGHT], "'some-patch' is there twice"),
        ([{**RIGHT, "module": "os"}], "unknown field `module`"),
        ([{"id": "some-patch"}], "missing required field `revision`"),
        ("some-patch", "Expected `array`"),
    ],
)
def test_a_patch_that_cannot_be_reproduced_is_refused(patches: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(SettingError) as caught:
        freeze_files.read(file(tmp_path, {"patches": patches}), KNOWN)
    assert message in str(caught.value)


def test_all_mistakes_are_in_one_error_with_the_number_of_the_entry_and_the_way_on(tmp_path: Path) -> None:
    wrong = [{**RIGHT, "id": "no-such"}, {**RIGHT, "revision": 7}]
    with pytest.raises(SettingError, match=r"entry 1: .*no-such.*\n.*entry 2: .*revision 7.*\n.*digest") as caught:
        freeze_files.read(file(tmp_path, {"digest": "x", "patches": wrong}), KNOWN)
    assert str(caught.value).endswith(freeze_files.WAY_ON)
    with pytest.raises(SettingError, match=r"entry 1: .*`module`.*\n.*entry 3: .*`revision`"):
        freeze_files.read(file(tmp_path, {"patches": [{**RIGHT, "module": "os"}, RIGHT, {"id": "some-patch"}]}), KNOWN)


OTHER = {"id": "another-patch", "revision": 1, "options": {}}


@pytest.mark.parametrize(
    "change",
    [{"patches": [RIGHT]}, {"patches": [RIGHT, OTHER, OTHER]}, {"trl": "0.12.0"}, {"trl": None}, {"digest": ""}],
)
def test_a_file_that_was_changed_after_it_was_written_is_refused(change: Any, tmp_path: Path) -> None:
    known = {**KNOWN, "another-patch": replace(PATCH, id="another-patch", revision=1, options={})}
    written = {"trl": "0.11.4", "patches": [RIGHT, OTHER], "digest": digest_of("0.11.4", [OTHER, RIGHT])}
    assert freeze_files.read(file(tmp_path, written), known).digest == written["digest"]
    with pytest.raises(SettingError, match=r"its digest is .* changed by hand"):
        freeze_files.read(file(tmp_path, {**written, **change}), known)


def test_a_file_may_name_a_patch_by_the_id_that_it_had_when_the_file_was_written(tmp_path: Path) -> None:
    renamed = replace(PATCH, id="new-name", formerly=("some-patch",))
    path = file(tmp_path, {"trl": "0.11.4", "patches": [RIGHT], "digest": digest_of("0.11.4", [RIGHT])})
    selection = Selection.of(f"@{path}", None, {}, [renamed])
    assert (selection.only, selection.options) == ({"new-name"}, {"new-name": {"over": "none"}})
    both = file(tmp_path, {"patches": [RIGHT, {**RIGHT, "id": "new-name"}]})
    with pytest.raises(SettingError, match="'new-name' is there twice"):
        Selection.of(f"@{both}", None, {}, [renamed])


HOSTILE = [
    '{"patches": [], "patches": []}',
    '{"patches": [{"id": "some-patch", "id": "other", "revision": 2}]}',
    '{"patches": [{"id": "some-patch", "revision": NaN}]}',
    '{"patches": [{"id": "some-patch", "revision": 1e999}]}',
    f'{{"patches": [{{"id": "some-patch", "revision": {"9" * 5000}}}]}}',
    '{"patches": {"id": "some-patch", "revision": 2}}',
    '{"patches": [{"id": ["some-patch"], "revision": 2}]}',
    '{"a\\nb\\u001b[31m": 1, "patches": []}',
    " " * (freeze_files.LARGEST + 1),
]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", "[" * 60_000, "\x00", '{"patches": [], "run": "rm"}', *HOSTILE]
)
def test_an_invalid_file_is_one_error_that_names_it(content: str, tmp_path: Path) -> None:
    path = file(tmp_path, content)
    with pytest.raises(SettingError, match=r"the freeze file .* cannot be used") as caught:
        freeze_files.read(path, KNOWN)
    assert path in str(caught.value)
    assert all(line.isprintable() for line in str(caught.value).split("\n"))


def test_a_file_that_is_not_regular_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero"), Path("/dev/stdin")):
        with pytest.raises(SettingError, match=r"cannot be used: it is no regular file"):
            freeze_files.read(str(path), KNOWN)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="there is no /proc here")
@pytest.mark.parametrize("path", ["/proc/self/status", "/proc/kmsg"])
def test_a_file_of_the_system_that_has_no_size_is_not_read(path: str) -> None:
    """Some of them, as /proc/kmsg, wait for what is written next, although they are regular files."""
    code = f"from trl_hotfix.selection import freeze_files; freeze_files.read({path!r}, {{}})"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert f"SettingError: the freeze file '{path}' cannot be used: " in process.stderr
    assert "cannot be used: it is empty; expected the trl_hotfix.json of a run" in process.stderr


def test_a_file_that_becomes_a_pipe_while_it_is_looked_at_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    regular, pipe = tmp_path / "regular", tmp_path / "pipe"
    regular.write_text("{}")
    os.mkfifo(pipe)
    monkeypatch.setattr(Path, "stat", lambda path: os.stat(regular))  # noqa: PTH116
    with pytest.raises(SettingError, match=r"cannot be used: it is no regular file"):
        freeze_files.read(str(pipe), KNOWN)


def test_thousands_of_mistakes_are_a_short_message(tmp_path: Path) -> None:
    wrong = [{**RIGHT, "id": f"no-such-{number}"} for number in range(500)]
    with pytest.raises(SettingError) as caught:
        freeze_files.read(file(tmp_path, {"patches": wrong}), KNOWN)
    assert str(caught.value).endswith(f"\n  and 490 more\n  {freeze_files.WAY_ON}")
    with pytest.raises(SettingError) as caught:
        freeze_files.read(file(tmp_path, {"patches": [{**RIGHT, "id": "x" * 60_000}]}), KNOWN)
    assert f"unknown patch '{'x' * 80}'... (59920 more)\n" in str(caught.value)


def test_text_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trl_hotfix.json"
    path.write_bytes(b'{"patches": [], "trl": "\xff"}')
    with pytest.raises(SettingError, match=r"cannot be used: 'utf-8' codec"):
        freeze_files.read(str(path), KNOWN)


@pytest.mark.parametrize("text", ["a\nWARNING: b", "\x1b[2Jx", "\u202ex"])
def test_control_characters_are_shown_by_their_repr(text: str, tmp_path: Path) -> None:
    wrong = [{**RIGHT, "id": text}, {**RIGHT, "options": {text: "all"}}, {**RIGHT, "options": {"over": text}}]
    with pytest.raises(SettingError) as caught:
        freeze_files.read(file(tmp_path, {"patches": wrong}), KNOWN)
    assert all(line.isprintable() for line in str(caught.value).split("\n"))
    assert len(str(caught.value).split("\n")) == 1 + len(wrong) + 2  # 'some-patch' is there twice; the way on


@pytest.mark.parametrize("path", ["", "no/such/file", ".", "http://example.com/x.json"])
def test_an_absent_file_is_an_error_and_no_url_is_fetched(path: str) -> None:
    with pytest.raises(SettingError, match=r"the freeze file .* cannot be used"):
        Selection.of(f"@{path}", None, {}, [PATCH])


def test_a_freeze_file_allows_no_other_selection(tmp_path: Path) -> None:
    path = file(tmp_path, {"patches": [RIGHT]})
    with pytest.raises(SettingError, match="leave skip= out"):
        Selection.of(f"@{path}", ["some-patch"], {}, [PATCH])
    variables = {"TRL_HOTFIX_SKIP": "some-patch", "TRL_HOTFIX_OPTIONS": "some-patch.over=all"}
    with pytest.raises(SettingError, match="leave TRL_HOTFIX_SKIP and TRL_HOTFIX_OPTIONS out"):
        Selection.of(None, None, {"TRL_HOTFIX_ONLY": f"@{path}", **variables}, [PATCH])
    with pytest.raises(SettingError, match="leave TRL_HOTFIX_SKIP out"):
        Selection.of(f"@{path}", None, {"TRL_HOTFIX_SKIP": "some-patch"}, [PATCH])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["some-patch", 2]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["id", "revision", "options", "over"]), inner)
    ),
    max_leaves=8,
)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=60) | json_values.map(lambda patch: json.dumps({"patches": patch}).encode()))
def test_any_content_is_a_selection_or_one_error(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "trl_hotfix.json"
    path.write_bytes(content)
    try:
        frozen = freeze_files.read(str(path), KNOWN)
    except SettingError:
        return
    assert all(patch.id in KNOWN for patch in frozen.patches)


def test_a_frozen_report_can_be_read_again(tmp_path: Path) -> None:
    from trl_hotfix.catalogue import loading

    record = engine.ENGINE.apply(None, None, None, None, dry_run=True).freeze()
    frozen = freeze_files.read(file(tmp_path, record), {patch.id: patch for patch in loading.load()})
    assert [frozen_patch.id for frozen_patch in frozen.patches] == [
        frozen_patch["id"] for frozen_patch in record["patches"]
    ]
    assert frozen.digest == record["digest"]
