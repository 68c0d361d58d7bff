"""Models as files have them: weights, shapes and tokenizers."""
