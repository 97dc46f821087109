"""What stands between gradients and the optimizer: norms, loss scaling, precision, groups, tied parameters."""
