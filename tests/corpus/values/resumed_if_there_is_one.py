import pathlib

from trl import SFTConfig, SFTTrainer


def last_checkpoint(folder):
    found = sorted(pathlib.Path(folder).glob("checkpoint-*"))
    return str(found[-1]) if found else None


args = SFTConfig(output_dir="out", resume_from_checkpoint=None)
trainer = SFTTrainer("gpt2", args=args)
trainer.train(resume_from_checkpoint=last_checkpoint(args.output_dir))
SFTTrainer("gpt2", args=args).train(resume_from_checkpoint=args.resume_from_checkpoint)
