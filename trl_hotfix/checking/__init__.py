"""``check``: asks a user's own script whether its run trains right.

The script runs until it makes a trainer of TRL. There the process forks, once for each run. A fork goes on through the
script to its own ``train()``, trains a few steps with what a relation changes, and ends.
"""
