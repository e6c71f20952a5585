"""Train a Mamba2 with GRPO and RLOO on prompts of two lengths, two steps of eight micro-batches of one row each.

Each log-prob is compared with that which the plain model gives the row without its padding. The accumulated gradients
are those of the same steps as one batch of eight rows, in which transformers masks the padding.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trl_hotfix.authoring import absent, judge, shadowed
from trl_hotfix.matching.versions import in_range
from trl_hotfix.model import Verdict

import tiny

ID = "recurrent-model-sees-padding-of-one-row"
OVERLAYS = ()
PARITY = False
VARIANTS = "The models of the variants have no recurrence."
EQUIVALENT = {"applied twice": "a row without padding has none to cut"}

NAMES = ("_get_per_token_logps", "_get_per_token_logps_and_entropies")
PROMPTS = ("w1 w2", "w3 w4 w5 w6 w7 w8", "w9", "w2 w4 w6 w8")


def train() -> tiny.TrainingResult:
    from importlib import metadata

    import transformers

    release = metadata.version("trl")
    if in_range(release, "<0.18.0"):
        return tiny.TrainingResult(absent("each row is generated and scored alone, without padding"))
    if not in_range(transformers.__version__, ">=4.50,<5.15"):
        return tiny.TrainingResult(absent("this transformers masks the padding of one row"))
    runs, outcomes = {}, []
    for method in ("GRPO", "RLOO") if in_range(release, ">=0.22.0") else ("GRPO",):
        runs[method] = trained(method, rows=1)
        whole = trained(method, rows=8)
        measured, right, wrong = runs[method].sums
        outcomes.append(judge(measured, right=right, wrong=wrong))
        is_right = outcomes[-1].verdict is Verdict.FIXED
        assert (runs[method].off < 1e-4) == is_right, (method, runs[method].off)
        assert whole.off < 1e-4, (method, whole.off)
        differences = [
            step.difference(expected.gradients) for step, expected in zip(runs[method].steps, whole.steps, strict=True)
        ]
        assert len(differences) == 2, method
        assert (max(differences) < 1e-4) == is_right, (method, differences)
        assert differences[0] > 1e-2 or is_right, (method, differences)
    assert len({outcome.verdict for outcome in outcomes}) == 1, outcomes
    return tiny.result_of_runs(runs, outcomes[0])


def unaffected() -> tiny.TrainingResult:
    """Train a Llama alike, and a Mamba2 on prompts of one length."""
    runs = {
        "Llama": trained("GRPO", rows=1, model=lambda folder: tiny.llama(folder, seed=0)),
        "one length": trained("GRPO", rows=1, prompts=("w1 w2 w3",) * 4),
    }
    for kind, run in runs.items():
        names = ("_full_logits_logps", *NAMES)
        name = next(name for name in names if hasattr(tiny.classes("GRPO")[0], name))
        assert not tiny.acts(ID, f"trl.trainer.grpo_trainer:GRPOTrainer.{name}", run), kind
        assert run.off < 1e-4, (kind, run.off)
    return tiny.result_of_runs(runs, absent("there is no recurrence, or no padding"))


def mamba2(folder: str) -> Any:
    """Return a Mamba2 of two layers, from disk."""
    import torch
    from transformers import AutoModelForCausalLM, Mamba2Config, Mamba2ForCausalLM

    torch.manual_seed(0)
    heads = {"num_heads": 4, "head_dim": 8, "expand": 2, "n_groups": 1, "state_size": 4, "chunk_size": 8}
    ends = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    config = Mamba2Config(vocab_size=64, hidden_size=16, num_hidden_layers=2, initializer_range=0.5, **heads, **ends)
    Mamba2ForCausalLM(config).save_pretrained(Path(folder, "mamba2"))
    return AutoModelForCausalLM.from_pretrained(Path(folder, "mamba2"))


@contextmanager
def accepting_logits_to_keep() -> Iterator[None]:
    """Let Mamba2 take ``logits_to_keep``, which TRL 0.19.0 passes to every model."""
    from transformers import Mamba2ForCausalLM

    original = Mamba2ForCausalLM.forward

    def forward(self: Any, *args: Any, logits_to_keep: int = 0, **kwargs: Any) -> Any:
        outputs = original(self, *args, **kwargs)
        outputs.logits = outputs.logits[:, -logits_to_keep:]
        return outputs

    if "logits_to_keep" in inspect.signature(original).parameters:
        yield
    else:
        with shadowed(Mamba2ForCausalLM, "forward", forward):
            yield


def trained(method: str, *, rows: int, model: Any = mamba2, prompts: tuple[str, ...] = PROMPTS) -> Any:
    """Train two steps of eight rows, as many at a time as ``rows`` says, and evaluate.

    The trainer has ``sums`` of the log-probs of all tokens: TRL's, the right ones, and those that see the padding. And
    it has ``off``, the largest difference of a log-prob from the right one.
    """
    import torch

    trainer_class, config_class = tiny.classes(method)
    sums, off = [0.0, 0.0, 0.0], [0.0]

    def record(measured: Any, model: Any, ids: Any, mask: Any, kept: int, size: int) -> None:
        def of_row(row: int, begin: int) -> Any:
            tokens, attention = ids[row : row + 1, begin:], mask[row : row + 1, begin:]
            logits = model(input_ids=tokens, attention_mask=attention).logits[:, -kept - 1 : -1]
            return logits.log_softmax(-1).gather(2, tokens[:, -kept:, None])[..., 0]

        with torch.no_grad():
            right = torch.cat([of_row(row, int(mask[row].argmax())) for row in range(len(ids))])
            wrong = torch.cat([of_row(row, 0) for row in range(len(ids))]) if size == 1 else right
            completions = mask[:, -kept:]
            off[0] = max(off[0], float(((measured - right) * completions).abs().max()))
            for index, log_probs in enumerate((measured, right, wrong)):
                sums[index] += float((log_probs * completions).sum())

    class Recorder(tiny.stepwise(trainer_class)):  # type: ignore[misc]
        def _scored(self, name: str, model: Any, ids: Any, mask: Any, kept: int, *args: Any, **kwargs: Any) -> Any:
            outputs = getattr(super(), name)(model, ids, mask, kept, *args, **kwargs)
            plain = self.accelerator.unwrap_model(model)
            # 0.19.0 scores the reference on all rows at once.
            size = (args[0] if args else kwargs.get("batch_size")) or len(ids)
            record(outputs[0] if isinstance(outputs, tuple) else outputs, plain, ids, mask, kept, size)
            return outputs

        def _get_per_token_logps(self, *args: Any, **kwargs: Any) -> Any:
            return self._scored(NAMES[0], *args, **kwargs)

        def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
            return self._scored(NAMES[1], *args, **kwargs)

    settings = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 8 // rows, "max_steps": 2}
    settings |= {"per_device_eval_batch_size": 4, "num_iterations": 1, "beta": 0.04, "optim": "sgd"}
    # A mean over each completion, which does not depend on the micro-batch.
    settings |= {"learning_rate": 1e-2, **({"loss_type": "grpo"} if method == "GRPO" else {})}
    with tempfile.TemporaryDirectory() as folder, accepting_logits_to_keep():
        torch.manual_seed(0)
        trainer = tiny.grpo(Recorder, model(folder), config_class, prompts=prompts, **settings)
        trainer.train()
        trainer.evaluate(trainer.train_dataset)
    trainer.sums, trainer.off = sums, off[0]
    return trainer
