"""Where every expert row lives: layout, routing profiles, placement."""
