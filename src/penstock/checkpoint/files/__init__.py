"""Files of tensors on disk, and the folders of them that other libraries read and write."""

TOKENIZER_FILES = (  # what a tokenizer may consist of, beside its own names for vocabularies
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
)
