import hydra
from hydra.utils import instantiate


@hydra.main(version_base=None, config_path="conf", config_name="built")
def main(cfg):
    trainer = instantiate(cfg.trainer, args=instantiate(cfg.args))
    trainer.train()


if __name__ == "__main__":
    main()
