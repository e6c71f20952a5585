"""Train two steps of two micro-batches with the real GRPOTrainer, on prompts of unequal lengths: in full, and adapters.

Losses, accumulated gradients and the ``kl`` metric are compared with the paper (arXiv:2402.03300, equations 3 and 4).
The log-probs in it are those that the plain model gives each row without its padding, by itself.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

from trl_hotfix.authoring import absent, judge

import tiny
from tiny import grpo_steps

OVERLAYS = ()
PARITY = True

ID, TARGET = "grpo-no-attention-mask", "trl.trainer.grpo_trainer:GRPOTrainer.compute_loss"
GROUP = 4
"""Completions of a prompt."""
COMPLETIONS = ((5, 1), (3, 9, 7, 1), (11, 4, 6, 8), (12, 7, 1))
"""Their tokens in the first micro-batch: 1 is the end of a sequence, and 0 padding."""
PROMPTS = (
    ("w1 w2 w3 w4 w5", "w6 w7"),
    ("w8", "w3 w1 w4"),
    ("w2 w9", "w5 w6 w7 w8 w9 w1"),
    ("w4 w5 w6 w2", "w7"),
)
"""Those of each micro-batch, of which the longest are cut to four tokens in a run."""
OF_ONE_LENGTH = (("w1 w2", "w6 w7"), ("w8 w3", "w3 w1"), ("w2 w9", "w5 w6"), ("w4 w5", "w7 w3"))


def train() -> tiny.TrainingResult:
    import trl
    from packaging.version import Version

    if not Version("0.14") <= Version(trl.__version__) < Version("0.16"):
        return tiny.TrainingResult(absent("it has no GRPO, or passes the mask since 0.15.0"))
    runs = {"full": _run(PROMPTS), "cut": _run(PROMPTS, max_prompt_length=4), "adapter": _run(PROMPTS, tiny.lora())}
    outcomes = [grpo_steps.judged_steps(run) for run in runs.values()]
    for name, run in runs.items():
        if (acted := tiny.acts(ID, TARGET, run.trainer)) not in (None, len(PROMPTS)):
            raise AssertionError(f"{name}: the wrapper acts in {acted} micro-batches instead of {len(PROMPTS)}")
        outcomes += [judge(micro_batch.kl, **micro_batch.expected_kl) for micro_batch in run.micro_batches]
    if len({outcome.verdict for outcome in outcomes}) != 1:
        raise AssertionError(f"losses and kl are not all of one kind: {outcomes}")
    return grpo_steps.several_runs(runs, outcomes[0])


def unaffected() -> tiny.TrainingResult:
    """Train on prompts of one length, on one prompt at a time, and on prompts whose padding is cut off."""
    alone = [(prompt,) for prompts in PROMPTS for prompt in prompts][:4]
    runs = {
        "one length": _run(OF_ONE_LENGTH),
        "one prompt": _run(alone),
        "cut": _run(PROMPTS, max_prompt_length=1),
        "an adapter": _run(OF_ONE_LENGTH, tiny.lora()),
    }
    for name, run in runs.items():
        if tiny.acts(ID, TARGET, run.trainer):
            raise AssertionError(f"the wrapper acts: {name}")
    return grpo_steps.several_runs(runs, absent("no prompt is padded"))


def _run(
    micro_batches: Sequence[Sequence[str]], peft_config: Any = None, *, max_prompt_length: int = 8
) -> tiny.FormulaSteps:
    """Train on these prompts. The policy moves away from its reference before."""
    import torch
    from torch.utils.data import DataLoader
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    run = tiny.FormulaSteps()
    sequences: list[Any] = []
    # 0.14.0 has several completions of each prompt of the batch, later releases one of each of its rows.
    in_the_loss = not hasattr(GRPOTrainer, "_get_per_token_logps")
    rows = [
        {"prompt": prompt}
        for prompts in micro_batches
        for prompt in prompts
        for _ in range(1 if in_the_loss else GROUP)
    ]

    class RecordSteps(GRPOTrainer):  # type: ignore[misc, valid-type]
        def get_train_dataloader(self) -> Any:
            """Return the micro-batches in their order, which differs between releases otherwise."""
            return DataLoader(rows, len(rows) // len(micro_batches), collate_fn=list)

        def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(model, *args, **kwargs)
            prompts = micro_batches[len(run.micro_batches)]
            lengths = [min(len(prompt.split()), max_prompt_length) for prompt in prompts]
            expected, expected_kl = {}, {}
            for name, counted in (("right", lengths), ("wrong", [max(lengths)] * len(lengths))):
                expected[name], kl = _loss_and_kl(policy, reference, sequences[-1], counted, self.beta)
                expected_kl[name] = float(kl.detach())
            run.add(expected, trainable)
            run.micro_batches.append(
                grpo_steps.MicroBatch(
                    {},
                    self.model.training,
                    float(loss.detach()),
                    float(self._metrics["kl"][-1]),
                    {name: float(value.detach()) for name, value in expected.items()},
                    expected_kl,
                )
            )
            return loss

    class RecordGradients(TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            run.end_step(trainable)

    with tempfile.TemporaryDirectory() as folder:
        policy, reference = (tiny.llama(folder, seed=0) for _ in range(2))
        for model in (policy, reference):
            # Scaled, the head gives probabilities that differ, and the first norm no gradient in which rounding shows.
            model.get_output_embeddings().weight.data *= 5
            model.get_input_embeddings().weight.data *= 50
        run.trainer = trainer = tiny.grpo_of_one_length(
            RecordSteps,
            policy,
            peft_config,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_steps=2,
            max_prompt_length=max_prompt_length,
            optim="sgd",
            learning_rate=0.1,
        )
        policy = trainer.model
        moved = 1.0 if hasattr(policy, "peft_config") else 0.03

        def generate(input_ids: Any, **kwargs: Any) -> Any:
            groups = len(input_ids) if in_the_loss else len(input_ids) // GROUP
            number = len(sequences)
            completions = [
                [token if token == 1 else token + number + 20 * group for token in tokens] + [0] * (4 - len(tokens))
                for group in range(groups)
                for tokens in COMPLETIONS
            ]
            ids = input_ids.repeat_interleave(GROUP, 0) if in_the_loss else input_ids
            sequences.append(torch.cat([ids, torch.tensor(completions)], dim=1))
            return sequences[-1]

        policy.generate = generate
        trainable = {name: value for name, value in policy.named_parameters() if value.requires_grad}
        with torch.no_grad():
            for number, parameter in enumerate(trainable.values()):
                parameter.add_(moved * torch.cos(number + torch.arange(parameter.numel())).reshape(parameter.shape))
        run.measure_factor(trainer)
        trainer.add_callback(RecordGradients)
        trainer.train()
    if [micro_batch.is_training for micro_batch in run.micro_batches] != [True] * 4:
        raise AssertionError(f"expected four micro-batches: {run.micro_batches}")
    return run


def _loss_and_kl(policy: Any, reference: Any, sequences: Any, lengths: Sequence[int], beta: float) -> tuple[Any, Any]:
    """Return both by the formula, if prompts have so many tokens, as means over sequences of means over their tokens.

    The rewards of a group are equidistant; with 1e-4 their standard deviation is 1.
    """
    import torch

    places = torch.arange(GROUP, dtype=torch.float32)
    advantages = (1 - 1e-4) * (places - places.mean()) / places.std()
    losses, kls = [], []
    for row, tokens in enumerate(sequences):
        kept = len(COMPLETIONS[row % GROUP])
        start = len(tokens) - 4
        ids = tokens[start - lengths[row // GROUP] : start + kept].unsqueeze(0)

        def log_probs(model: Any, ids: Any = ids, kept: int = kept) -> Any:
            logits = model(input_ids=ids, use_cache=False).logits[0, -kept - 1 : -1]
            return logits.log_softmax(-1).gather(-1, ids[0, -kept:, None])[:, 0]

        current = log_probs(policy)
        log_ratio = log_probs(reference).detach() - current
        kl = torch.exp(log_ratio) - log_ratio - 1
        ratio = torch.exp(current - current.detach())
        losses.append((beta * kl - ratio * advantages[row % GROUP]).mean())
        kls.append(kl.mean())
    return torch.stack(losses).mean(), torch.stack(kls).mean()
