"""Where to cut a model so that no rank waits for another: what its pieces cost, and the best partition."""
