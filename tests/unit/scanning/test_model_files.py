"""What the files of a model tell, and what they leave open. They may be anything, since they come from the network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trl_hotfix.catalogue.conditions import Kind
from trl_hotfix.errors import ScriptError
from trl_hotfix.scanning import model_files
from trl_hotfix.scanning.model_files import model_facts

DENSE = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "eos_token_id": 2}
TOKENIZER = {"eos_token": "</s>", "pad_token": "<pad>", "added_tokens_decoder": {"2": {"content": "</s>"}}}


def folder_with(folder: Path, **files: Any) -> Path:
    """Return a folder with these JSON files, and the usual ones of a small model."""
    contents = {"config": DENSE, "tokenizer_config": TOKENIZER, **files}
    for name, content in contents.items():
        if content is not None:
            (folder / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def known(folder: Path) -> dict[str, Any]:
    """Return the facts that are known."""
    return {name: fact.value for name, fact in model_facts(folder).items() if fact.kind is Kind.LITERAL}


def test_a_dense_model_is_known_to_be_one(tmp_path: Path) -> None:
    facts = known(folder_with(tmp_path))
    assert facts == {
        "experts": False,
        "model_type": "qwen2",
        "router_loss": False,
        "scales_logits": False,
        "quantized": False,
        "labels": 2,
        "pad_is_eos": False,
        "other_ends": False,
        "sampling_settings": False,
    }


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}, True),
        ({"model_type": "qwen3_moe", "num_experts": 128}, True),
        ({"model_type": "deepseek_v3", "n_routed_experts": 256}, True),
        ({"model_type": "some_vlm", "text_config": {"num_experts": 64}}, True),
        # The class may have experts where the file has no number.
        ({"model_type": "mixtral"}, None),
        ({"model_type": "x", "architectures": ["OlmoeForCausalLM"]}, None),
        ({"architectures": None}, None),
        ({"model_type": "x", "expert_layer_period": 2}, None),
        ({"model_type": "x", "num_experts": 1}, None),
        ({"model_type": "x", "num_experts": True}, None),
        ({"model_type": "x", "num_experts": None, "enable_moe_block": False}, False),
        ({"model_type": "llama"}, False),
    ],
)
def test_a_mixture_of_experts_is_told_by_the_number_of_its_experts(
    tmp_path: Path, config: dict[str, Any], expected: bool | None
) -> None:
    assert known(folder_with(tmp_path, config=config)).get("experts") is expected


@pytest.mark.parametrize(
    ("config", "router_loss", "quantized"),
    [
        ({"model_type": "mixtral", "num_local_experts": 8, "output_router_logits": False}, True, False),
        ({"model_type": "some_vlm", "text_config": {"num_experts": 64, "output_router_logits": True}}, True, False),
        # The class may have it where the file has none.
        ({"model_type": "mixtral", "num_local_experts": 8}, None, False),
        ({"model_type": "llama", "quantization_config": {"load_in_4bit": True}}, False, True),
        ({"model_type": "llama", "quantization_config": {"load_in_8bit": True, "load_in_4bit": False}}, False, True),
        ({"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}}, False, False),
        ({"model_type": "llama", "quantization_config": None}, False, False),
        ({"model_type": "llama", "quantization_config": "x"}, False, None),
    ],
)
def test_a_loss_of_the_router_and_the_bits_are_told_by_the_config(
    tmp_path: Path, config: dict[str, Any], router_loss: bool | None, quantized: bool | None
) -> None:
    facts = known(folder_with(tmp_path, config=config))
    assert (facts.get("router_loss"), facts.get("quantized")) == (router_loss, quantized)


@pytest.mark.parametrize(
    ("tokenizer", "special", "expected"),
    [
        ({"eos_token": "a", "pad_token": "a"}, None, True),
        ({"eos_token": {"content": "a"}, "pad_token": {"content": "a", "lstrip": False}}, None, True),
        ({"eos_token": "a", "pad_token": "b"}, None, False),
        ({"eos_token": "a", "pad_token": None}, None, True),
        ({"eos_token": "a"}, {"pad_token": "b"}, False),
        ({"pad_token": "b"}, None, None),
        (None, None, None),
    ],
)
def test_the_padding_token_is_compared_with_the_end_of_sequence(
    tmp_path: Path, tokenizer: Any, special: Any, expected: bool | None
) -> None:
    folder = folder_with(tmp_path, tokenizer_config=tokenizer, special_tokens_map=special)
    assert known(folder).get("pad_is_eos") is expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config": {"eos_token_id": [2, 7]}}, True),
        ({"generation_config": {"eos_token_id": [2]}}, False),
        ({"generation_config": {"eos_token_id": 7}}, True),
        ({"generation_config": {}}, None),
        ({"generation_config": {"eos_token_id": "2"}}, None),
        ({"config": {**DENSE, "eos_token_id": [2, 7]}}, True),
        ({"tokenizer_config": {"eos_token": "</s>"}}, None),
        ({"tokenizer_config": {"eos_token": "</s>"}, "config": {**DENSE, "eos_token_id": [2, 7]}}, True),
        (
            {
                "tokenizer_config": {"eos_token": "</s>"},
                "tokenizer": {"added_tokens": [{"content": "</s>", "id": 2}, 3, {"content": "x"}]},
            },
            False,
        ),
        ({"tokenizer_config": {"eos_token": "</s>"}, "tokenizer": {"model": {"vocab": {"</s>": 9}}}}, True),
        ({"tokenizer_config": {"eos_token": "</s>"}, "tokenizer": {"model": {"vocab": [["</s>", 0.0]]}}}, None),
    ],
)
def test_the_ends_of_the_model_are_compared_with_that_of_the_tokenizer(
    tmp_path: Path, files: dict[str, Any], expected: bool | None
) -> None:
    assert known(folder_with(tmp_path, **files)).get("other_ends") is expected


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({"top_p": 0.95, "temperature": 0.6}, True),
        ({"top_k": 20}, True),
        ({"top_k": 50}, None),
        ({"temperature": 0.6}, None),
        ({"top_p": 1, "repetition_penalty": 1.0, "min_p": None}, False),
        ({}, False),
    ],
)
def test_sampling_settings_of_the_checkpoint(tmp_path: Path, generation: Any, expected: bool | None) -> None:
    assert known(folder_with(tmp_path, generation_config=generation)).get("sampling_settings") is expected


def test_the_logits_are_scaled_and_labels_are_counted(tmp_path: Path) -> None:
    granite = {"model_type": "granite", "logits_scaling": 8.0, "id2label": {"0": "LABEL_0"}}
    facts = known(folder_with(tmp_path, config=granite))
    assert (facts["scales_logits"], facts["labels"]) == (True, 1)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "granite", "num_labels": "x"}))
    assert not {"scales_logits", "labels"} & known(tmp_path).keys()


LORA = {"peft_type": "LORA", "target_modules": ["q_proj", "v_proj"]}


@pytest.mark.parametrize(
    ("adapter", "expected"),
    [
        (LORA, True),
        ({**LORA, "target_modules": ["q_proj", "embed_tokens"]}, False),
        ({**LORA, "target_modules": ["wte"]}, False),
        ({**LORA, "trainable_token_indices": [7]}, False),
        ({"peft_type": "IA3", "target_modules": ["k_proj"]}, False),
        ({"peft_type": "VERA"}, False),
        ({"peft_type": "PROMPT_TUNING"}, None),
        ({**LORA, "target_modules": ".*proj"}, None),
        ({**LORA, "target_modules": None}, None),
        ({**LORA, "target_modules": [1]}, None),
        ({**LORA, "target_parameters": ["experts.w1"]}, None),
        (None, None),
    ],
)
def test_an_adapter_is_a_plain_lora_or_not(tmp_path: Path, adapter: Any, expected: bool | None) -> None:
    assert known(folder_with(tmp_path, adapter_config=adapter)).get("plain_lora") is expected


def test_the_folder_of_an_adapter_has_no_config_of_its_base(tmp_path: Path) -> None:
    base = folder_with(tmp_path)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    folder_with(adapter, config=None, adapter_config={**LORA, "base_model_name_or_path": str(base)})
    assert known(adapter) == {"pad_is_eos": False, "plain_lora": True}


FILES = ("config", "generation_config", "tokenizer_config", "special_tokens_map", "adapter_config")
BROKEN = {
    "empty": ("", "is not JSON: Expecting value"),
    "no JSON": ("{'a': 1}", "is not JSON"),
    "a list": ("[1]", "has no object, but a list"),
    "deep": ("[" * 100_000, "is not JSON"),
    "a long number": ('{"eos_token_id": ' + "9" * 5000 + "}", "is not JSON"),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("file", FILES)
def test_a_broken_file_is_one_clear_error(tmp_path: Path, name: str, file: str) -> None:
    text, expected = BROKEN[name]
    with pytest.raises(ScriptError, match=expected) as caught:
        model_facts(folder_with(tmp_path, **{file: text}))
    assert str(caught.value).startswith(f"--model: {tmp_path / file}.json")
    assert "\n" not in str(caught.value)


def test_what_is_no_folder_of_a_model_is_one_clear_error(tmp_path: Path) -> None:
    for path, expected in (
        (tmp_path / "gone", "is no folder"),
        (Path("Qwen/Qwen2-0.5B"), "nothing is downloaded"),
        (tmp_path, "has no config.json and no adapter_config.json"),
    ):
        with pytest.raises(ScriptError, match=expected):
            model_facts(path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ScriptError, match="it is no regular file, but a folder"):
        model_facts(tmp_path)
    (tmp_path / "config.json").rmdir()
    (tmp_path / "config.json").symlink_to(tmp_path / "gone")
    with pytest.raises(ScriptError, match="cannot be read: No such file"):
        model_facts(tmp_path)
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ScriptError, match="it is no regular file, but a pipe"):
        model_facts(tmp_path)


def test_bytes_and_huge_files_are_one_clear_error(tmp_path: Path) -> None:
    folder_with(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ScriptError, match="is not JSON"):
        model_facts(tmp_path)
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(model_files._LARGEST_OTHER + 1)
    with pytest.raises(ScriptError, match="has more than 8 MiB"):
        model_facts(tmp_path)


@pytest.mark.parametrize("value", [None, True, 1.5, "x", [], [[1]], {}, {"a": {}}])
def test_values_of_any_kind_leave_facts_open_and_fail_nothing(tmp_path: Path, value: Any) -> None:
    names = ("model_type", "architectures", "eos_token_id", "id2label", "num_labels", "logits_scaling", "num_experts")
    config = dict.fromkeys((*names, "router_aux_loss_coef", "output_router_logits", "text_config"), value)
    tokenizer = dict.fromkeys(("eos_token", "pad_token", "added_tokens_decoder"), value)
    generation = dict.fromkeys(("eos_token_id", "top_k", "top_p", "temperature"), value)
    folder = folder_with(tmp_path, config=config, tokenizer_config=tokenizer, generation_config=generation)
    (folder / "tokenizer.json").write_text(json.dumps(dict.fromkeys(("added_tokens", "model"), value)))
    assert all(fact.kind in (Kind.LITERAL, Kind.UNKNOWN) for fact in model_facts(folder).values())


def test_neither_torch_nor_transformers_is_imported(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("from trl import SFTTrainer\nSFTTrainer('m')\n")
    arguments = ["scan", str(script), "--trl", "0.11.4", "--model", str(folder_with(tmp_path))]
    code = (
        f"import sys; from trl_hotfix.commands.main import main\ntry: main({arguments})\n"
        "finally: print([name for name in ('torch', 'transformers', 'trl', 'tokenizers') if name in sys.modules])"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.stdout.splitlines()[-1] == "[]", process.stderr


def saved_tokenizer(folder: Path, **tokens: str | None) -> None:
    """Save a tokenizer of five words as transformers does."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: index for index, word in enumerate(("<unk>", "<pad>", "</s>", "hello", "<end_of_turn>"))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **tokens).save_pretrained(folder)


@pytest.mark.needs_trl
@pytest.mark.parametrize(("pad", "expected"), [("<pad>", False), ("</s>", True), (None, True)])
def test_a_tokenizer_that_transformers_has_saved_is_read(tmp_path: Path, pad: str | None, expected: bool) -> None:
    saved_tokenizer(tmp_path, eos_token="</s>", **({"pad_token": pad} if pad is not None else {}))
    folder_with(tmp_path, tokenizer_config=None, generation_config={"eos_token_id": [2, 4]})
    facts = known(tmp_path)
    assert (facts["pad_is_eos"], facts["other_ends"]) == (expected, True)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 2}')
    assert known(tmp_path)["other_ends"] is False
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    assert known(tmp_path)["other_ends"] is False


@pytest.mark.matrix
def test_no_config_of_transformers_is_cleared_of_what_it_has(tmp_path: Path) -> None:
    from transformers import CONFIG_MAPPING

    saved = 0
    for model_type in CONFIG_MAPPING:
        folder = tmp_path / model_type
        try:
            config = CONFIG_MAPPING[model_type]()
            config.save_pretrained(folder)
        # A few configs need arguments, or a library that is not here.
        except (AssertionError, AttributeError, ImportError, NotImplementedError, TypeError, ValueError):
            continue
        saved += 1
        text_config = getattr(config, "text_config", None) or config
        facts = known(folder)
        if any(hasattr(part, "output_router_logits") for part in (config, text_config)):
            assert facts.get("experts") is not False, model_type
        factors = [getattr(text_config, name, None) for name in ("logits_scaling", "lm_head_multiplier")]
        assert facts.get("scales_logits") in (None, any(factor not in (None, 1) for factor in factors)), model_type
        assert facts.get("labels") in (None, config.num_labels), model_type
    assert saved > 200


BEGINS = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {}}]}
BYTES = {"type": "ByteLevel"}


@pytest.mark.parametrize(
    ("name", "processor", "settings", "expected"),
    [
        ("PreTrainedTokenizerFast", BEGINS, {}, True),
        ("LlamaTokenizerFast", {"type": "Sequence", "processors": [BYTES, BEGINS]}, {"add_bos_token": True}, True),
        ("LlamaTokenizerFast", BEGINS, {"add_bos_token": False}, None),
        ("GPTNeoXTokenizerFast", BEGINS, {}, None),
        ("Qwen2Tokenizer", BYTES, {"add_bos_token": False}, False),
        ("PreTrainedTokenizerFast", None, {}, False),
        ("PreTrainedTokenizerFast", None, {"add_bos_token": True}, None),
        ("LlamaTokenizer", None, {}, None),
        ("PreTrainedTokenizerFast", {"type": "BertProcessing"}, {}, None),
        ("PreTrainedTokenizerFast", [1], {}, None),
    ],
)
def test_the_post_processor_tells_whether_a_text_gets_a_beginning(
    tmp_path: Path, name: str, processor: Any, settings: dict[str, Any], expected: bool | None
) -> None:
    tokenizer = {"tokenizer_class": name, "bos_token": "<s>", **settings}
    folder = folder_with(tmp_path, tokenizer_config=tokenizer, tokenizer={"post_processor": processor})
    assert known(folder).get("adds_bos") is expected
    del tokenizer["bos_token"]
    folder = folder_with(tmp_path, tokenizer_config=tokenizer, special_tokens_map={"bos_token": {"content": "<s>"}})
    assert known(folder).get("adds_bos") is expected
