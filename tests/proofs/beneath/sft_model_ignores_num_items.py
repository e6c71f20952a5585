"""Train two steps of eight rows as 8x1, 4x2 and 2x4 with the real SFTTrainer: they have one gradient and one loss.

The models are a Mamba, and a Gemma 3 where transformers has the bug there. The expected gradients are those of the mean
over the tokens of a step, by the logits of the model. Prompts are not trained on, so no first token is counted.
"""

from __future__ import annotations

import tempfile
from typing import Any

from trl_hotfix.authoring import absent, judge
from trl_hotfix.matching.versions import in_range
from trl_hotfix.model import Verdict

import tiny

ID, TARGET = "sft-model-ignores-num-items", "trl.trainer.sft_trainer:SFTTrainer.compute_loss"
OVERLAYS = ()
PARITY = False
EQUIVALENT = {
    "_ignores_items: `if share < _CLEARLY * mean:` -> `if share <= _CLEARLY * mean:`": "the two are never equal",
    "_ignores_items: `ignores = abs(float(loss) - mean) < abs(float(loss) - share)` -> "
    "`ignores = abs(float(loss) - mean) <= abs(float(loss) - share)`": "the two are never equal",
    "_ignores_items: `logits.detach()` with its gradient": "what is made of them is a number",
}
VARIANTS = "the loss is changed after the model, whatever part of it is trained"

SIZES = ((8, 1), (4, 2), (2, 4))


def train() -> tiny.TrainingResult:
    import transformers
    from trl import SFTTrainer

    if "compute_loss" not in vars(SFTTrainer) or not in_range(transformers.__version__, ">=4.48,<5.3"):
        return tiny.TrainingResult(absent("SFT has no loss of its own, or this transformers no such model, or all"))
    runs: dict[str, Any] = {}
    outcomes = []
    kinds = ["Mamba"]
    kinds += ["Gemma 3"] if in_range(transformers.__version__, ">=4.50,<4.54") else []
    for kind in kinds:
        for rows, micro_batches in SIZES:
            run = sft(kind, rows, micro_batches)
            outcome = judged(run, micro_batches)
            acted = tiny.acts(ID, TARGET, run)
            assert acted in (None, 2 * micro_batches if micro_batches > 1 else 0), f"{kind}: it acts {acted} times"
            runs[f"{kind} {rows}x{micro_batches}"] = run
            if micro_batches > 1:
                outcomes.append(outcome)
            else:
                assert outcome.verdict is Verdict.FIXED, f"{kind}: a step of one micro-batch is wrong: {outcome}"
    if len({outcome.verdict for outcome in outcomes}) != 1:
        raise AssertionError(f"the runs do not agree: {outcomes}")
    return tiny.result_of_runs(runs, outcomes[0])


def judged(run: Any, micro_batches: int) -> Any:
    """Judge the gradients of both steps by the formula, and what is logged. They are of one kind."""
    import torch

    outcomes = []
    logged = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    for step, loss_of_step in zip(run.steps, logged, strict=True):
        tokens = [int((part.inputs["labels"][:, 1:] != -100).sum()) for part in step.micro_batches]
        assert len(tokens) == micro_batches, tokens

        shares = [count / sum(tokens) for count in tokens]
        right, wrong = (_gradients(run.model, step, weights) for weights in (shares, [1.0] * micro_batches))
        with torch.no_grad():
            means = [float(cross_entropy(run.model, part.inputs)) for part in step.micro_batches]
        outcome = judge(projected(step.gradients), right=projected(right), wrong=projected(wrong))
        expected = sum(share * mean for share, mean in zip(shares, means, strict=True))
        # 4.46.3 logs the mean of the micro-batches.
        is_right = outcome.verdict is Verdict.FIXED
        assert not is_right or abs(loss_of_step - expected) < 1e-3, f"{loss_of_step} is logged, and not {expected}"
        outcomes.append(outcome)
    assert len(outcomes) == 2, outcomes
    assert outcomes[0].verdict is outcomes[1].verdict, outcomes
    return outcomes[0]


def _gradients(model: Any, step: Any, weights: list[float]) -> dict[str, Any]:
    """Return the gradients of the weighted sum of the means of the micro-batches."""

    def loss(model: Any) -> Any:
        means = [cross_entropy(model, part.inputs) for part in step.micro_batches]
        return sum(weight * mean for weight, mean in zip(weights, means, strict=True))

    return tiny.expected_gradients(model, step.weights, loss)


def cross_entropy(model: Any, inputs: Any) -> Any:
    """Return the mean over the predicted tokens of a batch, by the logits of the model."""
    from torch.nn.functional import cross_entropy

    logits = model(**{name: value for name, value in inputs.items() if name != "labels"}).logits
    return cross_entropy(logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())


def projected(gradients: dict[str, Any]) -> float:
    """Return one number for all gradients, which tells them apart."""
    import torch

    flat = torch.cat([value.flatten() for _, value in sorted(gradients.items())])
    return float((flat * torch.cos(torch.arange(len(flat)))).sum())


def unaffected() -> tiny.TrainingResult:
    """Train a Llama, whose loss is divided by the items, with accumulation, and a Mamba without, and evaluate both."""
    runs = {"Llama": sft("Llama", 2, 4), "Mamba": sft("Mamba", 4, 1)}
    for name, run in runs.items():
        assert not tiny.acts(ID, TARGET, run), f"{name}: the wrapper acts"
        run.evaluate()
        assert run.evaluations
    return tiny.result_of_runs(runs, absent("the model divides by the items, or nothing is accumulated"))


def model_of(kind: str, folder: str) -> Any:
    import torch
    from transformers import MambaConfig, MambaForCausalLM

    from tiny.vision import gemma3

    if kind == "Llama":
        return tiny.llama(folder, seed=0)
    if kind == "Gemma 3":
        return gemma3(seed=0)
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "time_step_rank": 2}
    return MambaForCausalLM(MambaConfig(**sizes, pad_token_id=0, eos_token_id=1, bos_token_id=None, use_cache=False))


def sft(kind: str, rows: int, micro_batches: int) -> Any:
    """Train two steps in micro-batches of so many rows, whose lengths differ."""
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from trl import SFTConfig, SFTTrainer

    class InOrder(tiny.stepwise(SFTTrainer)):  # type: ignore[misc]
        def _get_train_sampler(self, *args: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    def collate(examples: list[dict[str, Any]]) -> dict[str, Any]:
        import torch

        length = max(len(example["input_ids"]) for example in examples)
        batch: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "attention_mask": []}
        for example in examples:
            ids = example["input_ids"]
            padding = length - len(ids)
            batch["input_ids"].append(ids + [0] * padding)
            batch["labels"].append([-100, -100, *ids[2:]] + [-100] * padding)
            batch["attention_mask"].append([1] * len(ids) + [0] * padding)
        tensors = {name: torch.tensor(value) for name, value in batch.items()}
        if kind == "Gemma 3":
            tensors["token_type_ids"] = torch.zeros_like(tensors["input_ids"])
        return tensors

    lengths = (4, 5, 9, 12, 6, 4, 7, 15, 5, 4, 11, 8, 4, 6, 13, 5)
    data = Dataset.from_list(
        [{"input_ids": [3 + (row + 7 * place) % 50 for place in range(length)]} for row, length in enumerate(lengths)]
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = tiny.trainer(
            InOrder,
            model=model_of(kind, folder),
            args=tiny.config(
                SFTConfig,
                per_device_train_batch_size=rows,
                gradient_accumulation_steps=micro_batches,
                max_steps=2,
                optim="sgd",
                learning_rate=0.1,
                remove_unused_columns=False,
                dataset_kwargs={"skip_prepare_dataset": True},
                loss_type="nll",
                max_length=32,
                max_seq_length=32,
            ),
            train_dataset=data,
            eval_dataset=data.select(range(4)),
            data_collator=collate,
            tokenizer=tiny.tokenizer(),
        )
        trainer.train()
    return trainer
