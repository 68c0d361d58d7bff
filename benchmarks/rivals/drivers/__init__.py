"""One script for each system, run by the interpreter of its own environment.

A driver starts its system's daemon, plays the engine, and measures; it answers one JSON line for
each JSON line it reads (serve.py says how). The harness has the same orders for all.
"""
