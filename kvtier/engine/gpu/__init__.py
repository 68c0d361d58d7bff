"""The engine on a GPU: its device, and attention by kvtier's kernels."""
