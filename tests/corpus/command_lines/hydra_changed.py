import hydra
from trl import SFTConfig, SFTTrainer


def train(settings, model):
    args = SFTConfig(**settings)
    SFTTrainer(model, args=args).train()


@hydra.main(version_base=None, config_path="conf", config_name="sft")
def main(cfg):
    cfg["training"]["packing"] = False
    train(cfg.training, cfg["model"])


if __name__ == "__main__":
    main()
