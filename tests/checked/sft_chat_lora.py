import argparse

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="model")
    parser.add_argument("--rank", type=int, default=8)
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(
        args.model,
        quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
        if torch.cuda.is_available()
        else None,
        attn_implementation="flash_attention_2",
        torch_dtype=torch.bfloat16,
    )
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    splits = load_dataset("json", data_files="chat.jsonl", split="train").train_test_split(0.25, seed=1)
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir="out",
            per_device_train_batch_size=1,
            gradient_accumulation_steps=16,
            gradient_checkpointing=True,
            eval_strategy="steps",
            eval_steps=50,
            report_to="wandb",
            deepspeed="zero3.json",
        ),
        train_dataset=splits["train"],
        eval_dataset=splits["test"],
        processing_class=tokenizer,
        peft_config=LoraConfig(r=args.rank, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()


if __name__ == "__main__":
    main()
