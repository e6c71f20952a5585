"""``python -m trl_hotfix.verification OUT [ID ...]`` writes the cells of patches to OUT, a line of JSON each."""

import sys

from .cells import main

main(sys.argv[1:])
