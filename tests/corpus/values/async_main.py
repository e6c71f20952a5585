import asyncio

from trl import SFTConfig, SFTTrainer


async def main(packing):
    SFTTrainer("gpt2", args=SFTConfig("out", packing=packing)).train()


asyncio.run(main(True))
