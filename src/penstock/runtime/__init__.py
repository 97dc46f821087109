"""The runtime: runs a proved program on real tensors, on threads or processes."""
