"""`q38 run`: every step of a recipe, resumable, with one report."""
