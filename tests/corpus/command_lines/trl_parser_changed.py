from trl import DPOConfig, DPOTrainer, TrlParser


def main():
    (args,) = TrlParser(DPOConfig).parse_args_and_config()
    args.gradient_checkpointing_kwargs = {"use_reentrant": False}
    if args.loss_type == "ipo":
        args.padding_free = True
    DPOTrainer("gpt2", args=args).train()


main()
