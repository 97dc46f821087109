"""The backward of a stage, whole or in two halves (I for the inputs, W for the weights)."""
