"""Which layout fits, and which is fastest: plans for a model on a cluster, before anything runs."""
