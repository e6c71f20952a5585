"""What is told of the model and the launch decides, unless a word of the script may change it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from trl_hotfix.catalogue import loading
from trl_hotfix.catalogue.conditions import Argument, Kind
from trl_hotfix.catalogue.facts import FACTS
from trl_hotfix.errors import ScriptError
from trl_hotfix.scanning.facts import SET_BY, facts_for, told_facts


def launch(tmp_path: Path, text: str) -> dict[str, Any]:
    file = tmp_path / "accelerate.yaml"
    file.write_text(text)
    return {name: fact.value for name, fact in told_facts(None, file).items()}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("distributed_type: DEEPSPEED\nnum_processes: 8\n", {"distributed": "deepspeed", "processes": 8}),
        ("distributed_type: FSDP\nnum_processes: 2\n", {"distributed": "fsdp", "processes": 2}),
        ("distributed_type: MULTI_GPU\nnum_processes: 2\n", {"distributed": "ddp", "processes": 2}),
        # One process may still use several GPUs.
        ("distributed_type: 'NO'\nnum_processes: 1\n", {}),
        ("distributed_type: no\nnum_processes: many\n", {}),
        ('{"distributed_type": "FSDP"}', {"distributed": "fsdp"}),
    ],
)
def test_a_config_of_accelerate_tells_the_launch(tmp_path: Path, text: str, expected: dict[str, Any]) -> None:
    assert launch(tmp_path, text) == expected


@pytest.mark.parametrize(
    ("deepspeed_config", "expected"),
    [
        ("{zero_stage: 2, offload_optimizer_device: cpu}", {"zero_stage": 2, "optimizer_offloaded": True}),
        ("{zero_stage: 3, offload_optimizer_device: none}", {"zero_stage": 3, "optimizer_offloaded": False}),
        ("{zero_stage: 1}", {"zero_stage": 1, "optimizer_offloaded": False}),
        ("{deepspeed_config_file: ds.json}", {}),
        ("{zero_stage: auto, offload_optimizer_device: 2}", {}),
        ("2", {}),
    ],
)
def test_a_config_of_accelerate_tells_what_is_offloaded(
    tmp_path: Path, deepspeed_config: str, expected: dict[str, Any]
) -> None:
    found = launch(tmp_path, f"distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config}\n")
    assert found == {"distributed": "deepspeed", **expected}
    assert launch(tmp_path, f"distributed_type: FSDP\ndeepspeed_config: {deepspeed_config}\n") == {
        "distributed": "fsdp"
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}',
            {"zero_stage": 2, "optimizer_offloaded": True},
        ),
        (
            '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}}}',
            {"zero_stage": 2, "optimizer_offloaded": False},
        ),
        ('{"zero_optimization": {"stage": 3}}', {"zero_stage": 3, "optimizer_offloaded": False}),
        ('{"zero_optimization": {"stage": "auto", "offload_optimizer": true}}', {}),
        ('{"bf16": {"enabled": true}}', {"zero_stage": 0, "optimizer_offloaded": False}),
        ('{"zero_optimization": []}', {"zero_stage": 0, "optimizer_offloaded": False}),
    ],
)
def test_a_config_of_deepspeed_tells_what_is_offloaded(tmp_path: Path, text: str, expected: dict[str, Any]) -> None:
    file, accelerate = tmp_path / "ds.json", tmp_path / "accelerate.yaml"
    file.write_text(text)
    facts = {name: fact.value for name, fact in told_facts(None, None, None, file).items()}
    assert facts == {"distributed": "deepspeed", **expected}
    accelerate.write_text("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 1}\n")
    told = told_facts(None, accelerate, None, file)
    assert told["zero_stage"].value == expected.get("zero_stage", 1)


def test_another_file_is_no_config_of_deepspeed(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    for text, found in (("[1]", "has a list"), ("{", "is not YAML")):
        file.write_text(text)
        with pytest.raises(ScriptError, match=f"--deepspeed: .*{found}.*expected a config of DeepSpeed"):
            told_facts(None, None, None, file)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "expected what `accelerate config` writes"),
        ("- 1\n", "expected what `accelerate config` writes"),
        ('{"zero_optimization": {"stage": 2}}', "expected what `accelerate config` writes"),
        ("a: [", "is not YAML"),
        ("a: !!python/object/apply:os.system [ls]", "is not YAML"),
        ("[" * 50_000, "is not YAML"),
        ("{[]: 1}", "is not YAML"),
        ("a: 2026-02-31", "is not YAML"),
    ],
)
def test_another_file_is_one_clear_error(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ScriptError, match=re.escape(expected)) as caught:
        launch(tmp_path, text)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_one_clear_error(tmp_path: Path) -> None:
    for path, expected in ((tmp_path / "gone", "No such file"), (tmp_path, "it is no regular file, but a folder")):
        with pytest.raises(ScriptError, match=expected):
            told_facts(None, path)
    large = tmp_path / "large.yaml"
    with large.open("wb") as file:
        file.truncate((1 << 16) + 1)
    with pytest.raises(ScriptError, match="more than 64 KiB"):
        told_facts(None, large)


def test_a_word_of_the_script_makes_a_fact_unknown() -> None:
    told = {name: Argument(Kind.LITERAL, True, reason="config.json") for name in FACTS}
    for name in FACTS:
        assert facts_for("train()", told)(name).value is True
        for word in SET_BY.get(name, ()):
            fact = facts_for(f"x.{word} = y", told)(name)
            assert (fact.kind, fact.reason) == (Kind.UNKNOWN, f"the script has {word}")
    untold = facts_for("train()", {})("experts")
    assert (untold.kind, untold.reason) == (Kind.UNKNOWN, f"not told: {FACTS['experts']}")


def test_every_fact_decides_a_bug() -> None:
    bugs = (*loading.load(), *loading.without_repair())
    used = {name for bug in bugs for hit in bug.hits for name in hit.facts}
    assert used == FACTS.keys()
    assert SET_BY.keys() < FACTS.keys()


def test_what_only_looks_like_such_a_word_does_not() -> None:
    told = {"pad_is_eos": Argument(Kind.LITERAL, True, reason="tokenizer_config.json")}
    text = "tokenizer.apply_chat_template(messages); tokenizer(text, add_special_tokens=False)"
    assert facts_for(text, told)("pad_is_eos").value is True
    assert facts_for("tokenizer.add_special_tokens({})", told)("pad_is_eos").kind is Kind.UNKNOWN


def test_a_config_of_accelerate_may_name_that_of_deepspeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: ds.json}\n"
    assert launch(tmp_path, text) == {"distributed": "deepspeed"}
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}')
    assert launch(tmp_path, text) == {"distributed": "deepspeed", "zero_stage": 2, "optimizer_offloaded": True}
    (tmp_path / "ds.json").write_text("[")
    with pytest.raises(ScriptError, match=r"--accelerate: ds\.json"):
        launch(tmp_path, text)


def test_a_word_that_says_the_same_as_the_file_changes_nothing() -> None:
    told = {"distributed": Argument(Kind.LITERAL, "deepspeed", reason="ds.json")}
    assert facts_for("SFTConfig(deepspeed='ds.json')", told)("distributed").value == "deepspeed"
    assert facts_for("SFTConfig(fsdp='x')", told)("distributed").kind is Kind.UNKNOWN
