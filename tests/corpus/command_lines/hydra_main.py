import hydra
from trl import SFTConfig, SFTTrainer


@hydra.main(version_base=None, config_path="conf", config_name="sft")
def main(cfg):
    args = SFTConfig(**cfg.training)
    SFTTrainer(cfg.model, args=args).train()


if __name__ == "__main__":
    main()
