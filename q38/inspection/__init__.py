"""What a checkpoint holds and what is wrong with it, from headers alone."""
