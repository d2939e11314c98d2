"""The recipe: one YAML file that says what to build and how."""
