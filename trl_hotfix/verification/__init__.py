"""Red, green, red on request: ``cells`` are the verdicts on one patch beside the TRL that is installed."""
