"""One run of the model on its example: which units are called, and what each call needs."""
