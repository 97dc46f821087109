"""The data of a training run: where tokens come from, and batches of them."""
