"""The models that a configuration names: the built-in GPT, those of transformers, adapters, frozen parameters."""
