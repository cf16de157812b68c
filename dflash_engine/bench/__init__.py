"""This engine beside mlx-lm and other engines for DFlash: the same prompts, in turn."""
