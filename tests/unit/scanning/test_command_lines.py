"""What transformers' parser makes of the words of a command line, and of the texts of a config."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import pytest
from transformers import HfArgumentParser

from trl_hotfix.catalogue.conditions import Argument, Kind
from trl_hotfix.scanning.command_lines import CommandLine
from trl_hotfix.scanning.scripts import read

SCRIPT = """\
from trl import ModelConfig, SFTConfig, SFTTrainer, TrlParser, get_peft_config
args, model = TrlParser((SFTConfig, ModelConfig)).parse_args_and_config()
SFTTrainer(model.model_name_or_path, args=args, peft_config=get_peft_config(model)).train()
"""


def asked(tmp_path: Path, words: list[str], name: str) -> Argument:
    """Return the argument of the trainer of a script that is started with some words."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    (call,) = read(script, words=words).calls
    return call.argument(name)


@dataclass
class Options:
    packing: bool = False
    average: bool = True
    steps: int = 1
    rate: float = 0.1
    name: Optional[str] = None  # noqa: UP045


WORDS = [
    *("--packing", "--packing t", "--packing Yes", "--packing=0", "--no_average", "--average n", "--average TRUE"),
    *(
        "--steps 010",
        "--steps 1_000",
        "--rate 1e-1",
        "--rate .5",
        "--name 1:30",
        "--name on",
        "--name no",
        "--rate inf",
    ),
]


@pytest.mark.parametrize("words", WORDS)
def test_a_word_is_what_the_parser_of_transformers_makes_of_it_or_may_be(words: str) -> None:
    (options,) = HfArgumentParser(Options).parse_args_into_dataclasses(args=words.split())
    for name, said in CommandLine.parse(words.split()).values.items():
        possible = [said.value] if said.kind is Kind.LITERAL else [one.value for one in said.alternatives]
        assert getattr(options, name) in possible


@pytest.mark.parametrize("words", ["--gradient_acc 4", "--grad 4", "--gradient-accum=4"])
def test_the_beginning_of_an_option_may_be_the_option(tmp_path: Path, words: str) -> None:
    found = asked(tmp_path, words.split(), "gradient_accumulation_steps")
    assert found.kind is Kind.UNKNOWN
    assert "may be short for it" in found.reason


def test_a_switch_takes_one_word_and_leaves_the_others(tmp_path: Path) -> None:
    assert asked(tmp_path, ["--packing", "true", "packing_strategy", "wrapped"], "packing").value is True


def test_an_option_that_others_begin_with_is_itself(tmp_path: Path) -> None:
    assert asked(tmp_path, ["--packing"], "packing_strategy").kind is Kind.UNSET


def test_a_mapping_of_a_command_line_is_followed(tmp_path: Path) -> None:
    words = ["--model_init_kwargs", '{"revision": "v2"}']
    assert asked(tmp_path, words, "model_init_kwargs.revision").value == "v2"


def test_a_mapping_of_a_config_is_followed(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("model_init_kwargs:\n  revision: v2\n")
    found = asked(tmp_path, ["--config", str(config)], "model_init_kwargs.revision")
    assert (found.value, found.place) == ("v2", f"{config}, line 1")


@pytest.mark.parametrize(
    ("words", "value"), [("--use_peft --use_dora", True), ("--use_peft", None), ("--use_peft --lora_r 8", None)]
)
def test_a_part_of_an_adapters_config_is_what_the_command_line_says(tmp_path: Path, words: str, value: Any) -> None:
    assert asked(tmp_path, words.split(), "peft_config.use_dora").value is value


def test_an_adapters_config_of_a_command_line_that_is_not_told_is_none_or_lora(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    (call,) = read(script).calls
    adapter, model = call.argument("peft_config"), call.argument("model")
    assert [one.made_by for one in adapter.alternatives] == [(), ("peft.LoraConfig",)]
    assert model.made_by == ("str",)
