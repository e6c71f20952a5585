from trl import SFTConfig, SFTTrainer


class PackedTrainer(SFTTrainer):
    def __init__(self, model, args=None, **kwargs):
        args = args or SFTConfig(output_dir="out")
        args.packing = True
        super().__init__(model, args=args, **kwargs)


PackedTrainer("gpt2").train()
