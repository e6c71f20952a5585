"""``trl_hotfix.stubs`` keeps the names that it had in 0.1.0."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import trl_hotfix
from trl_hotfix import stubs, testing

CHECKOUT = Path(trl_hotfix.__file__).parents[1]
NAMES_IN_0_1_0 = {
    *("CharacterTokenizer", "Enough", "ONE_PROCESS", "alone", "begin_trainer", "completions_of", "constructed"),
    *("default_arguments", "dpo_stub", "handed_on", "online_dpo_stub", "sft_moe_loss", "sft_prepared", "stream"),
    *("stub_grpo_trainer", "stub_that_generates", "stub_trainer", "tiny_attention_model", "tiny_causal_lm"),
    *("tiny_tokenizer", "wrapped_like_deepspeed"),
}


def test_the_names_of_0_1_0_keep_their_meaning() -> None:
    assert set(stubs.__all__) >= NAMES_IN_0_1_0
    assert all(hasattr(stubs, name) for name in stubs.__all__)
    assert stubs.alone is testing.single_process
    assert stubs.Enough is testing.StopConstruction
    assert stubs.handed_on is testing.absent_if_reexported
    renamed = {"alone", "Enough", "handed_on"}
    assert all(getattr(stubs, name) is getattr(testing, name) for name in set(stubs.__all__) - renamed)


def test_the_old_module_imports_nothing_heavy() -> None:
    code = (
        "import sys; from trl_hotfix.stubs import alone, Enough, handed_on, CharacterTokenizer\n"
        "heavy = {'torch', 'transformers', 'trl', 'datasets', 'tokenizers', 'numpy', 'accelerate', 'wrapt'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    process = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True)
    assert (process.stdout.strip(), process.stderr) == ("[]", "")
