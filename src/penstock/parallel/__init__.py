"""Around the pipeline: replicas of it (data parallel, plain or sharded), and tensors spread over ranks."""
