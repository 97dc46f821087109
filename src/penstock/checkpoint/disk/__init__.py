"""A checkpoint as files: manifest, tensors, folder and lock."""
