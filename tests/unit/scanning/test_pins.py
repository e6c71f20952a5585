"""The versions that a file pins, in every form that is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trl_hotfix.errors import ScriptError
from trl_hotfix.scanning import pins
from trl_hotfix.scanning.pins import read_pins

REQUIREMENTS = """\
# of the project
-r other.txt
--index-url https://example.org
trl[vllm]==0.16.1 \\
    --hash=sha256:00 \\
    --hash=sha256:11
Flash_Attn == 2.7.4 ; python_version >= "3.9"  # pinned
torch>=2.4,<3
accelerate @ git+https://example.org/accelerate
not a requirement!
"""
UV = """\
version = 1

[[package]]
name = "trl"
version = "0.16.1"
source = { registry = "https://pypi.org/simple" }

[package.metadata]
name = "no package"
version = "9"

[[package]]
name = "flash-attn"
version = "2.7.4"
"""
FORMS = {
    "requirements.txt": REQUIREMENTS,
    "freeze.txt": "trl==0.16.1\nflash_attn==2.7.4\n-e git+https://example.org/x#egg=x\n",
    "uv.lock": UV,
    "pylock.toml": UV.replace("[[package]]", "[[packages]]"),
    "environment.yml": "dependencies:\n- conda-forge::flash-attn=2.7.4=py311_0\n- python\n- pip:\n  - trl==0.16.1\n",
    "Pipfile.lock": json.dumps({"default": {"trl": {"version": "==0.16.1"}, "flash-attn": {"version": "==2.7.4"}}}),
    "list.json": json.dumps([{"name": "trl", "version": "0.16.1"}, {"name": "flash_attn", "version": "2.7.4"}]),
    "inspect.json": json.dumps(
        {
            "installed": [
                {"metadata": {"name": name, "version": version}}
                for name, version in {"trl": "0.16.1", "flash_attn": "2.7.4"}.items()
            ]
        }
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_each_form_has_the_same_pins(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_text(FORMS[name])
    assert read_pins(file) == {"trl": "0.16.1", "flash-attn": "2.7.4"}


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("gone.txt", None, "cannot be read: No such file"),
        ("binary.txt", b"\xff\xfe\x00", "is no text"),
        ("x.json", b"{", "is no file of pinned versions"),
        ("x.json", b'{"a": 1}', "it is neither Pipfile.lock nor"),
        ("x.json", b"[1]", "is no file of pinned versions"),
        ("x.yml", b"a: 1", "as an environment of conda has"),
        ("x.yml", b"a: [", "line 1 is not YAML.*; expected pinned versions"),
        ("large.txt", b"#" * 100, "it has more than 0 KiB; expected pinned versions"),
    ],
)
def test_another_file_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes | None, expected: str
) -> None:
    monkeypatch.setattr(pins, "LARGEST", 99)
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ScriptError, match=expected) as raised:
        read_pins(file)
    assert "\n" not in str(raised.value)


def test_what_is_pinned_to_several_versions_is_not_known(tmp_path: Path) -> None:
    file = tmp_path / "requirements.txt"
    file.write_text('peft==0.8.0\npeft==0.8\ntorch==2.6.0 ; python_version < "3.10"\ntorch==2.7.0\n')
    assert read_pins(file) == {"peft": "0.8"}
    file = tmp_path / "uv.lock"
    file.write_text(UV + '\n[[package]]\nname = "flash-attn"\nversion = "2.8.0"\n')
    assert read_pins(file) == {"trl": "0.16.1"}


def test_a_file_without_pins_has_none(tmp_path: Path) -> None:
    for name, text in {"a.txt": "", "b.txt": "trl>=0.16\ntrl==0.16.*\n", "uv.lock": "version = 1\n"}.items():
        (tmp_path / name).write_text(text)
        assert read_pins(tmp_path / name) == {}
