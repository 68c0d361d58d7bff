"""What the engine does not use, to compare with."""
