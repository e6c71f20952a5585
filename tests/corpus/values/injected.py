import functools

from trl import SFTConfig, SFTTrainer


def with_preset(**preset):
    def decorate(function):
        @functools.wraps(function)
        def start(**given):
            return function(**{**preset, **given})

        return start

    return decorate


@with_preset(packing=True)
def main(packing=False):
    SFTTrainer("gpt2", args=SFTConfig("out", packing=packing)).train()


main()
