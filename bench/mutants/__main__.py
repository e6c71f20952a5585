"""``python -m bench.mutants``."""

from bench.mutants.counting import main

if __name__ == "__main__":
    main(prog_name="python -m bench.mutants")
