"""A batch: split into microbatches, compared between ranks, and its results put together."""
