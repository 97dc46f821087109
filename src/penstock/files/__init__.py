"""Files of tensors on disk, and the folders of them that other libraries read and write."""
