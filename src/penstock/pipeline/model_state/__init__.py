"""The values of a model whose stages are spread over ranks: state dicts, whole tensors, what other ranks hold."""
