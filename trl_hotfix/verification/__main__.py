"""``python -m trl_hotfix.verification OUT [ID ...]``: the cells of patches, a line of JSON each."""

import sys

from .cells import main

main(sys.argv[1:])
