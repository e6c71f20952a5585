from trl import SFTConfig, SFTTrainer


class Experiment:
    trainer_class = SFTTrainer
    packing = True

    def __init__(self, out):
        self.args = SFTConfig(output_dir=out, packing=self.packing)

    def run(self):
        self.trainer_class("gpt2", args=self.args).train()


Experiment("out").run()
