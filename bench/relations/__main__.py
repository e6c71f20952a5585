"""``python -m bench.relations``."""

from bench.relations.asking import command

if __name__ == "__main__":
    command(prog_name="python -m bench.relations")
