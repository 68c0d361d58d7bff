"""kvtier beside LMCache and Mooncake: one harness, one driver for each system."""
