"""What an expression evaluates to: only a literal decides a condition."""

from __future__ import annotations

from typing import Any

import pytest

DROPPED = "dpo-precomputed-ref-logps-dropped"


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("precompute_ref_log_probs=True", "precompute_ref_log_probs=flag()", "flag() returns is not in the text"),
        ("precompute_ref_log_probs=True", "**options", "**options may set it"),
        ("precompute_ref_log_probs=True", "precompute_ref_log_probs=cli.x", ": cli.x (line 9)"),
        ("model=model,", "model=model, ref_model=get_reference(),", "get_reference() returns is not in the text"),
        ("model=model,", "model=load(),", "load() returns is not in the text"),
        # It may return None, as may each function.
        ("model=model,", "model=model, ref_model=Parts.reference(),", "Parts.reference() returns is not in the text"),
        ("model=model,", "model=model, **more,", "**more may set it"),
        ("args=training_args", "args=parse()", "parse() returns is not in the text"),
    ],
)
def test_what_is_not_a_literal_cannot_be_told(scan: Any, dpo_script: str, old: str, new: str, reason: str) -> None:
    (trainer,) = scan(dpo_script.replace(old, new))
    assert DROPPED not in trainer.hit_ids
    assert reason in trainer.unknown[DROPPED]


@pytest.mark.parametrize(
    "text",
    [
        "from trl import DPOTrainer\nx = " + "(" * 60 + "1" + ")" * 60 + "\nDPOTrainer(x)",
        "from trl import DPOTrainer\nx = " + " + ".join(["1"] * 900) + "\nDPOTrainer(x, args=x)",
        "from trl import DPOTrainer\nx = x\nDPOTrainer(x, args=x)\ny = z\nz = y\nDPOTrainer(y, args=z)",
        "from trl import DPOTrainer\na, b = 1, 2\nfor i in c:\n    a = b\n    b = a\nDPOTrainer(a, args=b, beta=a)",
        "from trl import DPOTrainer\nx0 = f()\n"
        + "".join(f"x{n} = [x{n - 1}, x{n - 1}]\n" for n in range(1, 40))
        + "DPOTrainer(x39)",
        "from trl import DPOTrainer\nDPOTrainer = DPOTrainer\nDPOTrainer(1)",
        "from trl import DPOTrainer\nclass A(B): ...\nclass B(A, DPOTrainer): ...\nA(*x, **y)\nB(*x)(1)",
        "from trl import DPOTrainer\nDPOTrainer(1 / 0, args=DPOTrainer, **{**a, 1: 2})\nDPOTrainer(*DPOTrainer())",
        "match x:\n    case {'a': y, **rest}:\n        y = 1\n    case [1, *z] as w:\n        pass",
        "async def f(a, /, *b, c=1, **d):\n    async for a.b in c: 1\n    del a, a.b, a[0]\n    a += 1\n    a.b += 1",
        "nonsense = [y := 1 for x in (lambda z: z)(1)]\nx: int\nx.y: int = 1\nfor x[0], *y in z: pass",
        "from trl import DPOTrainer\nDPOTrainer(args=10 ** 10 ** 10, model=1 << 10 ** 9, x='a' * 10 ** 12)",
    ],
)
def test_odd_python_is_scanned_without_an_error(scan: Any, text: str) -> None:
    for trainer in scan(text):
        assert trainer.not_hit >= 0
