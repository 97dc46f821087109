"""An nn.Module into stages."""
