"""The range of each known bug without a repair is that of the code that has it, in every release of TRL.

These bugs have no self-test. The tests look for the line with the mistake, or the one that mends it. They run a bug of
a layer on stacks that have it, and on the next ones.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from trl_hotfix.catalogue import loading
from trl_hotfix.matching import gates
from trl_hotfix.matching.versions import in_range

from bench.releases import layout

Texts = Callable[[str], str]
"""Return the text of a module by its name, from ``trl/trainer``, or from ``trl/experimental`` where it has moved."""


SIGNS: dict[str, Callable[[Texts], bool]] = {
    "gold-eos-masked-when-pad-is-eos": lambda text: "[new_input_ids == pad_token_id] = -100" in text("gold_trainer"),
    "dpo-evaluate-precomputes-with-trained-policy": lambda text: (
        'eval_dataset = self._precompute_ref_logps(eval_dataset, "eval", batch_size)' in text("dpo_trainer")
        and 'eval_dataset = self._precompute_ref_logps(eval_dataset, "eval", batch_size)' in text("kto_trainer")
        and "and self.state.global_step > 0" not in text("dpo_trainer") + text("kto_trainer")
    ),
}


GEMMA_3N = """
import torch, transformers
config = transformers.Gemma3nTextConfig(
    vocab_size=32, vocab_size_per_layer_input=32, hidden_size=16, hidden_size_per_layer_input=4, intermediate_size=16,
    num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_kv_shared_layers=2,
    layer_types=["sliding_attention", "full_attention"] * 2, altup_num_inputs=2, activation_sparsity_pattern=[0.0] * 4,
    initializer_range=0.5, sliding_window=8, laurel_rank=4,
)
torch.manual_seed(0)
model, ids = transformers.Gemma3nForCausalLM(config).eval(), torch.arange(2, 12)[None]
with_cache, without = (float(model(input_ids=ids, labels=ids, use_cache=use).loss) for use in (True, False))
print("found" if abs(with_cache - without) > 0.01 else "not there")
"""

GEMMA_3_TOKENS = """
import peft, torch, transformers
config = transformers.Gemma3TextConfig(
    vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8,
)
torch.manual_seed(0)
model, ids = transformers.Gemma3ForCausalLM(config).eval(), torch.arange(2, 12)[None]
before = model(input_ids=ids).logits
tokens = peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [5, 6]})
with_adapter = peft.get_peft_model(model, tokens).eval()(input_ids=ids).logits
print("found" if float((with_adapter - before).abs().max()) > 0.001 else "not there")
"""

TWO_ROWS = """
import tempfile, torch, transformers
sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
config = transformers.LlamaConfig(vocab_size=16, initializer_range=0.5, **sizes)
rows = [{"ids": [2, 3]}, {"ids": [4, 5, 6, 7, 8, 9]}]

def collate(rows):
    width = max(len(row["ids"]) for row in rows)
    ids = torch.tensor([row["ids"] + [0] * (width - len(row["ids"])) for row in rows])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}

def loss(batch_size):
    sizes = {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": 2 // batch_size}
    arguments = transformers.TrainingArguments(
        tempfile.mkdtemp(), max_steps=1, learning_rate=0.0, use_cpu=True, report_to=[], remove_unused_columns=False,
        **sizes,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    return transformers.Trainer(model, arguments, train_dataset=rows, data_collator=collate).train().training_loss

print("found" if abs(loss(1) - loss(2)) > 0.01 else "not there")
"""

SEQUENCE_PARALLEL = """
import os, tempfile, torch, torch.distributed as dist, torch.distributed.nn.functional, transformers
from types import SimpleNamespace as Stub
mesh = {"sp": Stub(get_group=lambda: dist.group.WORLD)}
try:
    from transformers.integrations.deepspeed import deepspeed_sp_compute_loss
except ImportError:
    method = getattr(transformers.Trainer, "_deepspeed_sp_compute_loss", None)
    deepspeed_sp_compute_loss = method and (lambda accelerator, *rest: method(Stub(accelerator=accelerator), *rest))
if deepspeed_sp_compute_loss is None:
    raise SystemExit(print("not there"))
path = tempfile.mktemp()
child = os.fork()
dist.init_process_group("gloo", init_method=f"file://{path}", rank=0 if child else 1, world_size=2)

def gradient(tokens):
    weight = torch.ones((), requires_grad=True)
    inputs = {"shift_labels": torch.ones(1, tokens, dtype=torch.long)}
    parallelism, accelerator = Stub(sp_backend="torch", sp_size=2), Stub(torch_device_mesh=mesh)
    model = lambda **inputs: Stub(loss=1.0 * weight)
    deepspeed_sp_compute_loss(accelerator, model, inputs, False, parallelism).backward()
    dist.all_reduce(weight.grad)  # as ZeRO-1 and 2 do
    return float(weight.grad)

"""
TIMES_RANKS = 'print("found" if gradient(2) == 2 else "not there") if child else os._exit(gradient(2) != 2)'
OF_ONE_WEIGHT = 'alike = gradient(2) == gradient(5)\nprint("found" if alike else "not there") if child else os._exit(0)'

RUNS: dict[str, tuple[str, dict[str, str]]] = {
    "sft-mean-of-micro-batch-means": (
        TWO_ROWS,
        {"tf4.40": "found", "tf4.44": "found", "tf4.45": "found", "tf4.46": "not there", "tf4.57": "not there"},
    ),
    "gemma-embedding-adapter-scale": (
        GEMMA_3_TOKENS,
        {"tf4.50": "found", "tf4.53": "found", "tf4.56": "found", "tf4.57": "not there", "tf5.23": "not there"},
    ),
    "gemma3n-kv-sharing-lost": (
        GEMMA_3N,
        {"tf4.53": "found", "tf4.57": "found", "tf5.2": "found", "tf5.9": "not there", "tf5.23": "not there"},
    ),
    **{
        f"sft-sp-{bug}": (
            SEQUENCE_PARALLEL + judgement,
            {"tf4.57": "not there", "tf5.0": "found", "tf5.2": "found", "tf5.9": "found", "tf5.23": "found"},
        )
        for bug, judgement in (
            ("gradient-times-sp-size", TIMES_RANKS),
            ("micro-batches-not-token-weighted", OF_ONE_WEIGHT),
        )
    },
}
"""A script that says whether the bug of a layer is there, and what it says on stacks."""


def texts_of(release: str) -> Texts:
    root = layout.BENCH / "overlay" / release / "trl"

    def text(module: str) -> str:
        name = module.removesuffix("_trainer")
        moved = root / "experimental" / name / f"{module}.py"
        files = (moved, root / "trainer" / f"{module}.py", root / f"{module}.py")
        return next((file.read_text(encoding="utf-8") for file in files if file.is_file()), "")

    return text


def test_every_known_bug_has_a_sign() -> None:
    assert {bug.id for bug in loading.without_repair()} == SIGNS.keys() | RUNS.keys()
    assert {bug.id for bug in loading.without_repair() if bug.layer} == RUNS.keys()


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("bug", "stack"), [(bug, stack) for bug, (_, stacks) in RUNS.items() for stack in stacks], ids=str
)
def test_a_bug_of_a_layer_is_where_it_says(bug: str, stack: str) -> None:
    place = next(place for place in layout.places() if place.stack == stack and not place.transformers)
    layout.build([place])
    script, expected = RUNS[bug]
    run = subprocess.run([str(place.python), "-c", script], capture_output=True, text=True, check=False)
    assert run.stdout.split("\n")[-2:] == [expected[stack], ""], run.stderr
    (known,) = (entry for entry in loading.without_repair() if entry.id == bug)
    ((package, requires),) = known.requires.items()
    version = layout.versions(stack)[package]
    assert in_range(version, requires) == (expected[stack] == "found")


OF_TRL = [bug for bug in loading.without_repair() if not bug.layer]


@pytest.mark.matrix
@pytest.mark.parametrize("bug", OF_TRL, ids=[bug.id for bug in OF_TRL])
def test_the_range_has_the_releases_with_the_sign_and_no_other(bug: object) -> None:
    layout.build_release_overlays(Path(sys.executable))
    known = next(entry for entry in loading.without_repair() if entry is bug)
    with_sign = [release for release in layout.releases() if SIGNS[known.id](texts_of(release))]
    assert with_sign == [release for release in layout.releases() if gates.has_bug(release, known)]
