"""Preferences about images, tiny models that see them, and runs of the real DPOTrainer beside DPO's formula.

The formula takes the images from the rows that are written down here, and not from the batch, which may lack them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .dpo_steps import BETA, MicroBatch, sigmoid_loss, whole_sequences
from .measuring import TrainingResult, gradient_differences
from .models import lora, same_adapter
from .steps import FormulaSteps
from .trainers import config, trainer
from .vision import EXPANDED, IMAGE_TOKENS, llava, processor

IMAGES = [[0.1 * index, 0.5 - 0.2 * index, -0.3] for index in range(8)]
"""The image of each row."""
PROMPTS = [f"<image> w{index}" + " w9" * (index // 3) for index in range(8)]
CHOSEN = [f" w{20 + index}" + " w30" * (index // 2) for index in range(8)]
REJECTED = [f" w{40 + index}" + " w31" * (index // 4) for index in range(8)]
# Of two rows the longer prompt has the longer completions: otherwise 0.12 cuts off the last token.

Make = Callable[..., Any]


def rows(*, ends: bool, images: bool = True) -> Any:
    """Return the dataset. ``ends``: its completions have an end, which TRL does not append from 0.29 on.

    Without images a word stands in the place of each.
    """
    from datasets import Dataset

    end = " <eos>" if ends else ""
    columns = {
        "prompt": PROMPTS if images else [prompt.replace("<image>", "w8") for prompt in PROMPTS],
        "chosen": [text + end for text in CHOSEN],
        "rejected": [text + end for text in REJECTED],
    }
    return Dataset.from_dict({**({"images": [[image] for image in IMAGES]} if images else {}), **columns})


def pixels(images: Any) -> dict[str, Any]:
    """Return what Llava takes for an image: ``(images, 3, 4, 4)``."""
    import torch

    return {"pixel_values": torch.tensor(images)[:, :, None, None].expand(-1, 3, 4, 4).contiguous()}


def pixels_with_mask(images: Any) -> dict[str, Any]:
    """Return what Idefics takes, of two copies of each image: ``(rows, 2, 3, 8, 8)``, of which a part is padding."""
    import torch

    values = torch.tensor(images)[:, None, :, None, None] * torch.linspace(0.5, 1.5, 8)[:, None]
    mask = torch.ones(len(images), 2, 8, 8, dtype=torch.long)
    mask[:, 1, :, 4:] = 0
    return {"pixel_values": values.expand(-1, 2, 3, 8, 8).contiguous(), "pixel_attention_mask": mask}


def words_and_images(features: Callable[[Any], dict[str, Any]] = pixels, expanded: str = EXPANDED) -> Any:
    """Return a processor that takes one row, as DPO calls it up to 0.28, and a batch of rows, as from 0.29 on."""
    from transformers import BatchFeature

    base: Any = type(processor())

    class Processor(base):  # type: ignore[misc]
        def __call__(self, images: Any = None, text: Any = None, **kwargs: Any) -> Any:
            texts = [text] if isinstance(text, str) else list(text)
            texts = [part.replace("<image>", expanded) for part in texts]
            known = ("padding", "padding_side", "add_special_tokens", "return_tensors")
            data = dict(self.tokenizer(texts, **{name: kwargs[name] for name in known if name in kwargs}))
            by_row = [images] if isinstance(text, str) else images or []
            flat = [image for row in by_row for image in row]
            return BatchFeature({**data, **(features(flat) if flat else {})})

    return Processor()


def with_weights(model: Any, seed: int) -> Any:
    """Give a model weights that depend on nothing but ``seed``, the places and the shapes of its parameters."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator) + ("norm" in name))
    return model


def tiny_llava(*, seed: int) -> Any:
    model = with_weights(llava(seed=seed), seed)
    # transformers 4.46 takes a prompt with fewer tokens for one that a processor has not expanded.
    model.config.image_seq_length = IMAGE_TOKENS
    return model


def tiny_idefics(*, seed: int) -> Any:
    """Return an Idefics3 of two layers, which takes one token for an image of 8 x 8."""
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    layers: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    layers |= {"num_attention_heads": 2}
    text = {"model_type": "llama", "vocab_size": 64, **layers, "num_key_value_heads": 2, "max_position_embeddings": 64}
    settings = {"image_token_id": 63, "scale_factor": 2, "pad_token_id": 0}
    vision = {**layers, "image_size": 8, "patch_size": 4}
    text |= {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    model = Idefics3ForConditionalGeneration(Idefics3Config(vision_config=vision, text_config=text, **settings))
    return with_weights(model, seed)


def tiny_qwen(*, seed: int) -> Any:
    """Return a Qwen2-VL of two layers, which needs ``image_grid_thw`` beside pixel values."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    text: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}
    text |= {"bos_token_id": None, "eos_token_id": 1, "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}
    ids = {"image_token_id": 63, "video_token_id": 61, "vision_start_token_id": 60, "vision_end_token_id": 59}
    vision = {"depth": 2, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
    return with_weights(Qwen2VLForConditionalGeneration(Qwen2VLConfig(vision_config=vision, **text, **ids)), seed)


def log_probs(model: Any, batch: Mapping[str, Any], images: Callable[[Any], dict[str, Any]] | None) -> tuple[Any, Any]:
    """Return the summed log-probs of the chosen and the rejected completions, each ``(rows,)``.

    ``images`` makes what the model takes of the images of these rows; None leaves them out.
    """
    if "completion_mask" in batch:
        parts = (batch[name].chunk(2) for name in ("input_ids", "attention_mask", "completion_mask"))
        sides = list(zip(*parts, strict=True))
    else:
        sides = [whole_sequences(batch, side) for side in ("chosen", "rejected")]
    first, last = (words_and_images().tokenizer.convert_tokens_to_ids(word) for word in ("w0", "w7"))

    def of_side(ids: Any, attention: Any, completion: Any) -> Any:
        keys = [next(token - first for token in row if first <= token <= last) for row in ids.tolist()]
        features = {} if images is None else images([IMAGES[key] for key in keys])
        logits = model(input_ids=ids, attention_mask=attention, use_cache=False, **features).logits[:, :-1]
        of_tokens = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
        return (of_tokens * completion[:, 1:]).sum(1)

    chosen, rejected = (of_side(*side) for side in sides)
    return chosen, rejected


class VisionSteps(FormulaSteps):
    """A run in which a parameter may have no gradient: one that would see an image."""

    def end_step(self, trainable: Mapping[str, Any]) -> None:
        """Keep the accumulated gradients of the trainer and of the formulas, 0 where there is none."""
        import torch

        zeros = {name: torch.zeros_like(parameter) for name, parameter in trainable.items()}
        gradients = {name: parameter.grad for name, parameter in trainable.items() if parameter.grad is not None}
        self.gradients.append({**zeros, **{name: gradient.clone() for name, gradient in gradients.items()}})
        self.expected.append(
            {
                kind: {name: zeros[name] + self._factor * value for name, value in sums.items()}
                for kind, sums in self._sums.items()
            }
        )
        self._sums.clear()

    def difference(self, kind: str) -> float:
        """Return by how much a loss or a gradient differs from those of the formula ``kind`` at most."""
        differences = [abs(part.loss - part.expected[kind]) for part in self.micro_batches]
        for gradients, expected in zip(self.gradients, self.expected, strict=True):
            differences += gradient_differences(gradients, expected[kind])
        return max(differences)

    def of_images(self) -> list[float]:
        """Return for each step the largest gradient of a parameter of the vision tower."""
        return [
            max(float(value.abs().max()) for name, value in gradients.items() if "vision" in name)
            for gradients in self.gradients
        ]

    @property
    def first_step(self) -> TrainingResult:
        """The first loss and the first gradients, by names that are equal under every transformers."""
        result = super().first_step
        gradients = {
            name.replace("language_model.", "").replace("model.", ""): value for name, value in result.gradients.items()
        }
        assert len(gradients) == len(result.gradients)
        return TrainingResult(None, result.loss, gradients)


def vision_dpo(
    make: Make = tiny_llava,
    features: Callable[[Any], dict[str, Any]] = pixels,
    *,
    expanded: str = EXPANDED,
    prepare: Callable[[Any], None] = lambda trainer: None,
    data_collator: Any = None,
    adapter: bool = False,
    with_formula: bool = True,
    **settings: Any,
) -> VisionSteps:
    """Train two steps of two micro-batches of two rows, evaluate three, and compute the formula beside each batch.

    The formula's ``right`` has the images, its ``wrong`` has not. The policy moves when the training begins.
    ``features`` makes what the model takes of the images of some rows, and ``expanded`` is what stands for an image in
    a prompt. ``prepare(trainer)`` is called before the training. With an adapter there is no formula.
    """
    import torch
    from transformers import TrainerCallback
    from trl import DPOConfig, DPOTrainer

    run = VisionSteps()
    # The method that the evaluation calls too.
    method = "get_batch_loss_metrics" if hasattr(DPOTrainer, "get_batch_loss_metrics") else "compute_loss"

    def formula(batch: Mapping[str, Any], images: Any) -> Any:
        with torch.no_grad():
            of_reference = log_probs(untouched, batch, images)
        with torch.enable_grad():
            return sigmoid_loss(log_probs(policy, batch, images), of_reference)

    def recorded(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        batch = {name: value.clone() for name, value in inputs.items() if hasattr(value, "clone")}
        kinds = {"right": features, "wrong": None} if with_formula else {}
        expected = {kind: formula(batch, images) for kind, images in kinds.items()}
        if self.model.training:
            run.add(expected, trainable)
        result = getattr(super(Recorder, self), method)(model, inputs, *args, **kwargs)
        loss = result[0] if isinstance(result, tuple) else result
        values = {name: float(value.detach()) for name, value in expected.items()}
        run.micro_batches.append(MicroBatch(batch, self.model.training, float(loss.detach()), values, 0))
        return result

    Recorder = type("Recorder", (DPOTrainer,), {method: recorded})

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *args: Any, optimizer: Any, **kwargs: Any) -> None:
            with torch.no_grad():
                for number, parameter in enumerate(trainable.values()):
                    parameter.add_(0.05 * torch.cos(number + torch.arange(parameter.numel()).reshape(parameter.shape)))
            getattr(optimizer, "optimizer", optimizer).register_step_pre_hook(lambda *_: run.end_step(trainable))

    defaults = {"max_steps": 2, "gradient_accumulation_steps": 2, "optim": "sgd", "learning_rate": 0.1, "beta": BETA}
    defaults |= {"max_length": 48, "max_prompt_length": 24}
    policy, untouched = make(seed=0), make(seed=1)
    data = rows(ends=method == "compute_loss")
    run.trainer = trainer(
        Recorder,
        model=policy,
        ref_model=None if adapter else make(seed=1),
        args=config(DPOConfig, **{**defaults, **settings}),
        train_dataset=data,
        eval_dataset=data.select(range(3)),
        tokenizer=words_and_images(features, expanded),
        callbacks=[Steps()],
        data_collator=data_collator,
        **({"peft_config": lora()} if adapter else {}),
    )
    policy = run.trainer.model
    if adapter:
        same_adapter(policy)
    trainable = {name: value for name, value in policy.named_parameters() if value.requires_grad}
    run.measure_factor(run.trainer)
    prepare(run.trainer)
    run.trainer.train()
    run.trainer.evaluate()
    return run
