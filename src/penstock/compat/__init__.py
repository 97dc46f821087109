"""Names that people know from other libraries, on top of `Pipeline`."""
