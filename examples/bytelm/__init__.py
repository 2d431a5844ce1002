"""The pieces of `examples/train_lm.py`: data, model, training loop, probes, generation."""
