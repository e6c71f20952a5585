"""``python -m bench``."""

from bench.commands import commands

if __name__ == "__main__":
    commands(prog_name="python -m bench")
