"""Finding what fails silently in a drafter's checkpoint: the plausible readings, scored on the target's own text."""
