"""Tools around the core. They use the core; what of it reaches one goes through `penstock.tool`."""
